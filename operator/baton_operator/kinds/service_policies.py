"""What a service does by itself over time: scale, roll out, and keep strangers away."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton_operator.kinds.part import Duration, Label, Part, Rule, Seconds, Subdomain, duration_s, rules
from baton_operator.kinds.router_spec import Issuer


class Objectives(Part):
    """What clients are to see."""

    ttft: Duration = "2s"
    """Time to the first token."""

    itl: Duration = "50ms"
    """Time from one token to the next."""

    percentile: Annotated[int, Field(ge=50, le=99)] = 95
    """Share of requests that are to see no more, in percent."""


class Prometheus(Part):
    """Where the metrics are."""

    url: Annotated[str, Field(max_length=1024, pattern=r"^https?://")]
    """URL of a server that needs no token: the operator reads no Secrets, and sends its own token only to its
    default server. Where NetworkPolicies are enforced, the port of the server's pods must be one of the
    chart's `networkPolicy.prometheusPorts`. Default: the operator's server."""


class ProfileSource(Part):
    """A profile that `baton bench --find` has written, in the service's namespace."""

    config_map_name: Subdomain
    """The ConfigMap that has it."""

    key: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")] = "profile.json"
    """Under which name."""


class MetricsLoss(Part):
    """What happens while metrics are missing."""

    hold_seconds: Seconds = 900
    """Seconds for which replicas stay as they are."""

    then: Literal["Hold", "Fallback", "FallbackIfHigher"] = "FallbackIfHigher"
    """After that: they stay, become fallbackReplicas, or become that if it is more."""


@rules(
    Rule(
        "!has(self.profile) || self.mode != 'Disabled'",
        "a profile is for whoever scales: mode is Internal or External",
        ".profile",
    ),
)
class Autoscaling(Part):
    """Who scales the roles that have `scaling`."""

    mode: Literal["Disabled", "Internal", "External"] = "Disabled"
    """Disabled: nobody. Internal: the operator, by the objectives. External: whoever writes the RoleScalers,
    such as a HorizontalPodAutoscaler; the operator publishes what it would do."""

    interval_seconds: Annotated[int, Field(ge=5, le=300)] = 15
    """Seconds from one decision to the next."""

    slo: Objectives = Objectives()
    """What clients are to see."""

    prometheus: Prometheus | None = None
    """Where the metrics are; the operator's default if it is left out."""

    profile: ProfileSource | None = None
    """What a worker does with prompts and answers of any length. Left out, the autoscaler learns it."""

    on_metrics_loss: MetricsLoss = MetricsLoss()
    """What happens while metrics are missing."""

    gpu_budget: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Most accelerators of both roles together."""

    scale_to_zero_after_seconds: Annotated[int, Field(ge=60, le=604_800)] | None = None
    """Seconds without a request after which a role with minReplicas 0 goes to 0."""


class CanaryStep(Part):
    """One step of a careful rollout."""

    weight: Annotated[int, Field(ge=1, le=99)]
    """Percent of requests that go to the new generation."""

    pause_seconds: Seconds = 300
    """Seconds before the next step."""


@rules(
    Rule(
        "self.steps.all(one, self.steps.exists_one(other, other.weight == one.weight)) && "
        "self.steps.map(one, one.weight).isSorted()",
        "the weights of a canary's steps increase",
        ".steps",
    ),
)
class Canary(Part):
    """A rollout in steps."""

    steps: Annotated[list[CanaryStep], Field(min_length=1, max_length=10)]
    """In their order. After the last one all requests go to the new generation."""


@rules(
    Rule(
        "!has(self.maxTtft) || (duration(self.maxTtft) > duration('0s') "
        "&& duration(self.maxTtft) <= duration('5m'))",
        "maxTtft is more than 0s and at most 5m",
        ".maxTtft",
    ),
)
class Rollout(Part):
    """How a change of the workers comes into service."""

    strategy: Literal["PairedGeneration", "Recreate"] = "PairedGeneration"
    """PairedGeneration: new prefill and decode workers are started beside the old ones, and requests never
    mix the two. Recreate: the old ones end first, where there is no room for both."""

    progress_deadline_seconds: Annotated[int, Field(ge=30, le=604_800)] = 3600
    """Seconds without progress after which a rollout has failed."""

    auto_rollback: bool = True
    """Whether a rollout that fails is undone."""

    max_failed_percent: Annotated[int, Field(ge=0, le=100)] = 10
    """Percent of its requests that may fail on a new generation, whoever answers them then. If more do, and
    fewer on the old one, the rollout has failed."""

    max_ttft: Duration | None = None
    """Time to the first token that 95 of 100 streams are to keep to on a new generation, such as 2s. If more
    take longer, and fewer on the old one, the rollout has failed. Left out, nobody is too slow."""

    revision_history_limit: Annotated[int, Field(ge=1, le=50)] = 5
    """Old generations that are remembered, to go back to."""

    paused: bool = False
    """Whether changes wait."""

    rollback_to: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$", max_length=8)] | None = None
    """A generation of status.revisions that is to serve, whatever else the spec says of the workers."""

    canary: Canary | None = None
    """A rollout in steps; all at once, as workers become ready, if it is left out."""

    @property
    def max_ttft_s(self) -> float | None:
        """Seconds."""
        return None if self.max_ttft is None else duration_s(self.max_ttft)


@rules(
    Rule("has(self.secretName) != has(self.issuerRef)", "mutualTls has either secretName or issuerRef"),
)
class MutualTls(Part):
    """The certificate that workers and routers show to each other."""

    secret_name: Subdomain | None = None
    """A Secret with the files `tls.crt`, `tls.key` and `ca.crt`; the certificate is one for both server and
    client, and has the DNS name NAME.NAMESPACE.svc.cluster.local of this service."""

    issuer_ref: Issuer | None = None
    """Who issues it."""


class Security(Part):
    """Who may reach the pods, and what they may do."""

    network_policy: bool = True
    """Whether workers may be reached only by their routers and by one another."""

    mutual_tls: MutualTls | None = None
    """Whether workers speak TLS only, and only with those who show this certificate; what the operator was
    told otherwise, which is no by default. KV blocks and KV events move beside it, without."""

    metrics_namespace: (
        Annotated[str, Field(max_length=63, pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$")] | None
    ) = None
    """The namespace of the Prometheus that may read the metrics of workers and routers; what the operator was
    told if it is left out, which is monitoring by default; nobody if it is empty. Where workers want no
    certificate, metrics are at the port of their API, which is open to that namespace with them."""

    ingress_namespace_labels: Annotated[dict[str, str], Field(max_length=16)] = {}
    """Labels of the namespaces from which routers may be reached; from all if it is empty."""

    service_account_name: Subdomain | None = None
    """Account of the workers' pods; one without rights is made if it is left out."""

    image_pull_secrets: Annotated[list[Label], Field(max_length=8)] = []
    """Secrets by which images are pulled."""
