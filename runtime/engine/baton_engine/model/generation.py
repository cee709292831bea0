"""
What a model's own makers recommend for drawing its tokens: a folder's `generation_config.json`.

`do_sample` is not looked at: it says what transformers does when nobody asks, and a served request that
wants greedy tokens says `temperature: 0`. A .gguf file has no such recommendations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from baton_api.errors import SetupError
from baton_engine.model.checkpoint import Checkpoint, read_json

FILE = "generation_config.json"

RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 1e3),
}
"""The ranges of the same parameters of a request, as far as a default can make sense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Where a request says nothing. As they stand: OpenAI's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __str__(self) -> str:
        return ", ".join(f"{one.name}={getattr(self, one.name):g}" for one in fields(self))


def sampling_defaults(checkpoint: Checkpoint) -> SamplingDefaults:
    """The model's own, or OpenAI's where it says nothing. Raises SetupError for what makes no sense."""
    path = checkpoint.path / FILE
    if checkpoint.is_gguf or not path.is_file():
        return SamplingDefaults()
    config = read_json(path)
    given = {name: config[name] for name in RANGES if config.get(name) is not None}
    for name, value in given.items():
        low, high = RANGES[name]
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not low <= value <= high or (name == "top_k" and value != int(value)):
            raise SetupError(
                f"{path}: {name} is {str(value)[:60]}, which is not a number within {low} to {high}. Correct "
                "the file, or start with --sampling-defaults openai."
            )
    if "top_k" in given:
        given["top_k"] = max(0, int(given["top_k"]))  # -1 is another word for off
    return SamplingDefaults(**given)
