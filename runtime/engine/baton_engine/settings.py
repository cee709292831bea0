"""
The settings of one worker process, each with its unit, default and reason.

Built once where the process starts and passed down; nothing else reads the environment. Each field is
a flag of `baton serve` (`--kv-cache-memory`) and the environment variable `BATON_<NAME>`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from baton_api.keys import KeyDigests
from baton_api.logs import Format
from baton_api.metrics.peers import Peer
from baton_api.sizes import Bytes
from baton_api.texts import JsonObject, Names, Origins, split
from baton_api.workers import Role

PeerNames = Annotated[tuple[Peer, ...], NoDecode, BeforeValidator(split)]


class WorkerSettings(BaseSettings):
    """One worker."""

    model_config = SettingsConfigDict(
        env_prefix="BATON_",
        frozen=True,
        use_attribute_docstrings=True,
        extra="forbid",
        protected_namespaces=(),
    )

    model: str = "smollm2"
    """A Hugging Face folder, a .gguf file, a hub id, or the built-in name smollm2."""

    served_model_name: Names = ()
    """The names clients may use, repeated or with commas between; the first one stands in answers. Empty: the
    model as it was given; a path by its last part, and by its whole text too."""

    role: Role = Role.BOTH
    """both, prefill or decode."""

    name: str = ""
    """What the worker is called in logs, metrics and headers. Empty: the role and the port."""

    host: str = "127.0.0.1"
    """Address of the OpenAI API. Other machines can reach it only if this says so."""

    port: int = Field(default=8000, ge=0, le=65535)
    """Port of the OpenAI API; 0 takes a free one."""

    control_host: str = "127.0.0.1"
    """Address at which decode workers reach a prefill worker's control server."""

    control_port: int = Field(default=0, ge=0, le=65535)
    """Port of the control server; 0 takes a free one."""

    advertise_host: str = ""
    """Address or DNS name at which other machines reach this worker's control server and KV events. Set it
    behind address translation, or where the worker listens on every address (0.0.0.0) of a machine with
    several networks. A server on a loopback address keeps that address. Empty: the address that the server
    listens on; for a wildcard, the address from which this machine reaches its default gateway."""

    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: cuda if there is one."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of weights and KV cache. auto: bfloat16 where the processor computes in it, else float32."""

    threads: int = Field(default=0, ge=0)
    """CPU threads of one forward pass. 0: all cores this process may use."""

    max_model_len: int = Field(default=0, ge=0)
    """Most tokens of prompt and answer together. 0: the model's own context."""

    kv_cache_memory: Bytes = Field(default=0, ge=0)
    """Bytes for the KV cache. 0, on a CPU: a tenth of the memory that is free at start, at most 4 GiB and
    at most four contexts of the model (or 32,768 tokens, if that is more). 0, on a GPU: nine tenths of what
    the weights leave free."""

    kv_cache_tokens: int = Field(default=0, ge=0)
    """Most tokens that the KV cache holds, rounded up to whole blocks of 16; with no other size asked for,
    exactly as many. 0: as many as the memory gives."""

    memory_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the memory that was free at start for weights and KV cache together; the rest is for
    everything else. Of the GPU's memory, or of this machine's on a CPU; the cache gets at most 131072 blocks.
    `baton up` divides it among its workers. 0: see kv_cache_memory."""

    chunk_tokens: int = Field(default=0, ge=0)
    """Most tokens of one forward pass: longer prompts are computed in chunks. 0: 512 on a CPU, where it
    bounds the pause that running streams see, 4096 on a GPU."""

    mixed_chunk_tokens: int = Field(default=0, ge=0)
    """Most prompt tokens of a forward pass in which other requests generate: a smaller chunk, for their sake.
    0: 128 on a CPU, chunk_tokens on a GPU."""

    max_running: int = Field(default=0, ge=0)
    """Most requests in one batch. 0: 64 on a CPU, 256 on a GPU."""

    max_queued: int = Field(default=4096, ge=1)
    """Requests that may wait; one more is refused with 503."""

    transfer: Literal["nixl", "loopback"] = "nixl"
    """How KV blocks move. loopback works within one process only and never stands in for nixl."""

    local_prefill_tokens: int = Field(default=64, ge=0)
    """A decode worker computes a prompt itself if no more than this many tokens of it are missing
    from its own cache: asking would take longer."""

    tls_folder: str = ""
    """A folder with `tls.crt`, `tls.key` and `ca.crt`, as a Secret of cert-manager has them. With it the
    OpenAI API and the control server speak TLS 1.3 only, and only with those who show a certificate of that
    authority, and so does this worker with prefill workers. The files are read again within a second when
    they change. KV blocks and KV events move beside it, as they are."""

    tls_name: str = ""
    """A DNS name that each peer's certificate must have, so that an authority may sign for others too. Empty:
    whoever the authority has signed for."""

    health_port: int = Field(default=0, ge=0, le=65535)
    """A further port without TLS, for those who show no certificate: /health, /ready, /ping and /metrics, and
    nothing else. 0: none."""

    ticket_secret: str = ""
    """Shared by router, prefill and decode workers. With it, a prefill worker computes only for a signed
    ticket, and a decode worker connects only to a prefill worker that the ticket names. A decode worker that
    lacks it passes the router's ticket on, which expires while a request waits. Set it by environment, not by
    flag, where others can list processes."""

    transfer_deadline_s: float = Field(default=30.0, gt=0)
    """Seconds that one read of KV blocks may take before it is given up and its blocks quarantined."""

    quarantine_limit: float = Field(default=0.25, gt=0, le=1)
    """Share of the KV blocks that may be quarantined before the process stops: a restart frees them."""

    kv_events: str = ""
    """Where to publish what the prefix cache keeps and drops, in vLLM's form, for routers that choose by it:
    tcp://127.0.0.1:5557, or port 0 for a free one. GET /load says where. Empty: nowhere."""

    kv_replay: str = ""
    """Where events that were missed can be asked for again. Empty: at a free port beside kv_events."""

    kv_topic: str = ""
    """The topic of the events: what some routers tell workers by, such as kv@10.0.0.7@smollm2."""

    kv_tokens: bool = True
    """Publish the tokens of each block, as vLLM does, so that other routers can name blocks in their own way.
    Whoever reaches the port can read prompts from them; Baton's router does without."""

    drain_s: float = Field(default=60.0, ge=0)
    """Seconds that running requests get to finish after a SIGTERM."""

    api_key: KeyDigests = ()
    """A key that clients may send as `Authorization: Bearer <key>`, or its `sha256:<hex>`; repeated for
    several. With any, all but /health, /ready, /ping and /metrics wants one. Set it by environment (with
    commas between), or in a file: the command line is for all of this machine to read."""

    api_key_file: str = ""
    """A file of API keys, read again within a second when it changes: one to a line, as `key`, `name:key`,
    `sha256:<hex>` or `name:sha256:<hex>`; what follows a # at the start of a line is a comment. The log calls
    clients by the names."""

    allowed_origins: Origins = ()
    """Origins (`https://chat.example.org`, or * for all) whose pages may call this server from a browser,
    repeated or with commas between. Empty: all if an API key is wanted, else none, because every page that
    somebody opens on this machine could use a server without a key."""

    seed: int | None = Field(default=None, ge=0, lt=2**64)
    """Where the seeds of requests without one begin: the same requests one after another then give the same
    answers after every start. Empty: begun at random."""

    sampling_defaults: Literal["model", "openai"] = "model"
    """What holds where a request says nothing of temperature, top_p, top_k, min_p or repetition_penalty:
    the model's own generation_config.json, or OpenAI's defaults (1, 1, off, off, 1)."""

    allow_auto_truncate: bool = False
    """Shorten what does not fit the context instead of refusing it: max_tokens is cut to what the prompt
    leaves, and a prompt that leaves nothing loses its oldest tokens after the first one, until max_tokens
    fit, or half of the context is free, or an eighth where the request says no max_tokens."""

    stream_include_usage: bool = False
    """End streams with their usage unless a request says `include_usage: false`, as if all had asked."""

    cache_report: bool = True
    """Tell clients in `usage` how many prompt tokens came from the prefix cache. Turned off, they are told 0
    and cannot learn from it what others have asked; metrics and log count on."""

    pooling: Literal["auto", "mean", "last", "none"] = "auto"
    """What /v1/embeddings makes a text's vector of: the mean of its tokens' final states, or the last one's.
    auto: as the model's files say, and not at all for a model that was made to generate; none: never."""

    matryoshka: bool = False
    """Let requests for embeddings ask for fewer `dimensions`: the beginnings of this model's vectors are
    vectors too. Needed only where its config.json does not say is_matryoshka or matryoshka_dimensions."""

    responses_kept: int = Field(default=10_000, ge=0)
    """Most responses of /v1/responses that this worker keeps, to be asked for by id and continued by
    previous_response_id; the oldest go first. A worker behind a router keeps none: the router does."""

    responses_memory: Bytes = Field(default=256 * 1024**2, ge=0)
    """Most bytes of memory for them. 0: none are kept."""

    responses_ttl_s: float = Field(default=86_400, ge=0)
    """Seconds for which a response is kept, if there is room for so long. They are gone after a restart."""

    chat_template: str = ""
    """A chat template, or the path of a file with one, in place of the model's own."""

    default_chat_template_kwargs: JsonObject = Field(default_factory=dict)
    """A JSON object of variables for the chat template, such as {"enable_thinking": false}, which requests
    may override by `chat_template_kwargs`."""

    trust_request_chat_template: bool = False
    """Let requests bring a chat template of their own. A template is a program: it runs in a sandbox and for
    a bounded time, but see who may send requests."""

    reasoning_parser: str = ""
    """How the model marks its thoughts, such as qwen3 or deepseek-r1. auto: as its chat template tells;
    empty: thoughts are part of the text."""

    tool_call_parser: str = ""
    """How the model writes tool calls, such as hermes, qwen, llama3, mistral or pythonic. Empty: as its chat
    template tells."""

    metrics_names: PeerNames = ()
    """Whose names `/metrics` shows besides Baton's, repeated or with commas between: vllm and sglang, for
    dashboards that were made for those."""

    log_format: Format = "auto"
    """auto: one JSON object to a line, unless the log goes to a terminal. text or json: that one in any case.
    A line that belongs to a request has its id. No line has a prompt, but for log_requests_level 2."""

    tracing_endpoint: str = ""
    """Where to send OpenTelemetry spans by OTLP over HTTP, such as http://127.0.0.1:4318, of requests whose
    router sends spans too: this worker's queue and passes, beneath the router's. Empty: none are made; a
    request's trace is passed on to the prefill worker all the same."""

    log_requests: bool = False
    """Log each request when it has been read and when it has ended, besides the line of the access log."""

    log_requests_level: int = Field(default=0, ge=0, le=2)
    """What log_requests tells. 0: sizes and names; 1: sampling parameters too; 2: the text of prompts and
    answers too, cut to log_requests_length."""

    log_requests_length: int = Field(default=2048, ge=1)
    """Most characters of a request's prompts, and of its answers, in the log."""
