"""The engines whose workers a router can use."""

from __future__ import annotations

import enum


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


TYPES: dict[EngineKind, str] = {
    EngineKind.BATON: "Baton",
    EngineKind.VLLM: "vLLM",
    EngineKind.SGLANG: "SGLang",
    EngineKind.TRTLLM: "TensorRT-LLM",
    EngineKind.OPENAI: "Custom",
}
"""`spec.engine.type` of an InferenceService."""

TRTLLM_OWNER = "tensorrt_llm"
"""`owned_by` of TensorRT-LLM's models, by which it is told from vLLM."""
