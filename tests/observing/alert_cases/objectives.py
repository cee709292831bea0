"""Cases of alerts on objectives."""

from __future__ import annotations

from baton_api import metrics
from tests.observing.alert_series import (
    ENOUGH_REQUESTS,
    FIRST_BYTE,
    HOUR,
    OUTPUT_TOKEN,
    SERVICE,
    Case,
    counter,
    responses,
    stopped_counter,
    streams,
)

CASES = (
    Case(
        "BatonAvailabilityBurn",
        "page",
        {**responses(200, 98), **responses(503, 2)},
        # The same failures, which ended ten minutes ago.
        {**responses(200, 98), **stopped_counter(metrics.ROUTER_CUT, 2, 50, **SERVICE, cause="reset")},
        at=HOUR + 5,
    ),
    Case(
        "BatonAvailabilityBurn",
        "page",
        # Five of 25 requests fail in an hour. Silent: one of 21.
        {**responses(200, 20 / 60), **responses(503, 5 / 60)},
        {**responses(200, 20.5 / 60), **responses(503, 1 / 60)},
        at=HOUR + 5,
    ),
    Case(
        "BatonAvailabilityBurn",
        "ticket",
        {**responses(200, 99), **counter(metrics.ROUTER_CUT, 1, **SERVICE, cause="reset")},
        {**responses(200, 995), **responses(429, 90), **responses(503, 5)},
        at=6 * HOUR + 5,
    ),
    Case(
        "BatonTimeToFirstTokenBurn",
        "page",
        {**ENOUGH_REQUESTS, **streams(*FIRST_BYTE, 1, 10)},
        # Only batch requests are late.
        {**ENOUGH_REQUESTS, **streams(*FIRST_BYTE, 9, 10), **streams(*FIRST_BYTE, 1, 100, "batch")},
        at=HOUR + 5,
    ),
    Case(
        "BatonTimeToFirstTokenBurn",
        "ticket",
        {**ENOUGH_REQUESTS, **streams(*FIRST_BYTE, 6, 10)},
        {**ENOUGH_REQUESTS, **streams(*FIRST_BYTE, 8, 10)},
        at=6 * HOUR + 5,
    ),
    Case(
        "BatonInterTokenLatencyBurn",
        "page",
        {**ENOUGH_REQUESTS, **streams(*OUTPUT_TOKEN, 1, 10)},
        {**responses(200, 0.2), **streams(*OUTPUT_TOKEN, 0, 0.2)},  # 12 requests in an hour
        at=HOUR + 5,
    ),
    Case(
        "BatonInterTokenLatencyBurn",
        "ticket",
        {**ENOUGH_REQUESTS, **streams(*OUTPUT_TOKEN, 6, 10)},
        {**ENOUGH_REQUESTS, **streams(*OUTPUT_TOKEN, 8, 10)},
        at=6 * HOUR + 5,
    ),
    Case(
        "BatonAvailabilityBurn",
        "page",
        {**responses(200, 90), **responses(500, 10)},
        {**responses(200, 90), **responses(400, 10), **responses(499, 10)},
    ),
    Case(
        "BatonAvailabilityBurn",
        "page",
        # Five of 25 requests fail in five minutes. Silent: two fail.
        {**responses(200, 4), **responses(500, 1)},
        {**responses(200, 4.6), **responses(500, "0+0x25 0+0.4x5")},
    ),
)
