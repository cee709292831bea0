"""Metrics of the operator: its own work, the state of services, and the autoscaler."""

from __future__ import annotations

from baton_api.metrics.metric import Label, Metric

SERVICE = (Label("namespace", bound="namespaces with services"), Label("service", bound="services"))
"""Labels of a service."""

OF_ROLE = (*SERVICE, Label("role", ("prefill", "decode", "router")))

# --- Own work ---

OPERATOR_RECONCILE = Metric(
    "baton_operator_reconcile_seconds",
    "histogram",
    "seconds",
    "Time of one reconcile, including writes to the API server.",
    (Label("kind", bound="4 kinds of custom resources"), Label("result", ("success", "error"))),
    (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0),
)
OPERATOR_QUEUE = Metric(
    "baton_operator_queue_depth", "gauge", "objects", "Objects in the work queue that are due."
)
OPERATOR_QUEUE_OLDEST = Metric(
    "baton_operator_queue_oldest_seconds",
    "gauge",
    "seconds",
    "Age of the oldest due object in the work queue.",
)
OPERATOR_LAST_EVENT = Metric(
    "baton_operator_watch_last_event_seconds",
    "gauge",
    "seconds",
    "Time since the last watch event of a kind.",
    (Label("resource", bound="18 watched kinds"),),
)
OPERATOR_WATCH_AGE = Metric(
    "baton_operator_watch_age_seconds",
    "gauge",
    "seconds",
    "Time since the quietest watch received an event, a bookmark or a response. 0: this operator is not "
    "the leader.",
)
OPERATOR_UNSYNCED = Metric(
    "baton_operator_cache_unsynced_kinds",
    "gauge",
    "objects",
    "Kinds that the leader has not listed yet. It does not reconcile before this is 0.",
)
OPERATOR_LEADER = Metric("baton_operator_leader", "gauge", "yes or no", "1 if this operator holds the Lease.")
OPERATOR_API = Metric(
    "baton_operator_api_requests_total",
    "counter",
    "requests",
    "Requests to the Kubernetes API by method and status. Status 0: no response.",
    (
        Label("method", ("GET", "POST", "PUT", "PATCH", "DELETE")),
        Label("code", bound="about 20 HTTP statuses"),
    ),
)

# --- Services ---

OPERATOR_CONDITION = Metric(
    "baton_operator_condition",
    "gauge",
    "yes or no",
    "1 for the current status of each condition of a service, 0 for other statuses.",
    (
        *SERVICE,
        Label("type", bound="about 10 conditions"),
        Label("status", ("True", "False", "Unknown")),
    ),
)
OPERATOR_DESIRED = Metric(
    "baton_operator_desired_replicas", "gauge", "pods", "Desired pods of a service's role.", OF_ROLE
)
OPERATOR_READY = Metric(
    "baton_operator_ready_replicas", "gauge", "pods", "Ready pods of a service's role.", OF_ROLE
)
OPERATOR_WEIGHT = Metric(
    "baton_operator_generation_weight",
    "gauge",
    "requests",
    "Percentage of requests that a revision receives.",
    (*SERVICE, Label("revision", bound="two or three revisions with workers")),
)
BOUND = Label("bound", bound="one bucket per service")
"""The smallest bucket of the router's histogram that contains the objective."""

OPERATOR_OBJECTIVE_FIRST_TOKEN = Metric(
    "baton_operator_objective_first_token_seconds",
    "gauge",
    "seconds",
    "Objective of a service for the time to first token. The label `bound` is the histogram bucket that "
    "measures it.",
    (*SERVICE, BOUND),
)
OPERATOR_OBJECTIVE_TOKEN = Metric(
    "baton_operator_objective_token_seconds",
    "gauge",
    "seconds",
    "Objective of a service for the time between tokens. The label `bound` is the histogram bucket that "
    "measures it.",
    (*SERVICE, BOUND),
)
OPERATOR_OBJECTIVE_SHARE = Metric(
    "baton_operator_objective_ratio",
    "gauge",
    "ratio",
    "Share of streams that must meet the objectives of a service.",
    SERVICE,
)
OPERATOR_ROLLBACKS = Metric(
    "baton_operator_rollbacks_total",
    "counter",
    "events",
    "Revisions that failed and were rolled back.",
    SERVICE,
)


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
