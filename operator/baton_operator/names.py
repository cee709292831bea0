"""Names and labels of the objects of one InferenceService."""

from __future__ import annotations

from baton_api import labels
from baton_api.workers import Role

Labels = dict[str, str]

MAIN = "main"
"""Name of the main container of every pod."""

HTTP_PORT = 8000
"""Port of the workers' OpenAI API."""

HEALTH_PORT = 8001
"""Port for kubelets and Prometheus, which have no client certificate, on workers with mutual TLS."""

KV_EVENTS_PORT = 5558
KV_REPLAY_PORT = 5559

ROUTER_PORT = 8080
ROUTER_METRICS_PORT = 8081
"""Port of the routers' metrics, which no Service has."""
METRICS = "metrics"
"""Name of that port in the pods of routers."""
PICKER_PORT = 9002
"""Port of the routers' endpoint picker for gateways."""

ROUTER = "router"
"""Role of routers in labels."""

OPERATOR = "operator"
"""Role of the operator's pods in labels, which the chart sets for every release name."""


def worker(service: str, role: Role, revision: str) -> str:
    """Name of the Deployment and the headless Service of one role and revision."""
    return f"{service}-{role}-{revision}"


def group(service: str, role: Role, revision: str) -> str:
    """Name of the LeaderWorkerSet of one role and revision. It creates a Service of this name."""
    return f"{worker(service, role, revision)}-g"


def role(service: str, name: str) -> str:
    """Name of objects that a role has once: RoleScaler and PodDisruptionBudget."""
    return f"{service}-{name}"


def router(service: str) -> str:
    return f"{service}-{ROUTER}"


def revision_config_map(service: str, revision: str) -> str:
    """Name of the ConfigMap that stores a revision."""
    return f"{service}-rev-{revision}"


def model_pin(service: str, revision: str) -> str:
    """Name of the ConfigMap with the commit that all pods of a revision fetch."""
    return f"{revision_config_map(service, revision)}-model"


def model_claim(service: str) -> str:
    return f"{service}-model"


def model_job(service: str, key: str) -> str:
    """Name of the Job that fetches model files; `key` identifies the files."""
    return f"{service}-model-{key}"


def workers_account(service: str) -> str:
    return f"{service}-workers"


def tickets(service: str) -> str:
    """Name of the Secret that signs tickets."""
    return f"{service}-tickets"


def of_service(service: str) -> Labels:
    """Return the labels of all objects of the service."""
    return {
        "app.kubernetes.io/name": "baton",
        "app.kubernetes.io/instance": service,
        labels.MANAGED_BY: labels.OPERATOR,
        labels.SERVICE: service,
    }


def of_role(service: str, role: str, revision: str = "") -> Labels:
    """Return the labels of the objects of a role, and of one revision if it is given."""
    of_all = {**of_service(service), "app.kubernetes.io/component": role, labels.ROLE: role}
    return {**of_all, labels.REVISION: revision} if revision else of_all


def selecting(service: str, role: str, revision: str = "") -> Labels:
    """Return the labels that select the pods of a role."""
    of_all = {labels.SERVICE: service, labels.ROLE: role}
    return {**of_all, labels.REVISION: revision} if revision else of_all
