"""Services in a cluster, as their operator sees them."""

from __future__ import annotations

from baton_api import metrics
from tests.observing.told_series import BOTH, CAME, DECODE, NEVER, PREFILL, Case, condition, level, replicas

SLEPT = "1+0x10 0+0x10 1+0x400"
"""Replicas that a role is to have: none for ten minutes."""

CASES = (
    Case("BatonNoDecode", "page", replicas("decode", 2, CAME), replicas("decode", 0, CAME)),
    # A model loads for half an hour after the role had slept, and a worker that was ready since then is lost.
    Case(
        "BatonNoDecode",
        "page",
        replicas("decode", SLEPT, "1+0x5 0+0x20 1+0x5 0+0x400"),
        replicas("decode", SLEPT, "1+0x12 0+0x400"),
        at=45,
    ),
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
    Case(
        "BatonMetricsMissing",
        "ticket",
        {**replicas("decode", 1, "1+0x400"), **level(metrics.WORKER_RUNNING, 0, **PREFILL)},
        # Without prefill workers, and in a rollout from such workers to those beside prefill workers.
        {
            **replicas("decode", 2, "2+0x400"),
            **level(metrics.WORKER_RUNNING, 0, **BOTH),
            **level(metrics.WORKER_RUNNING, 0, **{**BOTH, "role": "decode"}),
        },
    ),
    Case(
        "BatonMetricsMissing",
        "ticket",
        replicas("decode", 1, "1+0x400"),
        {**replicas("decode", 1, "1+0x400"), **level(metrics.WORKER_RUNNING, 0, **BOTH)},
    ),
)
