"""Policies of a service: latency objectives, autoscaling, rollouts and security."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton_operator.kinds.model import SecretReference
from baton_operator.kinds.part import Duration, Part, Rule, Subdomain, between, rules
from baton_operator.kinds.router_spec import Tls


class Objectives(Part):
    """Latency objectives, for which the autoscaler sizes roles. Dashboards and alerts show them."""

    time_to_first_token: Annotated[Duration, between("1ms", "1h")] = Duration("2s")
    """Time from the arrival of a request to its first token."""

    inter_token_latency: Annotated[Duration, between("1ms", "1m")] = Duration("50ms")
    """Time between two tokens of an answer."""

    percentile: Annotated[int, Field(ge=50, le=99)] = 95
    """Percentage of requests that must meet both objectives."""


class Prometheus(Part):
    """Prometheus server with the metrics of routers and workers."""

    url: Annotated[str, Field(max_length=1024, pattern=r"^https?://")]
    """URL of a server that needs no token: the operator reads no Secrets, and sends its own token only to its
    default server. Where NetworkPolicies are enforced, the port of the server's pods must be one of the
    chart's `networkPolicy.prometheusPorts`. Default: the operator's server."""


class ProfileSource(Part):
    """ConfigMap with a profile of `baton bench --find`."""

    config_map_name: Subdomain
    """Name of the ConfigMap in the namespace of the service."""

    key: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")] = "profile.json"
    """Key of the ConfigMap that holds the profile."""


class MetricsLoss(Part):
    """Behavior while metrics are missing."""

    hold_duration: Annotated[Duration, between("0s", "168h")] = Duration("15m")
    """Time without metrics for which replicas stay unchanged before `policy` applies."""

    policy: Literal["Hold", "Fallback", "FallbackIfHigher"] = "FallbackIfHigher"
    """Replicas after holdDuration. Hold: unchanged. Fallback: fallbackReplicas. FallbackIfHigher:
    fallbackReplicas if that is more than now. Roles without fallbackReplicas stay unchanged."""


@rules(
    Rule(
        "!has(self.profile) || self.mode != 'Disabled'",
        "profile needs mode Internal or External",
        ".profile",
    ),
)
class Autoscaling(Part):
    """Autoscaling of the roles that have `scaling`."""

    mode: Literal["Disabled", "Internal", "External"] = "Disabled"
    """Component that sets the number of workers. Disabled: none. Internal: the operator, by spec.objectives.
    External: any client that writes the RoleScalers, such as a HorizontalPodAutoscaler or KEDA; the operator
    only publishes its recommendation."""

    interval: Annotated[Duration, between("5s", "5m")] = Duration("15s")
    """Time between two decisions."""

    prometheus: Prometheus | None = None
    """Source of metrics. Default: the operator's Prometheus server."""

    profile: ProfileSource | None = None
    """Measured performance of one worker for prompts and answers of any length. Default: the autoscaler
    learns it from metrics."""

    on_metrics_loss: MetricsLoss = MetricsLoss()
    """Behavior while metrics are missing."""

    gpu_budget: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Maximum accelerators of both roles together. Default: unlimited."""

    scale_to_zero_after: Annotated[Duration, between("1m", "168h")] | None = None
    """Time without a request after which roles with minReplicas 0 scale to 0. Needs such a role. Default:
    5m."""


class CanaryStep(Part):
    """Step of a canary rollout."""

    weight: Annotated[int, Field(ge=1, le=99)]
    """Percentage of requests that the new revision receives."""

    pause: Annotated[Duration, between("0s", "168h")] = Duration("5m")
    """Time before the next step, counted from when all workers of this step are ready."""


@rules(
    Rule(
        "self.steps.all(one, self.steps.exists_one(other, other.weight == one.weight)) && "
        "self.steps.map(one, one.weight).isSorted()",
        "weights of canary steps must increase",
        ".steps",
    ),
)
class Canary(Part):
    """Rollout in steps."""

    steps: Annotated[list[CanaryStep], Field(min_length=1, max_length=10)]
    """Steps with increasing weights. After the last one, all requests go to the new revision."""


class Rollout(Part):
    """Rollout of a new revision of workers."""

    strategy: Literal["PairedRevision", "Recreate"] = "PairedRevision"
    """PairedRevision: new prefill and decode workers start beside the old ones, and a request never uses
    workers of two revisions. Recreate: all old workers stop first, where the cluster has no capacity for
    both."""

    progress_deadline: Annotated[Duration, between("30s", "168h")] = Duration("1h")
    """Maximum time without a further ready worker. After it the rollout has failed."""

    auto_rollback: bool = True
    """Returns to the previous revision when a rollout fails."""

    max_failed_percent: Annotated[int, Field(ge=0, le=100)] = 10
    """Maximum percentage of failed requests on the new revision, including requests that were retried
    successfully. The rollout fails above it if the old revision fails less and at least 5 requests failed.
    100 disables the check."""

    max_time_to_first_token: Annotated[Duration, between("1ms", "5m")] | None = None
    """Time to first token that 95 percent of the streams on the new revision must meet. The rollout fails
    otherwise if the old revision is faster and at least 5 streams were slower. Default: no limit."""

    revision_history_limit: Annotated[int, Field(ge=1, le=50)] = 5
    """Number of old revisions to keep for a rollback."""

    paused: bool = False
    """Pauses rollouts: changes of the spec take effect when it is false again."""

    rollback_to: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$", max_length=8)] | None = None
    """Name of a revision in status.revisions that serves instead of the one that the spec describes. Remove
    the field to return to the spec."""

    canary: Canary | None = None
    """Rollout in steps. Default: requests move to the new revision as its workers become ready."""


class MutualTls(Tls):
    """Certificate with which workers and routers authenticate to each other."""

    secret_name: Subdomain | None = None
    """Name of an existing Secret with `tls.crt`, `tls.key` and `ca.crt`. The certificate must be valid for
    servers and clients, with the DNS name NAME.NAMESPACE.svc.cluster.local of this service. Excludes
    issuerRef."""


class Security(Part):
    """Network access to the pods, and their identity."""

    network_policy: bool = True
    """Creates NetworkPolicies: workers accept connections only from the service's routers and workers, and
    from metricsNamespace."""

    mutual_tls: MutualTls | None = None
    """Mutual TLS between routers and workers. KV blocks and KV events are not encrypted. Default: the
    operator's setting, initially off."""

    metrics_namespace: (
        Annotated[str, Field(max_length=63, pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$")] | None
    ) = None
    """Namespace whose pods may read metrics of workers and routers. Without mutualTls, workers' metrics share
    the port of their API, so that namespace can reach it too. Empty: no namespace. Default: the
    operator's setting, initially monitoring."""

    ingress_namespace_labels: Annotated[dict[str, str], Field(max_length=16)] = {}
    """Labels of the namespaces from which routers accept connections. Empty: all namespaces."""

    service_account_name: Subdomain | None = None
    """ServiceAccount of the workers. Default: the operator creates one without permissions."""

    image_pull_secrets: Annotated[list[SecretReference], Field(max_length=8)] = []
    """Secrets with registry credentials, for all pods."""

    @property
    def pull_secret_names(self) -> list[str]:
        return [secret.name for secret in self.image_pull_secrets]
