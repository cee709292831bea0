"""How long a worker of another engine than Baton may take to start, by the size of its model."""

from __future__ import annotations

import re

from baton_operator.kinds.model import Model
from baton_operator.kinds.worker_role import WorkerRole

BASE_S = 600
"""Seconds for the process, compilation and CUDA graphs."""

BILLION_S = 8
"""Seconds per billion parameters: 2 GB of weights at 250 MB/s, as from a shared volume."""

ACCELERATOR_BILLIONS = 40
"""Billion parameters assumed per accelerator: half of 80 GB at 2 bytes each."""

_EXPERTS = re.compile(r"(?<![A-Za-z0-9.])(\d+)x(\d+(?:\.\d+)?)b(?![a-z0-9])", re.IGNORECASE)
_SIZE = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)b(?![a-z0-9])", re.IGNORECASE)


def startup_s(model: Model, role: WorkerRole) -> int:
    """Return the seconds until a worker has to be ready. A value that the user set is kept."""
    given = role.startup_timeout
    if given != type(role).model_fields["startup_timeout"].get_default():
        return given.whole_seconds
    billions = billions_of(f"{model.uri} {model.name or ''}")
    if billions is None:
        billions = ACCELERATOR_BILLIONS * role.parallelism.accelerators
    return max(given.whole_seconds, BASE_S + round(BILLION_S * billions))


def billions_of(name: str) -> float | None:
    """
    Return the billion parameters that the name of a model mentions; None if it mentions none.

    >>> billions_of("hf://meta-llama/Llama-3.3-70B-Instruct"), billions_of("Mixtral-8x22B-v0.1")
    (70.0, 176.0)
    >>> billions_of("Qwen3-235B-A22B"), billions_of("deepseek-v3")
    (235.0, None)
    """
    experts = [int(count) * float(size) for count, size in _EXPERTS.findall(name)]
    return max([*experts, *map(float, _SIZE.findall(name))], default=None)
