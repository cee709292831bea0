"""The engine, the role and the reported load of a worker, by which the router selects workers."""

from __future__ import annotations

import enum

import msgspec


class EngineKind(enum.StrEnum):
    """
    The engine of a worker, as the router names it.

    The router tries them in this order: an engine stands before those that serve its paths too.
    """

    BATON = "baton"
    """Baton's own worker."""
    TRTLLM = "trtllm"
    """TensorRT-LLM's server, `trtllm-serve`. A pair transfers KV blocks by its cache transceiver."""
    VLLM = "vllm"
    """vLLM's OpenAI server. A pair transfers KV blocks by its NixlConnector."""
    SGLANG = "sglang"
    """SGLang's server. A pair transfers KV blocks by its disaggregation mode."""
    OPENAI = "openai"
    """Any other server with OpenAI's API. It is never part of a pair."""


ENGINE_TYPES: dict[EngineKind, str] = {
    EngineKind.BATON: "Baton",
    EngineKind.VLLM: "vLLM",
    EngineKind.SGLANG: "SGLang",
    EngineKind.TRTLLM: "TensorRT-LLM",
    EngineKind.OPENAI: "Custom",
}
"""`spec.engine.type` of an InferenceService."""

TRTLLM_OWNER = "tensorrt_llm"
"""`owned_by` of TensorRT-LLM's models, by which it is told from vLLM."""

PEER = "peer"
"""Source of tokens of a prompt, beside the tiers: their KV blocks were read from another worker."""


class Role(enum.StrEnum):
    """The work that a worker does."""

    BOTH = "both"
    """Computes prompts and generates, without other workers."""
    PREFILL = "prefill"
    """Computes prompts for decode workers and keeps their blocks until they are read."""
    DECODE = "decode"
    """Generates. Prompts come from a prefill worker, or are computed here when that is cheaper."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """
    The body of `GET /load`, also in the heartbeat of a prefill worker.

    Counts are current. Rates are moving averages over about ten seconds.
    """

    role: Role
    model: str
    """The model name in responses."""
    name: str = ""
    """The worker's own name, as in its log, such as prefill-0 or the name of its pod. Empty: it has none."""
    names: tuple[str, ...] = ()
    """All names that requests may use, if there are others than `model`."""
    adapters: tuple[str, ...] = ()
    """Names of the loaded LoRA adapters, which requests use as models."""
    max_model_len: int = 0
    """Maximum tokens of prompt and output together. 0: unknown."""
    running: int = 0
    """Requests in the batch."""
    queued: int = 0
    """Requests admitted by the API but not yet in the batch."""
    queued_tokens: int = 0
    """Prompt tokens left to compute, over all requests."""
    step_s: float = 0.0
    """Mean seconds of a decode step."""
    free_blocks: int = 0
    """KV blocks available to a new request: free ones, and cached ones that are not in use."""
    total_blocks: int = 0
    block_size: int = 16
    draining: bool = False
    """The worker finishes running requests and accepts no new ones."""
    control: str = ""
    """`host:port` of the control server of a prefill worker, else empty."""
    epoch: str = ""
    """Random, new at every start of the process. State of an earlier epoch is invalid."""
    compatibility: str = ""
    """The digest of `baton_api.messages.Hello`. Only workers with equal digests form a pair."""
    kv_events: str = ""
    """Endpoint of the KV events, such as tcp://127.0.0.1:5557. Empty: no events. See
    `baton_api.kv_events`."""
    kv_replay: str = ""
    """Endpoint for replays of KV events."""
    engine: EngineKind = EngineKind.BATON
    version: str = ""
    """Version of the engine. Empty: unknown."""
    ticket_refusal: str = ""
    """Why the worker refuses the ticket that came with `GET /load`. Empty: it accepts it, or needs none."""
    local_prefill: bool = True
    """Whether it computes prompts itself, without a prefill worker."""
    peers: bool = False
    """Of a prefill worker: whether it reads cached KV blocks of decode workers. Of a decode worker: whether
    they can read its blocks."""
