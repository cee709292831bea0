"""
What is meant: the model that the workers stand for, what clients expect of it, and who the peak needs.

All times are those of the case; how much faster they pass here is the world's affair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from baton_operator.rollout import RoleName
from benchmarks.model_worker import Timing
from benchmarks.scaling.day import PHASES, Phase

TIMING = Timing(
    start_s=0.02, token_s=1 / 2000, move_s=0.01, step_s=0.03, stream_step_s=0.003, context_step_s=1e-7
)
"""About a model of 70 billion parameters."""

BLOCK_TOKENS, BLOCKS = 512, 640

STARTUP_S = 90.0
"""Of a worker: a large model out of a cache on the node."""

NOTICE_S = 5.0
"""From the word that a worker ends to its SIGTERM."""

TTFT_S, ITL_S = 30.0, 0.1
"""Objectives of a request."""

INTERVAL_S = 15.0
"""Between two decisions, of the operator as of an HPA."""

WINDOW_S = 120.0
ROLES: tuple[RoleName, ...] = ("prefill", "decode")
MOST = 8

USED = 0.7
"""Of what a worker can do: of so few workers, with more, some requests wait for too long by chance alone."""


def prefill_share(phase: Phase) -> float:
    """Of one worker's time that each request a second takes."""
    return TIMING.prefill_s(phase.prompt, phase.prompt)


def decode_share(phase: Phase) -> float:
    """Of one worker that is as full as the objective allows, likewise."""
    context = phase.prompt * TIMING.context_step_s
    streams = (ITL_S - TIMING.step_s) / (TIMING.stream_step_s + context)
    return phase.answer * ITL_S / streams


def peak() -> Mapping[RoleName, int]:
    """Workers for the highest load that each role ever has."""
    prefill = max(phase.most * prefill_share(phase) for phase in PHASES)
    decode = max(phase.most * decode_share(phase) for phase in PHASES)
    return {"prefill": math.ceil(prefill / USED), "decode": math.ceil(decode / USED)}
