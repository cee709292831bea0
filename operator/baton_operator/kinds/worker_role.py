"""The prefill or the decode workers of a service: how many, how big, where, and how they come and go."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton_operator.kinds.engine import Arguments, Environment, Image
from baton_operator.kinds.part import (
    Annotations,
    Anything,
    Label,
    LabelKey,
    Labels,
    Part,
    Quantity,
    ResourceName,
    Rule,
    Seconds,
    Subdomain,
    rules,
)

HUGEPAGES = r"^[1-9][0-9]*(Ki|Mi|Gi)$"
"""A size of huge pages."""

Replicas = Annotated[int, Field(ge=0, le=1000)]
Step = Annotated[int, Field(ge=1, le=1000)]


class ScaleUp(Part):
    """How fast a role may grow."""

    stabilization_window_seconds: Seconds = 30
    """Seconds for which the need must have been there."""

    max_step: Step = 4
    """Most replicas that are added in one period."""

    period_seconds: Annotated[int, Field(ge=1, le=86_400)] = 60
    """Seconds of a period."""


class ScaleDown(Part):
    """How fast a role may shrink."""

    stabilization_window_seconds: Seconds = 300
    """Seconds for which the replicas must not have been needed."""

    max_step: Step = 1
    """Most replicas that are taken away in one period."""

    period_seconds: Annotated[int, Field(ge=1, le=86_400)] = 60
    """Seconds of a period."""


@rules(
    Rule("self.minReplicas <= self.maxReplicas", "minReplicas is at most maxReplicas", ".minReplicas"),
    Rule(
        "!has(self.fallbackReplicas) || "
        "(self.fallbackReplicas >= self.minReplicas && self.fallbackReplicas <= self.maxReplicas)",
        "fallbackReplicas lies between minReplicas and maxReplicas",
        ".fallbackReplicas",
    ),
)
class Scaling(Part):
    """Bounds for whoever scales the role."""

    min_replicas: Replicas = 1
    """Never fewer."""

    max_replicas: Annotated[int, Field(ge=1, le=1000)]
    """Never more."""

    fallback_replicas: Replicas | None = None
    """How many there are to be while nobody can tell how many are needed."""

    scale_up: ScaleUp = ScaleUp()
    """How fast it may grow."""

    scale_down: ScaleDown = ScaleDown()
    """How fast it may shrink."""


GPUS_OF_ONE_WORKER = 1
"""Accelerators that the engine uses: it has no tensor parallelism."""


@rules(
    Rule(
        f"self.count <= {GPUS_OF_ONE_WORKER}",
        f"a worker uses {GPUS_OF_ONE_WORKER} accelerator and would leave the others idle: "
        f"set count to {GPUS_OF_ONE_WORKER} and raise replicas",
        ".count",
    ),
)
class Gpu(Part):
    """Accelerators of one worker."""

    resource_name: ResourceName = "nvidia.com/gpu"
    """What the device plugin calls them."""

    count: Annotated[int, Field(ge=0, le=64)] = 1
    """Number of accelerators: 1, or 0 for a worker that runs on the CPU. Default: 1."""


class Rdma(Part):
    """RDMA devices of one worker."""

    resource_name: ResourceName
    """What the device plugin calls them, such as rdma/hca."""

    count: Annotated[int, Field(ge=1, le=64)] = 1
    """How many."""


class Claim(Part):
    """Devices by Dynamic Resource Allocation."""

    name: Label
    """Name of the claim in the pod."""

    resource_claim_template_name: Subdomain
    """ResourceClaimTemplate that it is made from."""


@rules(
    Rule(
        "!has(self.hugepages) || size(self.hugepages) == 0 || has(self.cpu) || has(self.memory)",
        "Kubernetes admits hugepages only beside a request of cpu or memory",
        ".hugepages",
    ),
    Rule(
        f"!has(self.hugepages) || self.hugepages.all(one, one.matches('{HUGEPAGES}'))",
        "the sizes of hugepages are those of the node, such as 2Mi or 1Gi",
        ".hugepages",
    ),
    Rule(
        "!has(self.extended) || !((has(self.gpu) && self.gpu.resourceName in self.extended) || "
        "(has(self.rdma) && self.rdma.resourceName in self.extended))",
        "extended names only resources that gpu and rdma do not name",
        ".extended",
    ),
)
class Resources(Part):
    """What one worker needs."""

    gpu: Gpu | None = None
    """Accelerators; none if it is left out."""

    rdma: Rdma | None = None
    """RDMA devices. Both roles have some, or neither."""

    extended: Annotated[dict[ResourceName, Annotated[int, Field(ge=1, le=1024)]], Field(max_length=16)] = {}
    """Further extended resources and their number, such as {networking.gke.io.networks/rdma-1: 1} where each
    rail of a fabric is a resource of its own."""

    hugepages: Annotated[dict[Annotated[str, Field(pattern=HUGEPAGES)], Quantity], Field(max_length=4)] = {}
    """Huge pages by their size, such as {2Mi: 5Gi}. They do not count as memory."""

    cpu: Quantity | None = None
    """Processors, requested."""

    memory: Quantity | None = None
    """Memory, requested and the limit."""

    shared_memory: Quantity = "1Gi"
    """Size of /dev/shm, by which workers on one node move KV blocks. It counts as memory of the pod."""

    claims: Annotated[list[Claim], Field(max_length=8)] = []
    """Devices by Dynamic Resource Allocation."""


class TopologySpread(Part):
    """How evenly pods are spread over the values of a node label."""

    topology_key: LabelKey
    """The node label."""

    max_skew: Annotated[int, Field(ge=1, le=100)] = 1
    """Most pods that one value may have more than another."""

    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = "ScheduleAnyway"
    """Whether pods wait or are placed unevenly."""


class Placement(Part):
    """On which nodes pods are placed."""

    node_selector: Labels = {}
    """Labels that a node must have."""

    tolerations: Annotated[list[Anything], Field(max_length=32)] = []
    """Taints that do not matter, as in a pod."""

    affinity: Anything | None = None
    """As in a pod."""

    topology_spread: Annotated[list[TopologySpread], Field(max_length=8)] = []
    """How pods of one generation are spread."""

    priority_class_name: Subdomain | None = None
    """Whom they may displace."""

    runtime_class_name: Subdomain | None = None
    """By what their containers are run."""

    scheduler_name: Subdomain | None = None
    """Who places them, if it is not the default scheduler."""


class Drain(Part):
    """How a worker ends."""

    pre_stop_seconds: Annotated[int, Field(ge=0, le=3600)] = 5
    """Seconds from the word that a pod ends to its SIGTERM: as long as routers take to hear of it."""

    timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 120
    """Seconds for the requests that run, and for blocks that nobody has pulled yet."""


class Surge(Part):
    """How far a role's replicas may go over or under what is wanted while generations change."""

    max_surge: Annotated[int, Field(ge=0, le=1000)] = 1
    """Replicas above."""

    max_unavailable: Annotated[int, Field(ge=0, le=1000)] = 0
    """Replicas below."""


