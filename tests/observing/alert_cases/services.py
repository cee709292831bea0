"""Cases of alerts on services."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.promql import Scope
from tests.observing.alert_series import (
    BOTH,
    DECODE,
    ENOUGH_REQUESTS,
    LOST,
    NEVER_READY,
    OUTPUT_TOKEN,
    PREFILL,
    SERVICE,
    Case,
    condition,
    constant,
    replicas,
    streams,
)

SCALED_TO_ZERO = "1+0x10 0+0x10 1+0x400"
"""Desired replicas: zero for ten minutes."""

CASES = (
    Case("BatonNoReadyReplicas", "page", replicas("decode", 2, LOST), replicas("decode", 0, LOST)),
    # Fires: a worker that became ready after the scale from zero is lost. Silent: the model still loads.
    Case(
        "BatonNoReadyReplicas",
        "page",
        replicas("decode", SCALED_TO_ZERO, "1+0x5 0+0x20 1+0x5 0+0x400"),
        replicas("decode", SCALED_TO_ZERO, "1+0x12 0+0x400"),
        at=45,
    ),
    Case("BatonNoReadyReplicas", "ticket", replicas("prefill", 2, LOST), replicas("prefill", 2, NEVER_READY)),
    Case("BatonNoReadyReplicas", "page", replicas("router", 2, LOST), replicas("router", 2, "2+0x5 1+0x400")),
    Case(
        "BatonServiceNotReady",
        "ticket",
        {**condition("Ready", "False"), **replicas("decode", 1, NEVER_READY)},
        {
            **condition("Ready", "False"),
            **replicas("decode", 0, NEVER_READY),
            **replicas("router", 1, NEVER_READY),
        },
    ),
    Case(
        "BatonModelMissing",
        "info",
        condition("ModelReady", "False"),
        condition("ModelReady", "True"),
        at=45,
    ),
    Case(
        "BatonSpecUnsupported",
        "info",
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
        {**replicas("decode", 1, "1+0x400"), **constant(metrics.WORKER_RUNNING, 0, **DECODE)},
    ),
    Case(
        "BatonMetricsMissing",
        "ticket",
        {**replicas("decode", 1, "1+0x400"), **constant(metrics.WORKER_RUNNING, 0, **PREFILL)},
        # Aggregated workers, and a rollout from aggregated to disaggregated workers.
        {
            **replicas("decode", 2, "2+0x400"),
            **constant(metrics.WORKER_RUNNING, 0, **BOTH),
            **constant(metrics.WORKER_RUNNING, 0, **{**BOTH, "role": "decode"}),
        },
    ),
    Case(
        "BatonMetricsMissing",
        "ticket",
        replicas("decode", 1, "1+0x400"),
        {**replicas("decode", 1, "1+0x400"), **constant(metrics.WORKER_RUNNING, 0, **BOTH)},
    ),
    Case(
        "BatonAutoscalerMetricsMissing",
        "ticket",
        constant(metrics.AUTOSCALER_METRICS_AGE, 200, **SERVICE),
        constant(metrics.AUTOSCALER_METRICS_AGE, 20, **SERVICE),
    ),
    Case(
        "BatonScalingLimited",
        "ticket",
        {
            **constant(metrics.AUTOSCALER_RECOMMENDED, 5, **SERVICE, role="decode"),
            **constant(metrics.AUTOSCALER_DESIRED, 2, **SERVICE, role="decode"),
            **ENOUGH_REQUESTS,
            **streams(*OUTPUT_TOKEN, 5, 10),
        },
        {
            **constant(metrics.AUTOSCALER_RECOMMENDED, 5, **SERVICE, role="decode"),
            **constant(metrics.AUTOSCALER_DESIRED, 2, **SERVICE, role="decode"),
            **ENOUGH_REQUESTS,
            **streams(*OUTPUT_TOKEN, 10, 10),
        },
    ),
    Case(
        "BatonScalingLimited",
        "info",
        constant(metrics.AUTOSCALER_DECIDED_BY, 1, **SERVICE, role="decode", reason="GpuBudget"),
        {
            # The budget was exhausted for 20 minutes only.
            Scope("").series(
                metrics.AUTOSCALER_DECIDED_BY, **SERVICE, role="decode", reason="GpuBudget"
            ): "1x20 _x400",
            **constant(metrics.AUTOSCALER_DECIDED_BY, 1, **SERVICE, role="decode", reason="Steady"),
        },
        at=40,
    ),
    Case(
        "BatonScalingFlapping",
        "info",
        {Scope("").series(metrics.OPERATOR_DESIRED, **SERVICE, role="decode"): "1 2 " * 250},
        {
            Scope("").series(
                metrics.OPERATOR_DESIRED, **SERVICE, role="decode"
            ): "1+0x10 2+0x10 3+0x10 4+0x400"
        },
        at=35,
    ),
)
