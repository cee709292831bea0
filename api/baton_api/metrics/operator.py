"""The operator's metrics: its own work, and how each service stands."""

from __future__ import annotations

from baton_api.metrics.metric import Label, Metric

SERVICE = (Label("namespace", bound="namespaces with services"), Label("service", bound="services"))
"""Which one."""

OF_ROLE = (*SERVICE, Label("role", ("prefill", "decode", "router")))

# --- Its own work ---

OPERATOR_RECONCILE = Metric(
    "baton_operator_reconcile_seconds",
    "histogram",
    "seconds",
    "Time of one look at an object, all writes included; success or error.",
    (Label("kind", bound="kinds that users write, 4"), Label("result", ("success", "error"))),
    (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0),
)
OPERATOR_QUEUE = Metric(
    "baton_operator_queue_depth", "gauge", "objects", "Objects that could be looked at now, and wait."
)
OPERATOR_QUEUE_OLDEST = Metric(
    "baton_operator_queue_oldest_seconds",
    "gauge",
    "seconds",
    "For how long one of them has waited at most.",
)
OPERATOR_LAST_EVENT = Metric(
    "baton_operator_watch_last_event_seconds",
    "gauge",
    "seconds",
    "Time since the last event of a kind came by its watch.",
    (Label("resource", bound="kinds that are watched, 18"),),
)
OPERATOR_WATCH_AGE = Metric(
    "baton_operator_watch_age_seconds",
    "gauge",
    "seconds",
    "Time since the quietest watch last brought anything: an event, a bookmark or the answer to a request. "
    "0 for an operator that does not lead.",
)
OPERATOR_UNSYNCED = Metric(
    "baton_operator_cache_unsynced_kinds",
    "gauge",
    "objects",
    "Kinds that the leader has not listed yet. It reconciles nothing before this is 0.",
)
OPERATOR_LEADER = Metric("baton_operator_leader", "gauge", "yes or no", "1 if this operator holds the Lease.")
OPERATOR_API = Metric(
    "baton_operator_api_requests_total",
    "counter",
    "requests",
    "Requests to the Kubernetes API by method and status; 0 if there was no answer.",
    (
        Label("method", ("GET", "POST", "PUT", "PATCH", "DELETE")),
        Label("code", bound="statuses of HTTP, some twenty"),
    ),
)

# --- Services ---

OPERATOR_CONDITION = Metric(
    "baton_operator_condition",
    "gauge",
    "yes or no",
    "1 for the status that a condition of a service has.",
    (
        *SERVICE,
        Label("type", bound="conditions of a service, some ten"),
        Label("status", ("True", "False", "Unknown")),
    ),
)
OPERATOR_DESIRED = Metric(
    "baton_operator_desired_replicas", "gauge", "pods", "Pods that a role of a service is to have.", OF_ROLE
)
OPERATOR_READY = Metric(
    "baton_operator_ready_replicas", "gauge", "pods", "Pods of a role of a service that are ready.", OF_ROLE
)
OPERATOR_WEIGHT = Metric(
    "baton_operator_generation_weight",
    "gauge",
    "requests",
    "How many of a hundred requests a generation of workers gets.",
    (*SERVICE, Label("revision", bound="generations that have workers, two or three")),
)
BOUND = Label("bound", bound="one of the router's buckets for a service")
"""The least bucket of the router's histogram that holds the objective: by that it is judged."""

OPERATOR_OBJECTIVE_FIRST_TOKEN = Metric(
    "baton_operator_objective_first_token_seconds",
    "gauge",
    "seconds",
    "What a service's spec wants of the time to the first token, and the bucket by which that is judged.",
    (*SERVICE, BOUND),
)
OPERATOR_OBJECTIVE_TOKEN = Metric(
    "baton_operator_objective_token_seconds",
    "gauge",
    "seconds",
    "What a service's spec wants of the time from token to token, and the bucket by which that is judged.",
    (*SERVICE, BOUND),
)
OPERATOR_OBJECTIVE_SHARE = Metric(
    "baton_operator_objective_ratio",
    "gauge",
    "ratio",
    "Share of its streams that a service's spec wants to be in time.",
    SERVICE,
)
OPERATOR_ROLLBACKS = Metric(
    "baton_operator_rollbacks_total",
    "counter",
    "events",
    "Generations that failed and were taken back.",
    SERVICE,
)
