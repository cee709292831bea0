"""The engine of one worker: model, KV cache, scheduler, sampler, KV transfer and OpenAI API."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton_api.sampling import SamplingParams
    from baton_engine.llm import LLM

__all__ = ["LLM", "SamplingParams"]

# torch's OpenMP threads spin for 7 ms after each parallel operation, on the cores that the next pass needs.
# GNU's OpenMP reads the variable when torch is loaded; 4000 iterations take 0.1 ms. A user's value is kept.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")


def __getattr__(name: str) -> Any:
    """Import the Python interface at its first use: it loads torch, which most commands do not need."""
    if name == "LLM":
        from baton_engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from baton_api.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
