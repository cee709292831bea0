"""Where the time of one request went."""

from __future__ import annotations

from typing import Any

import pytest

from baton_api.prompt_report import PromptReport
from baton_router.proxy.tracing import RequestTimes, request_phases


def report(**fields: Any) -> PromptReport:
    values = {"tokens": 100, "cached": 0, "held": 0, "queue_s": 1.0, "compute_s": 4.0, "transfer_s": 2.0}
    return PromptReport(**{**values, "remote": True, **fields})


STREAM = RequestTimes(arrived=10, decided=12, first_byte=20, ended=30)
WHOLE = RequestTimes(arrived=10, decided=12, first_byte=30, ended=30, streams=False)

CASES = {
    "it waits for its worker": (RequestTimes(10, 12), None, [("queue", 10, 12), ("prefill", 12, None)]),
    "its worker was lost": (RequestTimes(10, 12, ended=13), None, [("queue", 10, 12), ("prefill", 12, 13)]),
    "tokens come": (
        RequestTimes(10, 12, 20),
        report(),
        [("queue", 10, 13), ("prefill", 13, 17), ("transfer", 18, 20), ("decode", 20, None)],
    ),
    "by a pair": (
        STREAM,
        report(),
        [("queue", 10, 13), ("prefill", 13, 17), ("transfer", 18, 20), ("decode", 20, 30)],
    ),
    "by one worker": (
        STREAM,
        report(remote=False),
        [("queue", 10, 13), ("prefill", 13, 17), ("decode", 20, 30)],
    ),
    "an answer that came whole": (
        WHOLE,
        report(),
        [("queue", 10, 13), ("prefill", 13, 17), ("transfer", 15, 17), ("decode", 17, 30)],
    ),
    "blocks moved all the while": (
        STREAM,
        report(transfer_s=60.0),
        [("queue", 10, 13), ("prefill", 13, 17), ("transfer", 13, 20), ("decode", 20, 30)],
    ),
    "a worker whose clock runs fast": (
        STREAM,
        report(queue_s=5.0, compute_s=9.0),
        [("queue", 10, 17), ("prefill", 17, 20), ("transfer", 18, 20), ("decode", 20, 30)],
    ),
    "a worker that says nothing": (
        STREAM,
        None,
        [("queue", 10, 12), ("prefill", 12, 20), ("decode", 20, 30)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_request_phases_follow_times_and_report(case: str) -> None:
    seen, reported, expected = CASES[case]
    assert [(one.name, one.start, one.end) for one in request_phases(seen, reported)] == expected


@pytest.mark.parametrize("queue_s", [0.0, 3.0, 99.0])
@pytest.mark.parametrize("compute_s", [0.0, 3.0, 99.0])
@pytest.mark.parametrize("transfer_s", [0.0, 3.0, 99.0])
@pytest.mark.parametrize("seen", [STREAM, WHOLE])
def test_law_phases_stay_within_the_request_for_any_report(
    queue_s: float, compute_s: float, transfer_s: float, seen: RequestTimes
) -> None:
    for one in request_phases(seen, report(queue_s=queue_s, compute_s=compute_s, transfer_s=transfer_s)):
        assert one.end is not None and seen.ended is not None
        assert seen.arrived <= one.start <= one.end <= seen.ended
