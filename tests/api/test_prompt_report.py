"""A prompt's report survives its header, and nothing else passes for one."""

from __future__ import annotations

import random

import pytest

from baton_api.prompt_report import Fallback, PromptReport

REPORT = PromptReport(
    tokens=270, cached=240, held=16, queue_s=0.001, compute_s=0.12, transfer_s=0.003, remote=True
)


@pytest.mark.parametrize("seed", range(20))
def test_report_survives_a_round_trip(seed: int) -> None:
    rng = random.Random(seed)
    tokens = rng.randint(1, 10**6)
    report = PromptReport(
        tokens=tokens,
        cached=rng.randint(0, tokens),
        held=rng.randint(0, tokens),
        queue_s=round(rng.uniform(0, 100), 6),
        compute_s=round(rng.uniform(0, 100), 6),
        transfer_s=round(rng.uniform(0, 100), 6),
        remote=rng.random() < 0.5,
        tail=rng.choice(["", f"{rng.getrandbits(64):016x}"]),
        fallback=rng.choice(["", *Fallback]),
    )
    assert PromptReport.decode(report.encode()) == report


def test_report_of_a_newer_worker_is_read() -> None:
    assert PromptReport.decode(REPORT.encode() + ";colour=red") == REPORT


@pytest.mark.parametrize(
    "damage",
    [
        ("tokens=270;", ""),
        ("tokens=270", "tokens=0"),
        ("tokens=270", "tokens=many"),
        ("tokens=270", "tokens=" + "9" * 100),
        ("cached=240", "cached=271"),
        ("held=16", "held=-1"),
        ("compute_s=0.120000", "compute_s=-1"),
        ("compute_s=0.120000", "compute_s=nan"),
        ("queue_s=0.001000", "queue_s=1e300"),
        (";", ","),
        ("tail=", "tail=12"),
        ("tail=", "tail=" + "-" * 16),
        ("fallback=", "fallback=No such word"),
    ],
)
def test_invalid_header_is_not_a_report(damage: tuple[str, str]) -> None:
    assert PromptReport.decode(REPORT.encode().replace(*damage)) is None


def test_empty_header_is_not_a_report() -> None:
    assert PromptReport.decode("") is None
