"""
The settings of the operator, each with its unit, default and reason.

Built once where the process starts and passed down; nothing else reads the environment. Each field is a
flag of `baton operator` (`--worker-image`) and the environment variable `BATON_OPERATOR_<NAME>`.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import AliasChoices, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from baton_api.logs import Format
from baton_api.texts import Names

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts a pod's account."""

ISSUER = r"(Cluster)?Issuer/[a-z0-9]([-a-z0-9.]*[a-z0-9])?"


def _own_namespace() -> str:
    try:
        return (ACCOUNT / "namespace").read_text().strip()
    except OSError:
        return "default"


def _kubeconfig() -> str:
    return os.environ.get("KUBECONFIG", "")


class OperatorSettings(BaseSettings):
    """One operator."""

    model_config = SettingsConfigDict(
        env_prefix="BATON_OPERATOR_",
        frozen=True,
        use_attribute_docstrings=True,
        extra="forbid",
        populate_by_name=True,
    )

    worker_image: str = ""
    """Image of workers for services that name none. A generation keeps the one that it was made with."""

    router_image: str = ""
    """Image of routers for services that name none."""

    mutual_tls_issuer: str = Field(default="", pattern=rf"^({ISSUER})?$")
    """Who issues certificates by which the workers and routers of each service show each other that they
    belong together, such as ClusterIssuer/NAME or Issuer/NAME of cert-manager. A service may name
    another one in spec.security.mutualTls. Empty: only services that do have any."""

    metrics_namespace: str = Field(default="monitoring", pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$")
    """The namespace of the Prometheus that may read the metrics of workers and routers, of services whose
    spec.security.metricsNamespace says nothing. Empty: none may."""

    log_format: Format = Field(
        default="auto", validation_alias=AliasChoices("BATON_OPERATOR_LOG_FORMAT", "BATON_LOG_FORMAT")
    )
    """auto: one JSON object to a line, unless the log goes to a terminal. text or json: that one in any
    case. A line that belongs to an object of the cluster has its kind, namespace and name."""

    prometheus_url: str = ""
    """Where the metrics are of services that are scaled by the operator and name no other server, such as
    http://prometheus.monitoring:9090."""

    prometheus_token_file: str = ""
    """File with a token for that server, read for each question. It is shown to no other."""

    prometheus_ca_file: str = ""
    """File with the certificate of who vouches for that server, if it is not generally known."""

    gpu_budget: int = Field(default=0, ge=0)
    """Most accelerators of all services that the operator scales together; 0: as many as there are."""

    scaling_window_s: int = Field(default=120, ge=5)
    """Seconds over which rates are taken to decide how many workers a role needs: at least four times as
    many as Prometheus takes from one scrape to the next."""

    namespaces: Names = ()
    """Namespaces whose services it runs, with commas between; all if there are none. The account needs its
    rights in each of them, and no others."""

    kubeconfig: str = Field(default_factory=_kubeconfig)
    """File with the cluster and the account to use; the pod's own if it is empty."""

    host: str = "127.0.0.1"
    """Address of /healthz, /readyz and /metrics. Kubernetes and Prometheus reach it only if this says so."""

    port: int = Field(default=8081, ge=0, le=65535)
    """Port of the same; 0 takes a free one."""

    lease_name: str = Field(default="baton-operator", min_length=1)
    """Name of the Lease that makes one of several operators the one that works."""

    lease_namespace: str = Field(default_factory=_own_namespace, min_length=1)
    """Namespace of the Lease: the operator's own."""

    identity: str = ""
    """What it is called in the Lease, such as its pod's name; made up if empty. An operator that comes back
    under the same name need not wait for the Lease."""

    concurrency: int = Field(default=8, ge=1, le=256)
    """Most services that are looked at at once."""

    router_rollouts: int = Field(default=4, ge=1, le=1000)
    """Services whose routers are replaced at the same time after an upgrade of the operator. A change of a
    service's spec does not wait."""

    watch_silence_s: float = Field(default=70.0, gt=0)
    """Seconds without any news by a watch after which it is begun anew. The API server sends a bookmark
    each minute if there is nothing else, but none for a kind of which nothing has ever changed."""

    resync_s: float = Field(default=600.0, gt=0)
    """Seconds after which a service is looked at although nothing has changed."""