class Disruption(Part):
    """What a drained node may take away at once."""

    enabled: bool = True
    """Whether there is a PodDisruptionBudget."""

    max_unavailable: Annotated[int, Field(ge=1, le=1000)] = 1
    """Pods that may be missing."""


@rules(
    Rule(
        "!(has(self.replicas) && has(self.scaling))",
        "replicas and scaling exclude one another: a role is either of a fixed size or scaled",
        ".replicas",
    ),
    Rule(
        "self.rollout.maxSurge + self.rollout.maxUnavailable > 0",
        "maxSurge and maxUnavailable are not both 0: nothing could ever be replaced",
        ".rollout",
    ),
)
class WorkerRole(Part):
    """The workers of one role."""

    replicas: Replicas | None = None
    """How many workers; 1 if neither this nor scaling is given."""

    scaling: Scaling | None = None
    """Bounds within which they are scaled, by who spec.autoscaling.mode names."""

    resources: Resources = Resources()
    """What one worker needs."""

    image: Image | None = None
    """Image of this role, if it is not the engine's."""

    args: Arguments = []
    """Further flags of this role."""

    env: Environment = []
    """Further environment of this role."""

    pod_labels: Labels = {}
    """Further labels of the pods."""

    pod_annotations: Annotations = {}
    """Further annotations of the pods."""

    pod_template: Anything | None = None
    """A PodTemplateSpec that is merged over what the operator makes; the worker's container is called main.
    What it asks for is judged by the namespace's rules when the pods are made."""

    placement: Placement = Placement()
    """On which nodes the pods are placed."""

    startup_timeout_seconds: Annotated[int, Field(ge=10, le=86_400)] = 1800
    """Seconds in which a worker must have begun to serve."""

    drain: Drain = Drain()
    """How a worker ends."""

    rollout: Surge = Surge()
    """How far replicas may vary while generations change."""

    disruption: Disruption = Disruption()
    """What a drained node may take away at once."""
