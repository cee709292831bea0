"""`InferenceService`: a model, served by prefill workers, decode workers and routers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from baton_operator.kinds.engine import Engine, Transfer
from baton_operator.kinds.model import Model
from baton_operator.kinds.part import Conditions, Count, Part, Rule, Time, rules
from baton_operator.kinds.resources import ACCELERATOR, RDMA
from baton_operator.kinds.router_spec import Exposure, Router
from baton_operator.kinds.service_policies import Autoscaling, Objectives, Rollout, Security
from baton_operator.kinds.worker_role import WorkerRole

_SCALED = "(has(self.decode.scaling) || (has(self.prefill) && has(self.prefill.scaling)))"
_RDMA = f"(has(self.{{0}}.resources.limits) && self.{{0}}.resources.limits.exists(n, n.matches('{RDMA}')))"
_ZERO = "(has(self.{0}) && has(self.{0}.scaling) && self.{0}.scaling.minReplicas == 0)"
_ONE_NODE = (
    "self.{0}.parallelism.nodes == 1 && "
    "(self.engine.type == 'TensorRT-LLM' || self.{0}.parallelism.pipeline == 1)"
)
_UNDIVIDED = "(self.engine.type in ['Baton', 'TensorRT-LLM'] || self.{0}.parallelism.tensor == 1)"


def _of_engine(role: str) -> tuple[Rule, ...]:
    """Return what engine.type allows in a role."""
    return (
        Rule(
            f"self.engine.type != 'Baton' || !has(self.{role}) || !has(self.{role}.resources.limits) || "
            f"self.{role}.resources.limits.all(name, !name.matches(r'{ACCELERATOR}') || "
            f"string(self.{role}.resources.limits[name]) in ['0', string(self.{role}.parallelism.tensor)])",
            "a worker uses parallelism.tensor accelerators: request that number, or raise replicas",
            f".{role}.resources.limits",
        ),
        Rule(
            f"self.engine.type in ['vLLM', 'SGLang'] || !has(self.{role}) || "
            f"({_ONE_NODE.format(role)} && {_UNDIVIDED.format(role)})",
            "nodes is for engine.type vLLM and SGLang, pipeline also for TensorRT-LLM, and tensor also for "
            "Baton: a Custom engine has its own flags in engine.args",
            f".{role}.parallelism",
        ),
    )


@rules(
    *_of_engine("prefill"),
    *_of_engine("decode"),
    Rule(
        "self.engine.type != 'Custom' || !has(self.prefill)",
        "engine.type Custom has no prefill workers: the operator does not know how it transfers KV blocks",
        ".prefill",
    ),
    Rule(
        "self.engine.type == 'Baton' || !self.model.uri.startsWith('builtin://')",
        "a builtin:// model is inside the worker image of engine.type Baton: use another location",
        ".model.uri",
    ),
    Rule(
        "!(self.engine.type in ['SGLang', 'TensorRT-LLM']) || !has(self.model.aliases) || "
        "size(self.model.aliases) == 0",
        "a worker of SGLang or TensorRT-LLM serves one name: remove model.aliases",
        ".model.aliases",
    ),
    Rule(
        "self.engine.type == 'Baton' || !has(self.security.mutualTls)",
        "security.mutualTls is for engine.type Baton: other engines do not check certificates of routers",
        ".security.mutualTls",
    ),
    Rule(
        f"!{_SCALED} || self.autoscaling.mode != 'Disabled'",
        "a role with scaling needs autoscaling.mode Internal or External",
        ".autoscaling.mode",
    ),
    Rule(
        f"!has(self.prefill) || {_RDMA.format('prefill')} == {_RDMA.format('decode')}",
        "request RDMA devices for both prefill and decode, or for neither: blocks move between them",
    ),
    Rule(
        f"!({_ZERO.format('prefill')} || {_ZERO.format('decode')}) || "
        "duration(self.router.scaleFromZeroTimeout) > duration('0s')",
        "a role with minReplicas 0 needs router.scaleFromZeroTimeout above 0s, or its first requests fail",
        ".router.scaleFromZeroTimeout",
    ),
    Rule(
        f"!has(self.autoscaling.scaleToZeroAfter) || {_ZERO.format('prefill')} || {_ZERO.format('decode')}",
        "scaleToZeroAfter needs a role with minReplicas 0",
        ".autoscaling.scaleToZeroAfter",
    ),
    Rule(
        "has(self.prefill) == has(oldSelf.prefill) || self.rollout.strategy != 'Recreate'",
        "adding or removing prefill needs rollout.strategy PairedRevision",
        ".prefill",
    ),
)
class InferenceServiceSpec(Part):
    """Desired state of the service."""

    model: Model
    """Model that the service serves."""

    engine: Engine = Engine()
    """The inference engine in all workers."""

    transfer: Transfer = Transfer()
    """Transfer of KV blocks from prefill to decode workers."""

    prefill: WorkerRole | None = None
    """Prefill workers. Without them, decode workers compute prompts themselves."""

    decode: WorkerRole
    """Decode workers."""

    router: Router = Router()
    """Routers."""

    exposure: Exposure = Exposure()
    """Access from outside of the cluster."""

    objectives: Objectives = Objectives()
    """Latency objectives."""

    autoscaling: Autoscaling = Autoscaling()
    """Autoscaling of the roles that have `scaling`."""

    rollout: Rollout = Rollout()
    """Rollout of a new revision of workers."""

    security: Security = Security()
    """Network access to the pods, and their identity."""

    suspend: bool = False
    """Stops all workers and routers. All other objects remain."""

    @classmethod
    def of(cls, service: Mapping[str, Any] | None) -> InferenceServiceSpec | None:
        """Return the spec of an InferenceService; None without a service, and for a spec of another form."""
        try:
            return None if service is None else cls.model_validate(service["spec"])
        except ValidationError:
            return None

    @classmethod
    def problem(cls, service: Mapping[str, Any] | None) -> str:
        """Return what is wrong with the spec of an InferenceService; empty without a service or a problem."""
        try:
            if service is not None:
                cls.model_validate(service["spec"])
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, ("spec", *first["loc"])))
            name = service["metadata"]["name"] if service else ""
            return f"The spec of the InferenceService {name} is invalid: {field}: {first['msg']}."
        return ""


Hash = Annotated[str, Field(max_length=8)]
Words = Annotated[str, Field(max_length=1024)]


class RoleStatus(Part):
    """Workers of one role of all revisions, or routers."""

    desired_replicas: Count = 0
    """Desired number of pods."""

    replicas: Count = 0
    """Number of pods."""

    ready_replicas: Count = 0
    """Pods that accept requests."""

    updated_replicas: Count = 0
    """Ready pods of the newest revision."""


class RevisionStatus(Part):
    """One revision of workers."""

    name: Hash
    """Hash of the revision, which its objects have in their names and labels."""

    phase: Literal["Waiting", "Warming", "Serving", "Draining", "Retired", "Failed"]
    """Waiting: has no workers until its model is downloaded and the cluster has the APIs that it needs.
    Warming: not ready yet. Serving: receives requests. Draining: finishes its requests. Retired: has no
    workers and is kept for a rollback. Failed: not started again until the spec changes."""

    failure: Words | None = None
    """Cause of the phase Failed."""

    weight: Annotated[int, Field(ge=0, le=100)] = 0
    """Percentage of requests that the revision receives."""

    prefill_ready: Count = 0
    """Prefill workers that accept requests."""

    decode_ready: Count = 0
    """Decode workers that accept requests."""

    created_at: Time
    """Time when the revision was created."""

    progressed_at: Time
    """Time when the revision last made progress: reached a new maximum of ready workers, or started to wait
    for a worker."""

    settled: bool = True
    """Whether all of its requested workers are ready."""

    peak: Count = 0
    """Maximum of ready workers so far."""

    step: Count = 0
    """Finished canary steps."""

    step_since: Time | None = None
    """Time when all workers of the current canary step were ready."""


class ModelStatus(Part):
    """Files of the model."""

    resolved_revision: Words = ""
    """Commit that is served, for hf:// models."""

    cache_claim: Words = ""
    """PersistentVolumeClaim that holds the files."""

    download_job: Words = ""
    """Job that downloads the files."""


