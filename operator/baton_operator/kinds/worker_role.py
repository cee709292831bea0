"""The workers of one role: number, resources, placement, and behavior in rollouts and disruptions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton_operator.kinds.engine import Arguments, Environment, Image
from baton_operator.kinds.part import (
    Annotations,
    Anything,
    Duration,
    Label,
    LabelKey,
    Labels,
    Part,
    Quantity,
    Rule,
    Subdomain,
    between,
    rules,
)
from baton_operator.kinds.resources import ResourceRequirements

Replicas = Annotated[int, Field(ge=0, le=1000)]
Step = Annotated[int, Field(ge=1, le=1000)]
Window = Annotated[Duration, between("0s", "168h")]
Period = Annotated[Duration, between("1s", "24h")]


class ScaleUp(Part):
    """Limits of growth."""

    stabilization_window: Window = Duration("30s")
    """Time for which more workers must have been needed before they are added. The smallest need within it
    counts."""

    max_step: Step = 4
    """Maximum workers added per period."""

    period: Period = Duration("1m")
    """Period of maxStep."""


class ScaleDown(Part):
    """Limits of shrinking."""

    stabilization_window: Window = Duration("5m")
    """Time for which fewer workers must have been needed before some are removed. The largest need within it
    counts."""

    max_step: Step = 1
    """Maximum workers removed per period."""

    period: Period = Duration("1m")
    """Period of maxStep."""


@rules(
    Rule("self.minReplicas <= self.maxReplicas", "minReplicas must not exceed maxReplicas", ".minReplicas"),
    Rule(
        "!has(self.fallbackReplicas) || "
        "(self.fallbackReplicas >= self.minReplicas && self.fallbackReplicas <= self.maxReplicas)",
        "fallbackReplicas must be between minReplicas and maxReplicas",
        ".fallbackReplicas",
    ),
)
class Scaling(Part):
    """Bounds for the autoscaler of the role."""

    min_replicas: Replicas = 1
    """Minimum number of workers. 0 allows scaling to zero, which needs spec.router.scaleFromZeroTimeout."""

    max_replicas: Annotated[int, Field(ge=1, le=1000)]
    """Maximum number of workers."""

    fallback_replicas: Replicas | None = None
    """Number of workers while metrics are missing, as spec.autoscaling.onMetricsLoss.policy says. Default:
    the current number."""

    scale_up: ScaleUp = ScaleUp()
    """Limits of growth."""

    scale_down: ScaleDown = ScaleDown()
    """Limits of shrinking."""


class PodResourceClaim(Part):
    """Claim of devices through Dynamic Resource Allocation."""

    name: Label
    """Name of the claim within the pod."""

    resource_claim_template_name: Subdomain
    """Name of the ResourceClaimTemplate from which Kubernetes creates a claim for each pod."""


class TopologySpreadConstraint(Part):
    """Spread of pods over the values of a node label."""

    topology_key: LabelKey
    """Node label, such as kubernetes.io/hostname."""

    max_skew: Annotated[int, Field(ge=1, le=100)] = 1
    """Maximum difference in the number of pods between two values of the label."""

    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = "ScheduleAnyway"
    """DoNotSchedule: pods stay pending rather than exceed maxSkew. ScheduleAnyway: maxSkew is preferred."""


class Placement(Part):
    """Scheduling of pods."""

    node_selector: Labels = {}
    """Labels that nodes must have."""

    tolerations: Annotated[list[Anything], Field(max_length=32)] = []
    """Tolerations of node taints, as in a pod."""

    affinity: Anything | None = None
    """Affinity rules, as in a pod."""

    topology_spread_constraints: Annotated[list[TopologySpreadConstraint], Field(max_length=8)] = []
    """Spread of the pods of one revision over nodes."""

    priority_class_name: Subdomain | None = None
    """PriorityClass of the pods."""

    runtime_class_name: Subdomain | None = None
    """RuntimeClass of the pods."""

    scheduler_name: Subdomain | None = None
    """Scheduler of the pods. Default: the default scheduler."""


class Drain(Part):
    """Shutdown of a worker."""

    pre_stop_delay: Annotated[Duration, between("0s", "1h")] = Duration("5s")
    """Time from the deletion of a pod to its SIGTERM, until routers stop sending it requests."""

    timeout: Annotated[Duration, between("1s", "24h")] = Duration("2m")
    """Maximum time for running requests, and for blocks that decode workers have not transferred yet. Then
    the worker stops, and routers retry its requests on other workers."""

    @property
    def total_s(self) -> int:
        """Seconds from the deletion of a pod until all of its requests must have finished."""
        return self.pre_stop_delay.whole_seconds + self.timeout.whole_seconds


class UpdateStrategy(Part):
    """Number of workers while a rollout replaces them."""

    max_surge: Annotated[int, Field(ge=0, le=1000)] = 1
    """Maximum workers above the desired number."""

    max_unavailable: Annotated[int, Field(ge=0, le=1000)] = 0
    """Maximum workers below the desired number. Use it where the cluster has no capacity for a surge."""


class DisruptionBudget(Part):
    """PodDisruptionBudget of the role, which limits evictions when nodes are drained."""

    enabled: bool = True
    """Creates the PodDisruptionBudget."""

    max_unavailable: Annotated[int, Field(ge=1, le=1000)] = 1
    """Maximum workers that may be evicted at once."""


class Parallelism(Part):
    """Distribution of one worker over accelerators and nodes. For engine types vLLM and SGLang; pipeline also
    for TensorRT-LLM, tensor also for TensorRT-LLM and Baton.
    """

    tensor: Annotated[int, Field(ge=1, le=512)] = 1
    """Accelerators among which each layer is divided. A Baton worker without accelerators divides it among
    processes."""

    pipeline: Annotated[int, Field(ge=1, le=64)] = 1
    """Stages into which the layers are divided, each on `tensor` accelerators."""

    nodes: Annotated[int, Field(ge=1, le=64)] = 1
    """Pods that together are one worker, each with its own accelerators. Above 1, a role is a
    LeaderWorkerSet, whose operator (https://lws.sigs.k8s.io) the cluster needs."""

    @property
    def accelerators(self) -> int:
        """Accelerators of one copy of the model, over all nodes."""
        return self.tensor * self.pipeline


@rules(
    Rule(
        "!(has(self.replicas) && has(self.scaling))",
        "replicas and scaling exclude each other: set a fixed number or bounds for the autoscaler",
        ".replicas",
    ),
    Rule(
        "self.updateStrategy.maxSurge + self.updateStrategy.maxUnavailable > 0",
        "maxSurge and maxUnavailable must not both be 0: no worker could be replaced",
        ".updateStrategy",
    ),
)
class WorkerRole(Part):
    """Workers of one role."""

    replicas: Replicas | None = None
    """Fixed number of workers. Excludes scaling. Default: 1 without scaling."""

    scaling: Scaling | None = None
    """Bounds for the autoscaler that spec.autoscaling.mode selects. Excludes replicas."""

    resources: ResourceRequirements = ResourceRequirements()
    """Compute resources and devices of each pod: of one worker, or of each node of a worker. Accelerators are
    resources such as nvidia.com/gpu, nvidia.com/mig-1g.10gb, amd.com/gpu or google.com/tpu. Without one, a
    worker runs on the CPU. With engine.type Baton, their number is parallelism.tensor; with others, a
    multiple of parallelism.tensor x parallelism.pipeline / parallelism.nodes. RDMA devices: for both roles or
    none."""

    shared_memory_size: Quantity = "1Gi"
    """Size of /dev/shm, through which workers on one node exchange KV blocks. Used pages count as
    memory of the pod."""

    parallelism: Parallelism = Parallelism()
    """Distribution of one worker over accelerators and nodes. Default: one accelerator."""

    resource_claims: Annotated[list[PodResourceClaim], Field(max_length=8)] = []
    """Devices of each pod through Dynamic Resource Allocation. Workers use all, unless resources.claims names
    some."""

    image: Image | None = None
    """Container image of this role. Default: spec.engine.image."""

    args: Arguments = []
    """Additional flags of this role, after spec.engine.args."""

    env: Environment = []
    """Additional environment variables of this role. They override spec.engine.env."""

    pod_labels: Labels = {}
    """Additional labels of the pods."""

    pod_annotations: Annotations = {}
    """Additional annotations of the pods."""

    pod_template: Anything | None = None
    """PodTemplateSpec that is merged over the one that the operator generates. The container is named main.
    The API server checks it when pods are created, and the Pod Security Standard of the namespace applies."""

    placement: Placement = Placement()
    """Scheduling of the pods."""

    startup_timeout: Annotated[Duration, between("10s", "24h")] = Duration("30m")
    """Maximum time from the start of a worker until it is ready. After it, Kubernetes restarts the worker.
    With the default, workers of other engines than Baton get 10m and 8s per billion parameters if that is
    longer. The operator reads the number of parameters from model.uri or model.name, such as 70B, and
    assumes 40 billion per accelerator otherwise."""

    drain: Drain = Drain()
    """Shutdown of a worker."""

    update_strategy: UpdateStrategy = UpdateStrategy()
    """Number of workers while a rollout replaces them."""

    pod_disruption_budget: DisruptionBudget = DisruptionBudget()
    """PodDisruptionBudget of the role."""
