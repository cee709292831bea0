"""Metrics of the autoscaler, which runs in the operator: what it decided, why, and on what it relied."""

from __future__ import annotations

from baton_api.metrics.metric import Label, Metric
from baton_api.metrics.operator import SERVICE

SCALED = (*SERVICE, Label("role", ("prefill", "decode")))

AUTOSCALER_DESIRED = Metric(
    "baton_autoscaler_desired_replicas", "gauge", "pods", "Replicas that a role is to have.", SCALED
)
AUTOSCALER_RECOMMENDED = Metric(
    "baton_autoscaler_recommended_replicas",
    "gauge",
    "pods",
    "Replicas that the load alone would ask for, before limits, budget and all that holds a role.",
    SCALED,
)
AUTOSCALER_DECIDED_BY = Metric(
    "baton_autoscaler_decided_by",
    "gauge",
    "yes or no",
    "1 for the reason of the last decision.",
    (*SCALED, Label("reason", bound="the autoscaler's reasons, some twenty")),
)
AUTOSCALER_DECISIONS = Metric(
    "baton_autoscaler_decisions_total",
    "counter",
    "events",
    "Times that the number of replicas was changed, by direction.",
    (*SCALED, Label("direction", ("up", "down"))),
)
AUTOSCALER_UNKNOWN = Metric(
    "baton_autoscaler_inputs_unknown",
    "gauge",
    "yes or no",
    "1 for each input that could not be had, 0 for those that could.",
    (*SCALED, Label("input", bound="the autoscaler's inputs, some ten")),
)
AUTOSCALER_HELD = Metric(
    "baton_autoscaler_held_down",
    "gauge",
    "yes or no",
    "1 for each reason for which a role is not made smaller although its load would allow it.",
    (*SCALED, Label("reason", bound="the autoscaler's reasons to hold, some ten")),
)
AUTOSCALER_METRICS_AGE = Metric(
    "baton_autoscaler_metrics_age_seconds",
    "gauge",
    "seconds",
    "Time since the metrics of a service were last had.",
    SERVICE,
)
AUTOSCALER_INPUT = Metric(
    "baton_autoscaler_input",
    "gauge",
    "events",
    "What decisions are made from, as far as it is known: demand and rate in tokens a second, backlog in "
    "tokens, latency and first_token in seconds, utilisation as a share and above 1 with what is queued, "
    "requests, queued and held in requests.",
    (*SCALED, Label("input", bound="the autoscaler's inputs, some ten")),
)
AUTOSCALER_CAPACITY = Metric(
    "baton_autoscaler_capacity_tokens_per_second",
    "gauge",
    "tokens per second",
    "What one worker of a role can do, as far as was learned: prompt tokens of prefill, generated tokens "
    "of decode.",
    SCALED,
)
