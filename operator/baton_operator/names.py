"""What the objects of one InferenceService are called, and how they are labelled."""

from __future__ import annotations

from baton_api import labels
from baton_api.workers import Role

Labels = dict[str, str]

MAIN = "main"
"""The container that does the work, in every pod."""

HTTP_PORT = 8000
"""Of the workers' OpenAI API."""

HEALTH_PORT = 8001
"""Of workers that speak TLS: for kubelets and Prometheus, which show no certificate."""

KV_EVENTS_PORT = 5558
KV_REPLAY_PORT = 5559

ROUTER_PORT = 8080
ROUTER = "router"
"""The role of routers, in labels."""

OPERATOR = "operator"
"""The role of the operator's pods, in labels that the chart sets under every name of a release."""


def worker(service: str, role: Role, revision: str) -> str:
    """The workers of one role and revision: their Deployment, and their headless Service."""
    return f"{service}-{role}-{revision}"


def role(service: str, name: str) -> str:
    """What a role has once for all revisions: scaler, disruption budget."""
    return f"{service}-{name}"


def router(service: str) -> str:
    return f"{service}-{ROUTER}"


def revision_config_map(service: str, revision: str) -> str:
    """The ConfigMap that remembers a revision."""
    return f"{service}-rev-{revision}"


def model_pin(service: str, revision: str) -> str:
    """The ConfigMap that names the commit which all pods of a revision fetch."""
    return f"{revision_config_map(service, revision)}-model"


def model_claim(service: str) -> str:
    return f"{service}-model"


def model_job(service: str, key: str) -> str:
    """The Job that fetches a model's files; `key` names which files."""
    return f"{service}-model-{key}"


def workers_account(service: str) -> str:
    return f"{service}-workers"


def tickets(service: str) -> str:
    """The Secret by which routers sign tickets."""
    return f"{service}-tickets"


def of_service(service: str) -> Labels:
    """On everything that belongs to the service."""
    return {
        "app.kubernetes.io/name": "baton",
        "app.kubernetes.io/instance": service,
        labels.MANAGED_BY: labels.OPERATOR,
        labels.SERVICE: service,
    }


def of_role(service: str, role: str, revision: str = "") -> Labels:
    """On everything of one role, and of one revision if it is given."""
    made = {**of_service(service), "app.kubernetes.io/component": role, labels.ROLE: role}
    return {**made, labels.REVISION: revision} if revision else made


def selecting(service: str, role: str, revision: str = "") -> Labels:
    """What tells the pods of a role from all others."""
    made = {labels.SERVICE: service, labels.ROLE: role}
    return {**made, labels.REVISION: revision} if revision else made