class InferenceServiceStatus(Part):
    """Observed state of the service."""

    observed_generation: Count = 0
    """Value of metadata.generation that the operator last processed, also if it refused the spec."""

    url: Words = ""
    """URL of the OpenAI-compatible API."""

    model_name: Words = ""
    """Name of the model in requests."""

    conditions: Conditions = []
    """Ready: requests are answered, also during a rollout and at zero, where they wait for the first worker.
    Available: workers and routers are ready now. Progressing: a rollout is running. Degraded: a rollout or a
    download failed. ModelReady, PrefillReady, DecodeReady, RouterReady and ExposureReady: that part is ready;
    the message says what keeps pods from it. ScalingActive: the autoscaler has metrics. ScalingLimited: a
    limit keeps a role below the number that it needs or that is requested. SpecSupported: the operator can
    carry out the spec."""

    prefill: RoleStatus | None = None
    """Prefill workers."""

    decode: RoleStatus | None = None
    """Decode workers."""

    router: RoleStatus | None = None
    """Routers."""

    current_revision: Hash = ""
    """Revision that receives most requests."""

    update_revision: Hash = ""
    """Revision that the spec describes. Differs from currentRevision during a rollout."""

    revisions: Annotated[list[RevisionStatus], Field(max_length=64)] = []
    """Running revisions, and those kept for a rollback, newest first."""

    model: ModelStatus = ModelStatus()
    """Files of the model."""
