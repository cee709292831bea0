"""Services in a cluster, as their operator sees them."""

from __future__ import annotations

from baton_api import metrics
from tests.observing.told_series import CAME, DECODE, NEVER, Case, condition, level, replicas

CASES = (
    Case("BatonNoDecode", "page", replicas("decode", 2, CAME), replicas("decode", 0, CAME)),
    Case("BatonNoPrefill", "page", replicas("prefill", 2, CAME), replicas("prefill", 2, NEVER)),
    Case("BatonNoRouter", "page", replicas("router", 2, CAME), replicas("router", 2, "2+0x5 1+0x400")),
    Case(
        "BatonServiceNotReady",
        "ticket",
        {**condition("Ready", "False"), **replicas("decode", 1, NEVER)},
        {**condition("Ready", "False"), **replicas("decode", 0, NEVER), **replicas("router", 1, NEVER)},
    ),
    Case(
        "BatonModelMissing",
        "ticket",
        condition("ModelReady", "False"),
        condition("ModelReady", "True"),
        at=45,
    ),
    Case(
        "BatonSpecUnsupported",
        "ticket",
        condition("SpecSupported", "False"),
        condition("SpecSupported", "True"),
    ),
    Case(
        "BatonRolloutStuck",
        "ticket",
        condition("Progressing", "True"),
        condition("Progressing", "False"),
        at=45,
    ),
    Case("BatonRolledBack", "ticket", condition("Degraded", "True"), condition("Degraded", "False")),
    Case(
        "BatonMetricsMissing",
        "ticket",
        replicas("decode", 1, "1+0x400"),
        {**replicas("decode", 1, "1+0x400"), **level(metrics.WORKER_RUNNING, 0, **DECODE)},
    ),
)
