"""Metrics of the operator's autoscaler: decisions, reasons and inputs."""

from __future__ import annotations

from baton_api.metrics.metric import Label, Metric
from baton_api.metrics.operator import SERVICE

SCALED = (*SERVICE, Label("role", ("prefill", "decode")))

AUTOSCALER_DESIRED = Metric(
    "baton_autoscaler_desired_replicas", "gauge", "pods", "Desired replicas of a role.", SCALED
)
AUTOSCALER_RECOMMENDED = Metric(
    "baton_autoscaler_recommended_replicas",
    "gauge",
    "pods",
    "Replicas that the load requires, before limits, the GPU budget and holds.",
    SCALED,
)
AUTOSCALER_DECIDED_BY = Metric(
    "baton_autoscaler_decided_by",
    "gauge",
    "yes or no",
    "1 for the reason of the last decision.",
    (*SCALED, Label("reason", bound="about 20 reasons")),
)
AUTOSCALER_DECISIONS = Metric(
    "baton_autoscaler_decisions_total",
    "counter",
    "events",
    "Changes of the number of replicas, by direction.",
    (*SCALED, Label("direction", ("up", "down"))),
)
AUTOSCALER_UNKNOWN = Metric(
    "baton_autoscaler_inputs_unknown",
    "gauge",
    "yes or no",
    "1 for each unavailable input, 0 for available ones.",
    (*SCALED, Label("input", bound="about 10 inputs")),
)
AUTOSCALER_HELD = Metric(
    "baton_autoscaler_held_down",
    "gauge",
    "yes or no",
    "1 for each reason that prevents scaling a role down although its load allows it.",
    (*SCALED, Label("reason", bound="about 10 reasons")),
)
AUTOSCALER_METRICS_AGE = Metric(
    "baton_autoscaler_metrics_age_seconds",
    "gauge",
    "seconds",
    "Time since the last successful read of a service's metrics.",
    SERVICE,
)
AUTOSCALER_INPUT = Metric(
    "baton_autoscaler_input",
    "gauge",
    "events",
    "Inputs of the decision, as far as they are available. Tokens per second: `demand`, `rate`. Tokens: "
    "`backlog`. Seconds: `latency`, `first_token`. Ratio, above 1 with queued requests: `utilisation`. "
    "Requests: `requests`, `queued`, `held`.",
    (*SCALED, Label("input", bound="about 10 inputs")),
)
AUTOSCALER_CAPACITY = Metric(
    "baton_autoscaler_capacity_tokens_per_second",
    "gauge",
    "tokens per second",
    "Learned capacity of one worker of a role: prompt tokens for prefill, generated tokens for decode.",
    SCALED,
)
