"""
Settings of a worker. Each field is a flag of `baton serve` and a variable `BATON_<NAME>`.

The docstring of a field is its help text. Other modules do not read the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from baton_api.exposure import DEFAULT_PORT
from baton_api.keys import KeyDigests
from baton_api.logs import Format
from baton_api.metrics.peers import Peer
from baton_api.setting_types import Bytes, JsonObject, Names, Origins, split
from baton_api.workers import Role
from baton_engine.spec import Quantize

PeerNames = Annotated[tuple[Peer, ...], NoDecode, BeforeValidator(split)]


class WorkerSettings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="BATON_",
        frozen=True,
        use_attribute_docstrings=True,
        extra="forbid",
        protected_namespaces=(),
    )

    GROUPS: ClassVar[Mapping[str, str]] = {
        "model": "Model",
        "enable_lora": "LoRA adapters",
        "role": "Server",
        "api_key": "Authentication",
        "device": "Device and memory",
        "max_running": "Scheduling",
        "local_prefill_tokens": "Prefill and decode",
        "kv_events": "KV events",
        "tls_folder": "Mutual TLS",
        "responses_kept": "Responses and usage",
        "metrics_names": "Observability",
    }
    """The first setting of each group in the help, and the title of the group."""

    # --- Model ---

    model: str = "smollm2"
    """Path of a Hugging Face folder or a .gguf file, a Hugging Face Hub id, or the built-in model
    smollm2."""

    served_model_name: Names = ()
    """Model names that requests may use. Repeat the flag or separate names by commas; responses contain the
    first one. Empty: MODEL as given; for a path also its last component."""

    chat_template: str = ""
    """Chat template, or path of a file with one. Empty: the model's own template."""

    default_chat_template_kwargs: JsonObject = Field(default_factory=dict)
    """Variables for the chat template, as a JSON object such as {"enable_thinking": false}. Requests override
    them by `chat_template_kwargs`."""

    trust_request_chat_template: bool = False
    """Accept chat templates in requests. Templates are programs: they run in a sandbox with a time limit, but
    enable this only for trusted clients."""

    plain_message_texts: bool = False
    """Read control tokens in texts of messages and documents, such as <|im_end|>, as plain text. Otherwise
    who writes such a text can end the turn and begin another one."""

    reasoning_parser: str = ""
    """Format of reasoning in the model's output, such as qwen3 or deepseek-r1. auto: detect it from the chat
    template. Empty: reasoning stays part of the text."""

    tool_call_parser: str = ""
    """Format of tool calls in the model's output, such as hermes, qwen, llama3, mistral or pythonic. Empty:
    detect it from the chat template."""

    sampling_defaults: Literal["model", "openai"] = "model"
    """Source of temperature, top_p, top_k, min_p and repetition_penalty where a request does not set them:
    the model's generation_config.json (model), or OpenAI's defaults 1, 1, off, off, 1 (openai). The built-in
    model has temperature 0.2 and top_p 0.9."""

    seed: int | None = Field(default=None, ge=0, lt=2**64)
    """First of the seeds that the worker assigns to requests without one. The same sequence of requests then
    returns the same responses after every start. Empty: random."""

    allow_auto_truncate: bool = False
    """Shorten requests that exceed the context length instead of rejecting them. First max_tokens is lowered.
    If the prompt fills the context, its oldest tokens after the first one are dropped. They are
    dropped until max_tokens fits or half of the context is free; without max_tokens, until an eighth
    is free."""

    pooling: Literal["auto", "mean", "last", "cls", "none"] = "auto"
    """How /v1/embeddings pools the final hidden states: their mean, the last one, or cls (the first one, of
    encoders such as BERT). With auto, the model files decide, and generative models compute no embeddings.
    none: disabled."""

    matryoshka: bool = False
    """Accept `dimensions` in requests for embeddings. Needed only if the model was trained for it and its
    config.json has neither is_matryoshka nor matryoshka_dimensions."""

    # --- LoRA adapters ---

    enable_lora: bool = False
    """Load LoRA adapters in PEFT's format, which requests use by their name as `model`. Clients can then load
    folders of this machine as adapters by POST /v1/load_lora_adapter, so require --admin-api-key."""

    lora_modules: Names = ()
    """Adapters to load at startup, as NAME=PATH: a folder, a Hugging Face Hub id, or a URI that begins with
    hf://, s3:// or gs://. Repeat the flag or separate entries by commas."""

    max_loras: int = Field(default=8, ge=1, le=256)
    """Maximum number of loaded adapters. One batch may use all of them."""

    max_lora_rank: int = Field(default=16, ge=1, le=512)
    """Maximum rank of an adapter. Adapters of a higher rank are rejected."""

    # --- Server ---

    role: Role = Role.BOTH
    """Role of the worker: both, prefill or decode."""

    name: str = ""
    """Name of the worker in logs, metrics and headers. Empty: role and port."""

    host: str = "127.0.0.1"
    """Address on which the OpenAI API listens. Use 0.0.0.0 to accept connections from other machines."""

    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535)
    """Port of the OpenAI API. 0: a free port."""

    health_port: int = Field(default=0, ge=0, le=65535)
    """Additional port without TLS for /health, /ready, /ping and /metrics only. 0: none."""

    api_processes: int = Field(default=0, ge=0, le=64)
    """Number of processes beside the one that computes: they validate, tokenize, detokenize and stream chat,
    completions, messages, /generate and, behind a router, responses. 0: none, one process does all. 1 or 2
    pay where tokens come faster than about 10,000 per second, as on a GPU with more than 100 streams; else
    the first token comes later. Tokens that come faster than they can be written are one event of a stream.
    With `seed`, each process has its own sequence of seeds."""

    drain_s: float = Field(default=60.0, ge=0)
    """Time that running requests have to finish after SIGTERM."""

    allowed_origins: Origins = ()
    """Origins, such as https://chat.example.org, whose pages may call this server from a browser; * allows
    all. Repeat the flag or separate origins by commas. Empty: all if an API key is required, otherwise
    none, because any page in a local browser could use a server without a key."""

    # --- Authentication ---

    api_key: KeyDigests = ()
    """API key that clients send as `Authorization: Bearer KEY`, or its digest as `sha256:HEX`. Repeat it for
    several keys. If any key is set, every path except /health, /ready, /ping and /metrics requires
    one. Prefer the environment variable (separate keys by commas) or --api-key-file, because any local
    user can read command-line arguments."""

    api_key_file: str = ""
    """File of API keys, one per line: `key`, `name:key`, `sha256:HEX` or `name:sha256:HEX`. Lines that begin
    with # are comments. The file is reloaded within one second after a change. Logs show the names."""

    admin_api_key: KeyDigests = ()
    """Key for requests that change what all clients get, in the same form: /v1/load_lora_adapter,
    /v1/unload_lora_adapter and /flush_cache. These then accept no other key. Empty: they need a key of
    --api-key, if there is one."""

    admin_api_key_file: str = ""
    """File of such keys, as --api-key-file."""

    # --- Device and memory ---

    device: str = "auto"
    """Device: cpu, cuda, cuda:N, or auto: cuda if available."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of weights and KV cache. auto: bfloat16 if the device computes in it natively, otherwise
    float32."""

    quantize: Quantize = "keep"
    """Format of the model's matrices. With keep, it is the stored one, and a CPU rounds inputs of quantized
    matrices to 8 bits. With off, all matrices are expanded to DTYPE. With q8_0 and q4_0, matrices that are
    not quantized are converted while loading."""

    weights_cache: Bytes = Field(default=16 * 1024**3, ge=0)
    """Maximum size of packed weights that CPU workers store in the folder of BATON_CACHE, where later starts
    map them. Workers of one machine share that memory. The least recently used files are deleted, and a new
    one uses at most half of the free disk space. 0: store none and use none."""

    threads: int = Field(default=0, ge=0)
    """CPU threads per forward pass. 0: all cores available to the process."""

    shared_cores: str = ""
    """Where workers on one machine write that they compute, as FILE:NUMBER. The CPU kernels then also use
    cores beyond --threads while other workers leave them. `baton up` sets it. FILE has 64 zero bytes per
    worker, and NUMBER counts from 0. Empty: the kernels use their own threads only."""

    compute_share: float = Field(default=1, gt=0, le=1)
    """Share of the time in which this worker computes while those of --shared-cores do whose share is 1. In
    the rest of it, they use its cores. `baton up --prefill-share` sets it."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Number of ranks that divide the model's heads and matrices: processes that share the CPU's threads, or
    the GPUs from --device on. 1: no division. The degree must divide query heads and the intermediate
    size, and divide key heads or be a multiple of them, also those of a draft head."""

    max_model_len: int = Field(default=0, ge=0)
    """Maximum number of prompt and output tokens of a request together. 0: the model's context length."""

    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Data type of the KV cache. auto: DTYPE. fp8: float8 (e4m3) on a GPU, half the bytes of bfloat16. Keys
    and values are rounded to 4 significant bits, and those beyond 448 become 448."""

    kv_cache_memory: Bytes = Field(default=0, ge=0)
    """Size of the KV cache. 0 on a GPU: 90% of the memory that the weights leave free. 0 on a CPU: 10% of the
    free memory at startup, at most 4 GiB. There it is also at most four contexts of the model or
    32,768 tokens, whichever is more. A CPU worker takes the memory as it uses it, and without tensor
    parallelism up to 256 MiB ahead while it has no request (of a draft model's cache too)."""

    kv_cache_tokens: int = Field(default=0, ge=0)
    """Maximum number of tokens in the KV cache, rounded up to blocks of 16. If no other size is set, exactly
    this many. 0: limited by memory only."""

    memory_share: float = Field(default=0.0, ge=0, le=1)
    """Fraction (0-1) of the memory that is free at startup, for weights and KV cache together: of the GPU, or
    of the machine on a CPU. The KV cache has at most 131,072 blocks. `baton up` divides the fraction
    among its workers. 0: see --kv-cache-memory."""

    overlap: bool = True
    """On a GPU that runs Baton's kernels, launch a decode pass before the host has read the tokens of the
    last one. A request that arrives meanwhile waits for one more pass."""

    graph_rows: int = Field(default=256, ge=0)
    """On a GPU, maximum number of rows of decode passes that are captured as CUDA graphs at startup. Larger
    batches are computed without a graph. 0: none."""

    graph_memory: Bytes = Field(default=1024**3, ge=0)
    """Maximum memory of all CUDA graphs, on each GPU. It is left free when the KV cache gets its size. Passes
    that need more are computed without a graph."""

    graph_seconds: float = Field(default=60.0, ge=0)
    """Time after which no further CUDA graph is captured at startup. The largest ones are captured first, and
    serve smaller batches too."""

    # --- Scheduling ---

    max_running: int = Field(default=0, ge=0)
    """Maximum number of sequences in the running batch. 0: 64 on a CPU, 256 on a GPU."""

    max_queued: int = Field(default=4096, ge=1)
    """Maximum number of queued requests. Further requests are rejected with 503."""

    chunk_tokens: int = Field(default=0, ge=0)
    """Maximum number of tokens per forward pass. Longer prompts are computed in chunks. 0: 512 on a CPU,
    where it bounds the pause of running streams, and 4096 on a GPU."""

    mixed_chunk_tokens: int = Field(default=0, ge=0)
    """Maximum number of prompt tokens in a forward pass that also generates tokens. 0: 128 on a CPU,
    --chunk-tokens on a GPU."""

    speculation: Literal["auto", "ngram", "draft", "mtp", "eagle3", "off"] = "auto"
    """Compute draft tokens beside the pending token of a generating sequence, where this is faster. Answers
    keep their distribution. auto: ngram where answers keep all bits too, which is with the native kernels of
    CPUs, except for bfloat16 with AMX, and off elsewhere, so that a seed gives the same answer again. ngram:
    drafts continue an earlier occurrence of the latest tokens in the prompt, the answer or the request's
    `prediction`. draft: drafts come from --draft-model. mtp: drafts come from the layer of MODEL that
    predicts a further token (num_nextn_predict_layers). eagle3: drafts come from the EAGLE-3 head of
    --draft-model. With mtp and eagle3, torch computes the model on a CPU, and prefill and decode workers need
    the same setting. off: none."""

    draft_model: str = ""
    """Model for --speculation draft: a path, a Hub id or a .gguf file, as for MODEL. It needs the same
    vocabulary, and a KV cache of its own for the same number of tokens, which is part of the KV cache's
    size. For --speculation eagle3: a path or a Hub id of the head."""

    speculation_tokens: int = Field(default=16, ge=1, le=64)
    """Maximum number of draft tokens per sequence and forward pass. The worker uses fewer if they are
    unlikely to be accepted, or if its measured times show that they cost more than they gain."""

    # --- Prefill and decode ---

    local_prefill_tokens: int = Field(default=64, ge=0)
    """Maximum number of uncached prompt tokens that a decode worker computes itself, because a transfer would
    take longer."""

    last_chunk_tokens: int = Field(default=0, ge=0)
    """Least tokens of the parts into which a prefill worker halves the last chunk of a prompt, again and
    again, if no other request is in its batch or queue. The decode worker reads each part while the next one
    is computed. It pays where the read of a chunk takes long beside its computation. 0: the chunk stays
    whole."""

    kv_peers: bool = True
    """Read KV blocks that another worker has cached, where that is predicted to take at most half of the time
    of computing them. A prefill worker then reads what the decode worker generated, instead of computing
    the answers of a conversation again. Both need the setting; the decode worker runs a control server."""

    kv_memory_tier: Bytes = 0
    """Memory of the host for KV blocks that the KV cache evicts, such as 8GiB. A prompt that returns is
    restored from there, where that is predicted to take at most half of the time of computing it. The memory
    is in addition to that of the KV cache. 0: none."""

    kv_disk_tier: str = ""
    """Folder on a disk for KV blocks that the memory tier has. They outlive the worker: after its next start,
    a prompt that returns is restored from there, where that is sooner than computing it. Each worker needs a
    folder of its own; `baton up` adds the worker's name. Needs --kv-memory-tier. Empty: none."""

    kv_disk_tier_size: Bytes = Field(default=0, ge=0)
    """Maximum size of the folder of --kv-disk-tier, such as 100GiB. It is allocated at the start. When it is
    full, it takes blocks that are used a second time, in place of those that were not used for longest."""

    kv_shared_store: str = ""
    """Storage for KV blocks that all workers of a model share: s3://BUCKET/PATH, gs://BUCKET/PATH,
    az://CONTAINER/PATH, or file:///FOLDER for a folder of a volume that all of them mount. A prompt that any
    of them computed is restored from there, where that is sooner than computing it. Needs --kv-memory-tier.
    Whoever can write to it can change answers. Empty: none."""

    kv_shared_store_size: Bytes = Field(default=0, ge=0)
    """Maximum size of all objects in --kv-shared-store, such as 1TiB, the same for all workers. Those first
    written are deleted first. N workers that write at once can exceed it by (N - 1) times 1/16."""

    kv_shared_store_expiry_s: float = Field(default=7 * 86400, ge=0, allow_inf_nan=False)
    """Seconds after which an object in --kv-shared-store is deleted, while any worker has requests. 0:
    never."""

    control_host: str = "127.0.0.1"
    """Address on which the control server of a prefill or decode worker listens. Prefill workers on other
    machines read the blocks of a decode worker only if they can reach it."""

    control_port: int = Field(default=0, ge=0, le=65535)
    """Port of the control server. 0: a free port."""

    advertise_host: str = ""
    """Address or DNS name at which other machines reach this worker's control server and KV events. Set it
    behind address translation, or if the worker listens on 0.0.0.0 on a machine with several networks.
    Servers on a loopback address keep that address. Empty: the listening address; for a wildcard, the
    source address of this machine's default route."""

    ticket_secret: str = ""
    """Secret shared by router (BATON_ROUTER_TICKET_SECRET), prefill and decode workers. A prefill worker then
    requires a signed ticket,
    and a decode worker connects only to the prefill worker that the ticket names. A decode worker
    without the secret forwards the router's ticket, which may expire while a request is queued. Set it
    by the environment variable, because other users can read command-line arguments."""

    transfer: Literal["nixl", "loopback"] = "nixl"
    """Transport of KV blocks. loopback works within one process only, for tests."""

    transfer_deadline_s: float = Field(default=30.0, gt=0)
    """Maximum time of one read of KV blocks. The worker then cancels the read and quarantines its
    blocks. A read of a peer's cached blocks is given up earlier, and has this time to end."""

    quarantine_limit: float = Field(default=0.25, gt=0, le=1)
    """Fraction (0-1) of the KV blocks that may be quarantined before the process exits. A restart
    frees them."""

    # --- KV events ---

    kv_events: str = ""
    """ZeroMQ address on which the worker publishes changes of its prefix cache in vLLM's format, such as
    tcp://127.0.0.1:5557; port 0 takes a free one. GET /load shows the address. Empty: disabled."""

    kv_replay: str = ""
    """ZeroMQ address on which the worker replays missed events. Empty: a free port beside --kv-events."""

    kv_topic: str = ""
    """Topic of the events. Some routers identify workers by it, such as kv@10.0.0.7@smollm2."""

    kv_tokens: bool = True
    """Publish the token ids of each block, as vLLM does, so that other routers can hash blocks themselves.
    Processes that reach the port can read prompts from them. Baton's router does not need them."""

    # --- Mutual TLS ---

    tls_folder: str = ""
    """Folder with `tls.crt`, `tls.key` and `ca.crt`, such as a mounted Secret of cert-manager. The OpenAI API
    and the control server then accept TLS 1.3 with a client certificate of that authority only, and
    this worker presents its certificate to prefill workers. Changed files are reloaded within one
    second. KV transfers and KV events are not encrypted."""

    tls_name: str = ""
    """DNS name that every peer's certificate must contain. Empty: any certificate of the authority."""

    # --- Responses and usage ---

    responses_kept: int = Field(default=10_000, ge=0)
    """Maximum number of stored responses of /v1/responses, which clients retrieve by id or continue by
    previous_response_id. The oldest are dropped first. Behind a router the router stores them."""

    responses_memory: Bytes = Field(default=256 * 1024**2, ge=0)
    """Maximum memory of stored responses. 0: store none."""

    responses_ttl_s: float = Field(default=86_400, ge=0)
    """Time for which a response is stored. A restart drops all."""

    stream_include_usage: bool = False
    """End every stream with its usage, unless the request sets `include_usage: false`."""

    cache_report: bool = True
    """Report cached prompt tokens in `usage`. If disabled, clients see 0 and cannot infer the prompts of
    others; metrics and logs still have the number."""

    # --- Observability ---

    metrics_names: PeerNames = ()
    """Additional metric names on /metrics for existing dashboards: vllm, sglang. Repeat the flag or separate
    names by commas."""

    log_format: Format = "auto"
    """Format of log lines. auto: text on a terminal, otherwise one JSON object per line. Lines about a
    request contain its id. No line contains a prompt, except with --log-requests-level 2."""

    log_requests: bool = False
    """Log the start and the end of each request in addition to the access log."""

    log_requests_level: int = Field(default=0, ge=0, le=2)
    """Detail of --log-requests. 0: sizes and names. 1: also sampling parameters. 2: also prompts and outputs,
    up to --log-requests-length."""

    log_requests_length: int = Field(default=2048, ge=1)
    """Maximum number of characters logged per prompt and per output."""

    tracing_endpoint: str = ""
    """OTLP/HTTP endpoint for OpenTelemetry spans, such as http://127.0.0.1:4318. The worker sends spans of
    requests that the router traces. Empty: disabled; trace ids still reach the prefill worker."""
