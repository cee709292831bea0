"""
Settings of the operator. Each field is a flag of `baton operator` and a variable `BATON_OPERATOR_<NAME>`.

The docstring of a field is its help text. Other modules do not read the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import AliasChoices, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from baton_api.logs import Format
from baton_api.setting_types import Names

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts the ServiceAccount of a pod."""

ISSUER = r"(Cluster)?Issuer/[a-z0-9]([-a-z0-9.]*[a-z0-9])?"


def _own_namespace() -> str:
    try:
        return (ACCOUNT / "namespace").read_text().strip()
    except OSError:
        return "default"


class OperatorSettings(BaseSettings):
    """Settings of one operator."""

    model_config = SettingsConfigDict(
        env_prefix="BATON_OPERATOR_",
        frozen=True,
        use_attribute_docstrings=True,
        extra="forbid",
        populate_by_name=True,
    )

    GROUPS: ClassVar[Mapping[str, str]] = {
        "worker_image": "Services",
        "prometheus_url": "Autoscaling",
        "namespaces": "Kubernetes",
        "host": "Server",
    }
    """The first setting of each group in the help, and the title of the group."""

    # --- Services ---

    worker_image: str = ""
    """Default image of workers. A revision keeps the image that it was created with."""

    router_image: str = ""
    """Default image of routers."""

    vllm_image: str = ""
    """Default image of workers with `spec.engine.type` vLLM. Empty: such services name their image."""

    sglang_image: str = ""
    """Default image of workers with `spec.engine.type` SGLang. Empty: such services name their image."""

    worker_api_key_file: str = ""
    """File with the key that workers require to load adapters (their API key, or a Baton worker's
    `--admin-api-key`), read for each request. The operator sends it to the workers of every service with
    LoraAdapters, so set it only if their users may know it. Empty: no key."""

    mutual_tls_issuer: str = Field(default="", pattern=rf"^({ISSUER})?$")
    """Default issuer of mutual TLS certificates for the workers and routers of a service: cert-manager's
    ClusterIssuer/NAME or Issuer/NAME. `spec.security.mutualTls` overrides it. Empty: mutual TLS only
    for services that name an issuer."""

    metrics_namespace: str = Field(default="monitoring", pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$")
    """Default namespace of the Prometheus that may scrape workers and routers.
    `spec.security.metricsNamespace` overrides it. Empty: none."""

    router_rollouts: int = Field(default=4, ge=1, le=1000)
    """Number of services whose routers are replaced at once after an upgrade of the operator. Changes of a
    spec do not wait."""

    # --- Autoscaling ---

    prometheus_url: str = ""
    """Default URL of the Prometheus that the autoscaler queries, such as
    http://prometheus.monitoring:9090."""

    prometheus_token_file: str = ""
    """File with the bearer token of that Prometheus, read for each query. It is sent to no other server."""

    prometheus_ca_file: str = ""
    """File with the CA certificate of that Prometheus. Empty: the public authorities."""

    gpu_budget: int = Field(default=0, ge=0)
    """Maximum number of GPUs of all services that the operator scales, in total. 0: unlimited."""

    scaling_window_s: int = Field(default=120, ge=5)
    """Window of rates for autoscaling decisions: at least four scrape intervals of Prometheus."""

    # --- Kubernetes ---

    namespaces: Names = ()
    """Namespaces to watch, separated by commas. The ServiceAccount then needs permissions in these only.
    Empty: all."""

    kubeconfig: str = Field(default_factory=lambda: os.environ.get("KUBECONFIG", ""))
    """kubeconfig file of the cluster. Empty: the pod's ServiceAccount."""

    lease_name: str = Field(default="baton-operator", min_length=1)
    """Name of the Lease for leader election."""

    lease_namespace: str = Field(default_factory=_own_namespace, min_length=1)
    """Namespace of the Lease and of the operator's pods, which NetworkPolicies of services admit. Default:
    the operator's own."""

    identity: str = ""
    """Identity of this operator in the Lease, such as the name of its pod. An operator that restarts with
    the same identity need not wait for the Lease to expire. Empty: random."""

    concurrency: int = Field(default=8, ge=1, le=256)
    """Maximum number of services that are reconciled at once."""

    watch_silence_s: float = Field(default=70.0, gt=0)
    """Maximum time without an event or bookmark before a watch is restarted. The API server sends a
    bookmark every minute, except for kinds whose objects never changed."""

    resync_s: float = Field(default=600.0, gt=0)
    """Interval after which a service is reconciled although nothing has changed."""

    # --- Server ---

    host: str = "127.0.0.1"
    """Address on which /healthz, /readyz and /metrics listen. Use 0.0.0.0 for probes and Prometheus."""

    port: int = Field(default=8081, ge=0, le=65535)
    """Port of the same. 0: a free port."""

    log_format: Format = Field(
        default="auto", validation_alias=AliasChoices("BATON_OPERATOR_LOG_FORMAT", "BATON_LOG_FORMAT")
    )
    """Format of log lines. auto: text on a terminal, otherwise one JSON object per line. Lines about an
    object contain its kind, namespace and name."""
