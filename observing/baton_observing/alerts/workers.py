"""What goes wrong with workers: too much to do, no room, blocks that do not come over."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.alerts.alert import WHICH, Alert
from baton_observing.promql import Scope, ratio

BY = ("namespace", "service")
SHORT, LONG = Scope("5m"), Scope("15m")

FAILURES = SHORT.per_second(metrics.WORKER_TRANSFER_FAILURES, *BY)
TRANSFERS = SHORT.per_second(metrics.WORKER_TRANSFER_SECONDS, *BY, part="_count")
FAILED = ratio(FAILURES, f"({FAILURES} + ({TRANSFERS} or 0 * {FAILURES}))")

PREFILL_WAITS = LONG.over("avg", metrics.WORKER_QUEUED, *BY, role="prefill")
PREFILL_TOKENS = LONG.over("max", metrics.WORKER_QUEUED_TOKENS, *BY, role="prefill")
DECODE_FULL = LONG.over("avg", metrics.WORKER_KV_USAGE, *BY, of="avg", role="decode")

PER_TOKEN = LONG.quantile(0.5, metrics.WORKER_TOKEN, *BY, "worker")

ALERTS = (
    Alert(
        name="BatonTransferFailing",
        severity="ticket",
        summary=f"{WHICH}: {{{{ $value | humanizePercentage }}}} of prompts do not come over from prefill "
        f"workers.",
        expression=f"{FAILED} > 0.01",
    ),
    Alert(
        name="BatonTransferFailing",
        severity="page",
        summary=f"{WHICH}: {{{{ $value | humanizePercentage }}}} of prompts do not come over: prefill "
        f"workers are "
        "of no use.",
        expression=f"{FAILED} > 0.25",
    ),
    Alert(
        name="BatonTransfersMissing",
        severity="page",
        summary=f"{WHICH}: prompts are sent to prefill workers, and none comes over.",
        expression=f"{SHORT.per_second(metrics.ROUTER_DECISIONS, *BY, path='remote')} > 0.02 unless "
        f"{SHORT.per_second(metrics.ROUTER_TRANSFER, *BY, part='_count')} > 0",
        lasting="10m",
    ),
    Alert(
        name="BatonKvSaturated",
        severity="ticket",
        summary=f"{WHICH}: the KV cache of a {{{{ $labels.role }}}} worker is full.",
        expression=f"{SHORT.over('min', metrics.WORKER_KV_USAGE, *BY, 'role', of='max')} > 0.95",
    ),
    Alert(
        name="BatonKvQuarantined",
        severity="ticket",
        summary=f"{WHICH}: {{{{ $value }}}} blocks of {{{{ $labels.worker }}}} do not leave quarantine.",
        expression=f"{SHORT.over('min', metrics.WORKER_BLOCKS, *BY, 'worker', state='quarantined')} > 0",
        lasting="10m",
    ),
    Alert(
        name="BatonRetractions",
        severity="ticket",
        summary=f"{WHICH}: {{{{ $value | humanize }}}} sequences a second give back their blocks.",
        expression=f"{SHORT.per_second(metrics.WORKER_RETRACTIONS, *BY)} > 1",
        lasting="10m",
    ),
    Alert(
        name="BatonImbalance",
        severity="ticket",
        summary=f"{WHICH}: one role waits for the other; prefill and decode are not in balance.",
        expression=f"({PREFILL_WAITS} > 1 and {DECODE_FULL} < 0.3) or ({DECODE_FULL} > 0.9 and "
        f"{PREFILL_TOKENS} == 0)",
        lasting="15m",
    ),
    Alert(
        name="BatonWorkerSlow",
        severity="ticket",
        summary=f"{WHICH}: {{{{ $labels.worker }}}} takes three times as long per token as others do.",
        expression=f"{PER_TOKEN} > on (namespace, service) group_left() 3 * quantile by (namespace, "
        f"service) (0.5, "
        f"{PER_TOKEN}) and on (namespace, service) count by (namespace, service) ({PER_TOKEN}) > 2",
        lasting="15m",
    ),
)
