"""The flags of other servers that Baton rejects, with an alternative or a reason."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Refusal:
    """Flags of one subject. `*` matches any characters."""

    flags: str
    """Separated by spaces."""
    reason: str
    """A clause that follows a colon."""

    def covers(self, flag: str) -> bool:
        return any(fnmatchcase(flag, pattern) for pattern in self.flags.split())


REFUSALS = (
    Refusal(
        "--pp-size --pipeline-parallel-size --pp -pp --dp-size "
        "--data-parallel-* --dp -dp --ep --ep-* --expert-parallel-size --enable-expert-parallel --eplb-* "
        "--enable-eplb --nnodes --node-rank --dist-* --nccl-* --gpu-id-step --enable-dp-* --enable-ep-moe "
        "--distributed-executor-backend --enable-pdmux --*all-reduce* --*allreduce* --api-server-count "
        "--enable-p2p-check --init-expert-location --worker-cls --headless --additional-config "
        "--disable-frontend-multiprocessing --enable-symm-mem --enable-torch-symm-mem --enable-mscclpp "
        "--enable-nccl-nvls --decode-context-*",
        "a worker divides layers only (--tensor-parallel-size); start more workers for more capacity "
        "(`baton up --decode 4`)",
    ),
    Refusal(
        "--base-gpu-id",
        "choose the GPU with --device cuda:N",
    ),
    Refusal(
        "--numa-node",
        "start the process under numactl",
    ),
    Refusal(
        "--disable-cuda-graph* --cuda-graph-* --cudagraph-* --enforce-eager --enable-cudagraph-gc "
        "--enable-profile-cuda-graph --max-seq-len-to-capture",
        "--graph-rows, --graph-memory and --graph-seconds limit CUDA graphs; --graph-rows 0 disables them",
    ),
    Refusal(
        "--disable-overlap* --enable-two-batch-overlap --enable-single-batch-overlap --async-scheduling "
        "--no-async-scheduling --tbo-*",
        "--overlap is on by default; penalties, grammars and stop conditions apply to every step",
    ),
    Refusal(
        "--grammar-backend --guided-decoding-backend --structured-outputs-config* --constrained-json-* "
        "--disable-outlines-disk-cache",
        "llguidance is the only grammar backend",
    ),
    Refusal(
        "--attention-backend --*-attention-backend --sampling-backend --moe-* --enable-torch-compile "
        "--torch-compile-* --triton-* --flashinfer-* --compilation-config -O --model-impl --deepep-* "
        "--enable-deepep-moe --enable-flashinfer-* --enable-triton-* --nsa-* --enable-fp32-lm-head "
        "--enable-double-sparsity --ds-* --disable-shared-experts-fusion --disable-flashinfer-* "
        "--disable-sliding-window --disable-cascade-attn --optimization-level --swa-full-tokens-ratio "
        "--hybrid-kvcache-ratio --disable-hybrid-* --*mamba* --sm-group-num",
        "each device type has one implementation; choose the device with --device",
    ),
    Refusal(
        "--enable-deterministic-inference",
        "sampling is always deterministic: random numbers depend on seed and position only, not on the batch",
    ),
    Refusal(
        "--enable-priority-scheduling --schedule-* --scheduling-policy --priority-scheduling-* "
        "--scheduler-* --num-scheduler-steps --num-continuous-decode-steps --num-reserved-decode-tokens "
        "--disable-hybrid-kv-cache-manager --max-micro-batch-size",
        "a worker runs requests in the order of their arrival, class batch last; a router orders "
        "requests by class (x-baton-class) and tenant",
    ),
    Refusal(
        "--enable-mixed-chunk",
        "prompts and generation always share forward passes; --mixed-chunk-tokens limits prompt tokens",
    ),
    Refusal(
        "--max-prefill-tokens --prefill-max-requests --max-num-partial-prefills "
        "--max-long-partial-prefills --long-prefill-token-threshold --enable-chunked-prefill "
        "--no-enable-chunked-prefill --dynamic-batch-* --enable-dynamic-*",
        "long prompts are always computed in chunks; --chunk-tokens (--chunked-prefill-size) limits a pass",
    ),
    Refusal(
        "--watchdog-timeout --soft-watchdog-timeout --gc-warning-* --crash-dump-folder "
        "--enable-nan-detection --debug-* --show-time-cost",
        "a worker exits if its engine fails, and `baton up` or Kubernetes restarts it",
    ),
    Refusal(
        "--enable-metrics* --disable-log-stats --bucket-* --collect-tokens-histogram "
        "--generation-tokens-buckets --prompt-tokens-buckets --tokenizer-metrics-* --prometheus-* "
        "--enable-expert-distribution-metrics --expert-distribution-* --enable-server-load-tracking "
        "--show-hidden-metrics-for-version --enable-request-time-stats-logging",
        "/metrics, /load and /debug/requests are always available on the API port",
    ),
    Refusal(
        "--disable-log-requests --no-enable-log-requests",
        "requests are logged only with --log-requests",
    ),
    Refusal(
        "--log-level* --uvicorn-log-level --disable-uvicorn-access-log --decode-log-interval --log-dir "
        "--load-watch-interval --log-config-file --enable-log-outputs --enable-log-deltas",
        "the log has no levels; --log-requests adds details of requests",
    ),
    Refusal(
        "--disaggregation-mode",
        "use `baton prefill` and `baton decode`, or `baton up` for both",
    ),
    Refusal(
        "--disaggregation-* --kv-transfer-config --prefill-round-robin-balance",
        "`baton prefill` and `baton decode` transfer KV blocks by NIXL and configure themselves",
    ),
    Refusal(
        "--kv-events-config",
        "set the address of KV events with --kv-events, and of their replay with --kv-replay",
    ),
    Refusal(
        "--enable-prefix-caching --no-enable-prefix-caching --disable-radix-cache --radix-* "
        "--disable-chunked-prefix-cache --prefix-caching-hash-algo",
        "the prefix cache is always enabled and does not change responses",
    ),
    Refusal(
        "--hicache-* --enable-hierarchical-cache --enable-lmcache --swap-space --cpu-offload-* "
        "--kv-offloading-* --offload-* --enable-weights-cpu-backup --enable-memory-saver "
        "--enable-sleep-mode --sleep-on-idle",
        "weights and KV cache stay on the --device; --kv-cache-memory sets the size of the cache",
    ),
    Refusal(
        "--page-size --block-size",
        "KV blocks have 16 tokens on every device",
    ),
    Refusal(
        "--num-gpu-blocks-override",
        "use --kv-cache-tokens, with 16 tokens per block",
    ),
    Refusal(
        "--calculate-kv-scales",
        "--kv-cache-dtype fp8 stores keys and values without scales",
    ),
    Refusal(
        "--download-dir",
        "set the download folder with the environment variable HF_HOME",
    ),
    Refusal(
        "--quantization* -q --torchao-config --load-format --custom-weight-loader --weight-* "
        "--safetensors-load-strategy --ignore-patterns --config-format --max-parallel-loading-workers "
        "--model-loader-extra-config --remote-instance-* --delete-ckpt-after-loading",
        "the format is detected; --quantize converts or expands weights while loading",
    ),
    Refusal(
        "--revision --code-revision --tokenizer-revision --hf-config-path --hf-token",
        "download the revision with `baton fetch --revision` (token: environment variable HF_TOKEN) and "
        "use the folder as MODEL",
    ),
    Refusal(
        "--tokenizer-path --tokenizer --tokenizer-mode --skip-tokenizer-init --tokenizer-worker-num "
        "--enable-tokenizer-batch-encode --tokenizer-pool-* --tokenizer-cache-*",
        "the tokenizer comes from the folder of the model",
    ),
    Refusal(
        "--trust-remote-code",
        "Baton runs no code from the folder of a model",
    ),
    Refusal(
        "--hf-overrides --json-model-override-args --rope-scaling --rope-theta",
        "edit config.json in the folder of the model",
    ),
    Refusal(
        "--generation-config",
        "use --sampling-defaults model or --sampling-defaults openai",
    ),
    Refusal(
        "--preferred-sampling-params --override-generation-config",
        "set them in generation_config.json in the folder of the model",
    ),
    Refusal(
        "--max-loras-per-batch --lora-eviction-policy --lora-backend --lora-dtype --lora-target-modules "
        "--fully-sharded-loras --max-lora-chunk-size --enable-lora-overlap-loading --lora-extra-vocab-size",
        "one batch may use all loaded adapters; --max-loras and --max-lora-rank limit them",
    ),
    Refusal(
        "--speculative-* --spec-*",
        "use --speculation, --speculation-tokens and --draft-model",
    ),
    Refusal(
        "--enable-multimodal --mm-* --limit-mm-per-prompt --disable-fast-image-processor "
        "--allowed-local-media-path --keep-mm-* --disable-mm-* --interleave-mm-strings",
        "only text models are supported",
    ),
    Refusal(
        "--is-embedding --task --runner --convert --override-pooler-config --pooler-config",
        "/v1/embeddings is always available; --pooling mean or last enables it for any model",
    ),
    Refusal(
        "--enable-auto-tool-choice",
        "tool calls are parsed whenever a request has tools; --tool-call-parser sets their format",
    ),
    Refusal(
        "--tool-parser-plugin",
        "use --tool-call-parser with a built-in parser",
    ),
    Refusal(
        "--exclude-tools-when-tool-choice-none",
        "the template always receives the tools of the request",
    ),
    Refusal(
        "--max-logprobs",
        "requests may set up to 20 logprobs",
    ),
    Refusal(
        "--max-num-queued-tokens",
        "--max-queued limits the queue, in requests",
    ),
    Refusal(
        "--sse-keep-alive-interval",
        "the interval is fixed: a silent stream sends a comment every 15 seconds",
    ),
    Refusal(
        "--h11-*",
        "limits of requests are fixed: docs/reference/limits.md",
    ),
    Refusal(
        "--disable-fastapi-docs --enable-tokenizer-info-endpoint",
        "Baton has no such page",
    ),
    Refusal(
        "--enable-reasoning",
        "--reasoning-parser is sufficient",
    ),
    Refusal(
        "--response-role",
        "responses always have the role assistant",
    ),
    Refusal(
        "--chat-template-content-format",
        "the format is detected from the template",
    ),
    Refusal(
        "--completion-template",
        "`suffix` is not supported",
    ),
    Refusal(
        "--enable-force-include-usage",
        "use --stream-include-usage, which requests can override",
    ),
    Refusal(
        "--enable-request-id-headers --request-id-headers",
        "every response has an x-request-id: the client's, or a new one",
    ),
    Refusal(
        "--return-tokens-as-token-ids",
        "requests can set return_token_ids",
    ),
    Refusal(
        "--stream-interval --stream-output --incremental-streaming-output",
        "tokens are sent as soon as they are generated",
    ),
    Refusal(
        "--ssl-* --tls-* --enable-ssl-refresh --root-path --ca-cert-paths --client-cert-path "
        "--client-key-path",
        "use a proxy that terminates TLS; --tls-folder secures routers and workers",
    ),
    Refusal(
        "--skip-server-warmup --warmups",
        "a worker always computes one token before it is ready",
    ),
    Refusal(
        "--config",
        "set flags, or the environment variables BATON_...; see --help",
    ),
    Refusal(
        "--allow-credentials --allowed-methods --allowed-headers --middleware",
        "use --allowed-origins; API keys are sent in a header",
    ),
    Refusal(
        "--enable-custom-logit-processor --logits-processors --logits-processor-pattern "
        "--enable-prompt-embeds --enable-return-hidden-states --enable-return-routed-experts "
        "--tool-server",
        "it is not supported",
    ),
    Refusal(
        "--enable-trace --oltp-* --otlp-* --collect-detailed-traces",
        "use --tracing-endpoint with an OTLP/HTTP endpoint",
    ),
    Refusal(
        "--model-path --model --chat-template --reasoning-parser --tool-call-parser --served-model-name",
        "set it on the workers",
    ),
    Refusal(
        "--load-balance-method",
        "`baton router` balances the load of workers",
    ),
    Refusal(
        "--pd-disaggregation --mini-lb",
        "--prefill and --decode are sufficient",
    ),
    Refusal(
        "--prefill-policy --decode-policy --cache-threshold --balance-* --eviction-* "
        "--max-tree-size --max-idle-secs --assignment-mode --bucket-adjust-* --dp-aware",
        "--policy is for workers of both roles, and no policy has thresholds",
    ),
    Refusal(
        "--selector --prefill-selector --decode-selector --service-discovery*",
        "use --kubernetes-selector, which discovers workers of both roles by the labels of their Services",
    ),
    Refusal(
        "--max-concurrent-requests --queue-size --queue-timeout-secs --rate-limit-*",
        "--queue-requests, --queue-bytes and --wait-s limit the queue; --tenants-file limits each tenant",
    ),
    Refusal(
        "--retry-* --disable-retries --cb-* --disable-circuit-breaker --disable-health-check "
        "--health-success-threshold --health-check-timeout-secs --health-check-endpoint "
        "--worker-startup-*",
        "use --retries and --retry-ratio for retries, and --health-interval-s and --health-misses for health "
        "checks; the circuit breaker has no settings",
    ),
    Refusal(
        "--jwt-*",
        "use --jwt-jwks, --jwt-issuer and --jwt-audience",
    ),
    Refusal(
        "--control-plane-*",
        "all paths require the same keys: --api-key or --api-key-file",
    ),
    Refusal(
        "--history-backend --oracle-* --postgres-* --redis-*",
        "responses are stored in memory (--responses-kept), files and batches in --database",
    ),
    Refusal(
        "--mcp-config-path --enable-igw --backend",
        "it is not supported",
    ),
)
"""The first match applies. Settings of the command never reach this table."""
