"""
Flags of other servers that mean nothing here, and why: what to use instead, or why nothing is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Refusal:
    """Flags of one subject; a * stands for any letters."""

    flags: str
    """With spaces between."""
    reason: str
    """A clause."""

    def covers(self, flag: str) -> bool:
        return any(fnmatchcase(flag, pattern) for pattern in self.flags.split())


REFUSALS = (
    Refusal(
        "--tp-size --tensor-parallel-size --tp -tp --pp-size --pipeline-parallel-size --pp -pp --dp-size "
        "--data-parallel-* --dp -dp --ep --ep-* --expert-parallel-size --enable-expert-parallel --eplb-* "
        "--enable-eplb --nnodes --node-rank --dist-* --nccl-* --gpu-id-step --enable-dp-* --enable-ep-moe "
        "--distributed-executor-backend --enable-pdmux --*all-reduce* --*allreduce* --api-server-count "
        "--enable-p2p-check --init-expert-location --worker-cls --headless --additional-config "
        "--disable-frontend-multiprocessing --enable-symm-mem --enable-torch-symm-mem --enable-mscclpp "
        "--enable-nccl-nvls --decode-context-*",
        "a worker computes on one device; for more work start more of them (`baton up --decode 4`)",
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
        "no CUDA graphs are captured, so there is nothing to turn off or to size",
    ),
    Refusal(
        "--disable-overlap* --enable-two-batch-overlap --enable-single-batch-overlap --async-scheduling "
        "--no-async-scheduling --tbo-*",
        "penalties, grammars and stop rules hold in every pass; there is no overlap that one would have "
        "to turn off for them",
    ),
    Refusal(
        "--grammar-backend --guided-decoding-backend --structured-outputs-config* --constrained-json-* "
        "--disable-outlines-disk-cache",
        "grammars are compiled by llguidance, with nothing to choose",
    ),
    Refusal(
        "--attention-backend --*-attention-backend --sampling-backend --moe-* --enable-torch-compile "
        "--torch-compile-* --triton-* --flashinfer-* --compilation-config -O --model-impl --deepep-* "
        "--enable-deepep-moe --enable-flashinfer-* --enable-triton-* --nsa-* --enable-fp32-lm-head "
        "--enable-double-sparsity --ds-* --disable-shared-experts-fusion --disable-flashinfer-* "
        "--disable-sliding-window --disable-cascade-attn --optimization-level --swa-full-tokens-ratio "
        "--hybrid-kvcache-ratio --disable-hybrid-* --*mamba* --sm-group-num",
        "each kind of device has one implementation, chosen by --device",
    ),
    Refusal(
        "--enable-deterministic-inference",
        "the random numbers of a request depend on its seed and on positions only, never on its batch",
    ),
    Refusal(
        "--enable-priority-scheduling --schedule-* --scheduling-policy --priority-scheduling-* "
        "--scheduler-* --num-scheduler-steps --num-continuous-decode-steps --num-reserved-decode-tokens "
        "--disable-hybrid-kv-cache-manager --max-micro-batch-size",
        "a worker takes requests in the order of their arrival, those of class batch last; in front of "
        "workers, a router orders them by class (x-baton-class) and tenant",
    ),
    Refusal(
        "--enable-mixed-chunk",
        "prompts and generation share passes always; --mixed-chunk-tokens bounds the prompts' part",
    ),
    Refusal(
        "--max-prefill-tokens --prefill-max-requests --max-num-partial-prefills "
        "--max-long-partial-prefills --long-prefill-token-threshold --enable-chunked-prefill "
        "--no-enable-chunked-prefill --dynamic-batch-* --enable-dynamic-*",
        "long prompts are computed in chunks always; --chunk-tokens (--chunked-prefill-size) bounds a pass",
    ),
    Refusal(
        "--watchdog-timeout --soft-watchdog-timeout --gc-warning-* --crash-dump-folder "
        "--enable-nan-detection --debug-* --show-time-cost",
        "a worker whose engine fails ends by itself, to be started again by `baton up` or Kubernetes",
    ),
    Refusal(
        "--enable-metrics* --disable-log-stats --bucket-* --collect-tokens-histogram "
        "--generation-tokens-buckets --prompt-tokens-buckets --tokenizer-metrics-* --prometheus-* "
        "--enable-expert-distribution-metrics --expert-distribution-* --enable-server-load-tracking "
        "--show-hidden-metrics-for-version --enable-request-time-stats-logging",
        "/metrics, /load and /debug/requests are always served, beside the API",
    ),
    Refusal(
        "--disable-log-requests --no-enable-log-requests",
        "requests are logged only if --log-requests says so",
    ),
    Refusal(
        "--log-level* --uvicorn-log-level --disable-uvicorn-access-log --decode-log-interval --log-dir "
        "--load-watch-interval --log-config-file --enable-log-outputs --enable-log-deltas",
        "the log has one line for what an operator should know; --log-requests adds to it",
    ),
    Refusal(
        "--disaggregation-mode",
        "start `baton prefill` and `baton decode`, or all at once by `baton up`",
    ),
    Refusal(
        "--disaggregation-* --kv-transfer-config --prefill-round-robin-balance",
        "`baton prefill` and `baton decode` move blocks over NIXL and agree about the rest by themselves",
    ),
    Refusal(
        "--kv-events-config",
        "--kv-events is where a worker publishes KV events, --kv-replay where missed ones are repeated",
    ),
    Refusal(
        "--enable-prefix-caching --no-enable-prefix-caching --disable-radix-cache --radix-* "
        "--disable-chunked-prefix-cache --prefix-caching-hash-algo",
        "prefixes are cached always, and never change what is answered",
    ),
    Refusal(
        "--hicache-* --enable-hierarchical-cache --enable-lmcache --swap-space --cpu-offload-* "
        "--kv-offloading-* --offload-* --enable-weights-cpu-backup --enable-memory-saver "
        "--enable-sleep-mode --sleep-on-idle",
        "weights and KV cache stay on the --device; --kv-cache-memory sizes the cache",
    ),
    Refusal(
        "--page-size --block-size",
        "KV blocks have 16 tokens on every device",
    ),
    Refusal(
        "--num-gpu-blocks-override",
        "give --kv-cache-tokens, 16 to a block",
    ),
    Refusal(
        "--kv-cache-dtype --calculate-kv-scales",
        "the KV cache has the --dtype of the weights",
    ),
    Refusal(
        "--download-dir",
        "models from the hub lie where HF_HOME says",
    ),
    Refusal(
        "--quantization* -q --torchao-config --load-format --custom-weight-loader --weight-* "
        "--safetensors-load-strategy --ignore-patterns --config-format --max-parallel-loading-workers "
        "--model-loader-extra-config --remote-instance-* --delete-ckpt-after-loading",
        "weights are read as they lie there, safetensors or GGUF; quantised ones come as .gguf files",
    ),
    Refusal(
        "--revision --code-revision --tokenizer-revision --hf-config-path --hf-token",
        "fetch it with `baton fetch --revision` (HF_TOKEN is read from the environment) and give the "
        "folder as MODEL",
    ),
    Refusal(
        "--tokenizer-path --tokenizer --tokenizer-mode --skip-tokenizer-init --tokenizer-worker-num "
        "--enable-tokenizer-batch-encode --tokenizer-pool-* --tokenizer-cache-*",
        "the tokenizer is the one in the model's folder",
    ),
    Refusal(
        "--trust-remote-code",
        "no code from a model's folder is ever run, and none is needed",
    ),
    Refusal(
        "--hf-overrides --json-model-override-args --rope-scaling --rope-theta",
        "edit config.json in the model's folder",
    ),
    Refusal(
        "--generation-config",
        "say --sampling-defaults model or --sampling-defaults openai",
    ),
    Refusal(
        "--preferred-sampling-params --override-generation-config",
        "put them into generation_config.json in the model's folder",
    ),
    Refusal(
        "--enable-lora --lora-* --max-lora* --max-loaded-loras --max-loras* --fully-sharded-loras",
        "adapters are not served; merge them into the weights",
    ),
    Refusal(
        "--speculative-* --spec-*",
        "there is no speculative decoding",
    ),
    Refusal(
        "--enable-multimodal --mm-* --limit-mm-per-prompt --disable-fast-image-processor "
        "--allowed-local-media-path --keep-mm-* --disable-mm-* --interleave-mm-strings",
        "models of text are served",
    ),
    Refusal(
        "--is-embedding --task --runner --convert --override-pooler-config --pooler-config",
        "/v1/embeddings is served beside the rest; --pooling mean or last has any model embed",
    ),
    Refusal(
        "--enable-auto-tool-choice",
        "tool calls are read whenever a request has tools; --tool-call-parser says how they look",
    ),
    Refusal(
        "--tool-parser-plugin",
        "--tool-call-parser names one of those that are built in",
    ),
    Refusal(
        "--exclude-tools-when-tool-choice-none",
        "the template sees the tools that the request names",
    ),
    Refusal(
        "--max-logprobs",
        "up to 20 logprobs may be asked for",
    ),
    Refusal(
        "--max-num-queued-tokens",
        "--max-queued bounds the queue, in requests",
    ),
    Refusal(
        "--sse-keep-alive-interval",
        "a silent stream carries a comment every 15 seconds",
    ),
    Refusal(
        "--h11-*",
        "the limits of a request are fixed: docs/reference/limits.md",
    ),
    Refusal(
        "--disable-fastapi-docs --enable-tokenizer-info-endpoint",
        "there is no such page to turn off or on",
    ),
    Refusal(
        "--enable-reasoning",
        "--reasoning-parser alone is enough",
    ),
    Refusal(
        "--response-role",
        "answers have the role assistant",
    ),
    Refusal(
        "--chat-template-content-format",
        "what the template takes is found out by itself",
    ),
    Refusal(
        "--completion-template",
        "`suffix` is not served",
    ),
    Refusal(
        "--enable-force-include-usage",
        "use --stream-include-usage; a request may still say no",
    ),
    Refusal(
        "--enable-request-id-headers --request-id-headers",
        "every answer has an x-request-id, the client's own if it sent one",
    ),
    Refusal(
        "--return-tokens-as-token-ids",
        "a request may ask for return_token_ids",
    ),
    Refusal(
        "--stream-interval --stream-output --incremental-streaming-output",
        "tokens are sent when they are there",
    ),
    Refusal(
        "--ssl-* --tls-* --enable-ssl-refresh --root-path --ca-cert-paths --client-cert-path "
        "--client-key-path",
        "put a proxy that ends TLS in front; between routers and workers there is --tls-folder",
    ),
    Refusal(
        "--skip-server-warmup --warmups",
        "one token is computed before a worker says that it is ready",
    ),
    Refusal(
        "--config",
        "settings are flags or the environment variables BATON_...; see --help",
    ),
    Refusal(
        "--allow-credentials --allowed-methods --allowed-headers --middleware",
        "--allowed-origins alone decides which pages may call this server; keys come in a header",
    ),
    Refusal(
        "--enable-custom-logit-processor --logits-processors --logits-processor-pattern "
        "--enable-prompt-embeds --enable-return-hidden-states --enable-return-routed-experts "
        "--tool-server",
        "this is not served",
    ),
    Refusal(
        "--enable-trace --oltp-* --otlp-* --collect-detailed-traces",
        "--tracing-endpoint is where spans of requests are sent by OTLP over HTTP",
    ),
    Refusal(
        "--model-path --model --chat-template --reasoning-parser --tool-call-parser --served-model-name",
        "the workers know the model; give it to them",
    ),
    Refusal(
        "--load-balance-method",
        "`baton router` spreads requests over workers",
    ),
    Refusal(
        "--pd-disaggregation --mini-lb",
        "naming workers with --prefill and --decode is enough",
    ),
    Refusal(
        "--policy --prefill-policy --decode-policy --cache-threshold --balance-* --eviction-* "
        "--max-tree-size --max-idle-secs --assignment-mode --bucket-adjust-* --dp-aware",
        "the router has one policy, which needs no thresholds",
    ),
    Refusal(
        "--selector --prefill-selector --decode-selector --service-discovery*",
        "--kubernetes-selector finds workers of both roles by the labels of their Services",
    ),
    Refusal(
        "--max-concurrent-requests --queue-size --queue-timeout-secs --rate-limit-*",
        "--queue-requests, --queue-bytes and --wait-s bound the router's queue; --tenants-file bounds each "
        "tenant",
    ),
    Refusal(
        "--retry-* --disable-retries --cb-* --disable-circuit-breaker --disable-health-check "
        "--health-success-threshold --health-check-timeout-secs --health-check-endpoint "
        "--worker-startup-*",
        "--retries and --retry-ratio bound retries, --health-interval-s and --health-misses set health "
        "checks; the circuit breaker needs no settings",
    ),
    Refusal(
        "--jwt-*",
        "with --jwt-jwks, --jwt-issuer and --jwt-audience a router takes an issuer's tokens like API keys",
    ),
    Refusal(
        "--control-plane-*",
        "every path wants the same keys: --api-key or --api-key-file",
    ),
    Refusal(
        "--history-backend --oracle-* --postgres-* --redis-*",
        "responses are kept in memory (--responses-kept), files and batches in the database of --database",
    ),
    Refusal(
        "--mcp-config-path --enable-igw --backend",
        "this is not served",
    ),
)
"""The first that covers a flag answers; one that is a setting of the command never gets here."""
