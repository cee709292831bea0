"""Objectives that are not kept, hardly not kept, and kept."""

from __future__ import annotations

from baton_api import metrics
from tests.observing.told_series import BYTE, ENOUGH, HOUR, OF, TOKEN, Case, answered, once, rise, streams

CASES = (
    Case(
        "BatonAvailabilityBurn",
        "page",
        {**answered(200, 98), **answered(503, 2)},
        # As bad, but it has been over for ten minutes.
        {**answered(200, 98), **once(metrics.ROUTER_CUT, 2, 50, **OF, cause="reset")},
        at=HOUR + 5,
    ),
    Case(
        "BatonAvailabilityBurn",
        "page",
        # Five of 25 in an hour, and one of 21.
        {**answered(200, 20 / 60), **answered(503, 5 / 60)},
        {**answered(200, 20.5 / 60), **answered(503, 1 / 60)},
        at=HOUR + 5,
    ),
    Case(
        "BatonAvailabilityBurn",
        "ticket",
        {**answered(200, 99), **rise(metrics.ROUTER_CUT, 1, **OF, cause="reset")},
        {**answered(200, 995), **answered(429, 90), **answered(503, 5)},
        at=6 * HOUR + 5,
    ),
    Case(
        "BatonFirstByteBurn",
        "page",
        {**ENOUGH, **streams(*BYTE, 1, 10)},
        # Batches may wait.
        {**ENOUGH, **streams(*BYTE, 9, 10), **streams(*BYTE, 1, 100, "batch")},
        at=HOUR + 5,
    ),
    Case(
        "BatonFirstByteBurn",
        "ticket",
        {**ENOUGH, **streams(*BYTE, 6, 10)},
        {**ENOUGH, **streams(*BYTE, 8, 10)},
        at=6 * HOUR + 5,
    ),
    Case(
        "BatonTokenTimeBurn",
        "page",
        {**ENOUGH, **streams(*TOKEN, 1, 10)},
        {**answered(200, 0.2), **streams(*TOKEN, 0, 0.2)},  # twelve requests in an hour
        at=HOUR + 5,
    ),
    Case(
        "BatonTokenTimeBurn",
        "ticket",
        {**ENOUGH, **streams(*TOKEN, 6, 10)},
        {**ENOUGH, **streams(*TOKEN, 8, 10)},
        at=6 * HOUR + 5,
    ),
    Case(
        "BatonErrors",
        "page",
        {**answered(200, 90), **answered(500, 10)},
        {**answered(200, 90), **answered(400, 10), **answered(499, 10)},
    ),
    Case(
        "BatonErrors",
        "page",
        {**answered(200, 4), **answered(500, 1)},  # five of 25 in five minutes, and two
        {**answered(200, 4.6), **answered(500, 0.4)},
    ),
)
