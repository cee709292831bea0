"""
The modeled cases: the speed of the workers, the objectives of clients, and the workers that the peak needs.

A case is a load and properties of its workers. `day` runs with processes too, the others only in
virtual time, each for one kind of failure of an autoscaler.

All times are modeled; the world decides how much faster they pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from baton_api.profiles import Objectives, PrefillLine, Profile, StepLine, TransferLine, capacity
from baton_operator.rollout.decision import RoleName
from benchmarks.model_worker import Timing
from benchmarks.scaling.day import DARK, PHASES, Phase, steady

TIMING = Timing(
    start_s=0.02, token_s=1 / 2000, move_s=0.01, step_s=0.03, stream_step_s=0.003, context_step_s=1e-7
)
"""About a model of 70 billion parameters."""

BLOCK_TOKENS, BLOCKS = 512, 640

STARTUP_S = 90.0
"""Of a worker: a large model out of a cache on the node."""

SLOTS = 256
"""Streams that a decode worker generates at a time. So many never come together."""

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
"""Used ratio of a worker's capacity. With so few workers, a higher one makes some requests late by chance."""


def prefill_share(phase: Phase) -> float:
    """Of one worker's time that each request a second takes."""
    return TIMING.prefill_s(phase.prompt, phase.prompt)


def decode_share(phase: Phase, slots: int) -> float:
    """Of one worker that is as full as the objective and its slots allow, likewise."""
    context = phase.prompt * TIMING.context_step_s
    streams = min(slots, (ITL_S - TIMING.step_s) / (TIMING.stream_step_s + context))
    return phase.answer * (TIMING.step_s + streams * (TIMING.stream_step_s + context)) / streams


@dataclass(frozen=True, slots=True)
class Case:
    """One load, and workers for it. Times are in seconds."""

    phases: tuple[Phase, ...]
    startup_s: float = STARTUP_S
    node_s: float = 0.0
    """Of the start, for which the pod waits for a node."""
    slots: int = SLOTS
    local_tokens: int = 0
    """Of the longest prompt that a decode worker computes by itself."""
    unseen: float = 0.0
    """Minute until which routers do not report the demand."""
    most: int = MOST
    dark: tuple[float, float] = (math.inf, math.inf)
    """Minutes between which there is no Prometheus."""

    @property
    def end(self) -> float:
        """Minute of the last request."""
        return self.phases[-1].until


CASES: Mapping[str, Case] = {
    "day": Case(PHASES, dark=DARK),
    # 8 streams take 54 ms a token and 3 % of the KV blocks: neither says that there is no slot for a ninth.
    "slots": Case(
        (
            steady("base", 20, 0.15, 1000, 600),
            steady("slots are full", 80, 0.7, 1000, 600),
            steady("base again", 120, 0.15, 1000, 600),
        ),
        slots=8,
    ),
    # A node with accelerators comes after eight of the ten minutes. Only workers report the burst.
    "slow-starts": Case(
        (
            steady("burst on one worker", 60, 0.3, 8000, 1200),
            steady("base", 100, 0.08, 8000, 600),
            steady("step of long prompts", 160, 0.3, 16_000, 250),
            steady("base again", 200, 0.08, 8000, 600),
        ),
        startup_s=600.0,
        node_s=480.0,
        unseen=60.0,
        most=16,
    ),
    "short-chats": Case(
        (
            steady("base", 20, 0.08, 8000, 600),
            steady("short chats", 60, 16.0, 250, 40),
            steady("base again", 80, 0.08, 8000, 600),
        ),
        local_tokens=512,
    ),
}


def profile(case: Case) -> Profile:
    """Return the profile that `baton bench --find` would measure, for requests of the base load."""
    prefill = PrefillLine(base_s=TIMING.start_s, token_s=TIMING.token_s, pair_s=TIMING.pair_s)
    step = StepLine(base_s=TIMING.step_s, stream_s=TIMING.stream_step_s, token_s=TIMING.context_step_s)
    transfer = TransferLine(start_s=TIMING.move_s, token_s=0.0)
    objectives = Objectives(ttft_s=TTFT_S, itl_s=ITL_S, prompt_tokens=8000, output_tokens=600)
    tokens = BLOCKS * BLOCK_TOKENS
    return Profile(
        model="imagined",
        machine="imagined",
        baton="",
        measured_at=0.0,
        prefill=prefill,
        step=step,
        transfer=transfer,
        kv_tokens=tokens,
        max_streams=case.slots,
        objectives=objectives,
        capacity=capacity(prefill, step, transfer, tokens, case.slots, objectives),
    )


def peak(case: Case) -> Mapping[RoleName, int]:
    """Workers for the highest load that each role ever has."""
    remote = [phase for phase in case.phases if phase.prompt > case.local_tokens]
    prefill = max(phase.most * prefill_share(phase) for phase in remote)
    decode = max(phase.most * decode_share(phase, case.slots) for phase in case.phases)
    return {"prefill": math.ceil(prefill / USED), "decode": math.ceil(decode / USED)}
