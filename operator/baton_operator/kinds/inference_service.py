"""`InferenceService`: a model, served by prefill workers, decode workers and routers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton_operator.kinds.engine import Engine, Transfer
from baton_operator.kinds.model import Model
from baton_operator.kinds.part import Part, Rule, rules
from baton_operator.kinds.router_spec import Exposure, Router
from baton_operator.kinds.service_policies import Autoscaling, Rollout, Security
from baton_operator.kinds.status import Conditions
from baton_operator.kinds.worker_role import WorkerRole

_SCALED = "(has(self.decode.scaling) || (has(self.prefill) && has(self.prefill.scaling)))"
_RDMA = "(has(self.{0}) && has(self.{0}.resources) && has(self.{0}.resources.rdma))"
_ZERO = "(has(self.{0}) && has(self.{0}.scaling) && self.{0}.scaling.minReplicas == 0)"


@rules(
    Rule(
        f"!{_SCALED} || self.autoscaling.mode != 'Disabled'",
        "a role with scaling needs autoscaling.mode Internal or External",
        ".autoscaling.mode",
    ),
    Rule(
        f"!has(self.prefill) || {_RDMA.format('prefill')} == {_RDMA.format('decode')}",
        "prefill and decode both ask for an RDMA device, or neither does: blocks move between them",
    ),
    Rule(
        f"!({_ZERO.format('prefill')} || {_ZERO.format('decode')}) || "
        "self.router.holdForScaleFromZeroSeconds > 0",
        "a role with minReplicas 0 needs router.holdForScaleFromZeroSeconds, or its first requests are lost",
        ".router.holdForScaleFromZeroSeconds",
    ),
    Rule(
        "!has(self.autoscaling.scaleToZeroAfterSeconds) || "
        f"{_ZERO.format('prefill')} || {_ZERO.format('decode')}",
        "scaleToZeroAfterSeconds needs a role with minReplicas 0",
        ".autoscaling.scaleToZeroAfterSeconds",
    ),
    Rule(
        "has(self.prefill) == has(oldSelf.prefill) || self.rollout.strategy == 'PairedGeneration'",
        "prefill can be added or taken away only with rollout.strategy PairedGeneration",
        ".prefill",
    ),
)
class InferenceServiceSpec(Part):
    """What is served, by how many workers, and how."""

    model: Model
    """The model."""

    engine: Engine = Engine()
    """The engine of all workers."""

    transfer: Transfer = Transfer()
    """How KV blocks move from prefill to decode workers."""

    prefill: WorkerRole | None = None
    """The prefill workers. Without any, decode workers compute prompts themselves."""

    decode: WorkerRole
    """The decode workers."""

    router: Router = Router()
    """The routers."""

    exposure: Exposure = Exposure()
    """How the service is reached from outside of the cluster."""

    autoscaling: Autoscaling = Autoscaling()
    """Who scales the roles that have `scaling`."""

    rollout: Rollout = Rollout()
    """How a change of the workers comes into service."""

    security: Security = Security()
    """Who may reach the pods, and what they may do."""

    suspend: bool = False
    """Whether the service rests: no worker, no router, and everything else stays."""


Count = Annotated[int, Field(ge=0)]
Hash = Annotated[str, Field(max_length=8)]
Words = Annotated[str, Field(max_length=1024)]
Time = Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})]


class RoleStatus(Part):
    """The workers of one role, or the routers, of all generations."""

    desired: Count = 0
    """How many there are to be."""

    replicas: Count = 0
    """How many pods there are."""

    ready: Count = 0
    """How many of them take requests."""

    updated: Count = 0
    """How many are of the newest generation."""

    reason: Words = ""
    """What is in the way, if something is."""


class RevisionStatus(Part):
    """One generation of workers."""

    name: Hash
    """Its hash, as in the names and labels of what belongs to it."""

    phase: Literal["Waiting", "Warming", "Serving", "Draining", "Retired", "Failed"]
    """Waiting: has no workers until the files of its model are fetched. Warming: not ready yet. Serving: gets
    requests. Draining: finishes those that it has. Retired: remembered, to go back to. Failed: not tried
    again until the spec changes."""

    weight: Annotated[int, Field(ge=0, le=100)] = 0
    """Percent of requests that go to it."""

    prefill_ready: Count = 0
    """Prefill workers that take requests."""

    decode_ready: Count = 0
    """Decode workers that take requests."""

    created_at: Time
    """When it was first made."""

    progressed_at: Time
    """When it last had more workers that take requests than ever before, or began to wait for one."""

    settled: bool = True
    """Whether all of its workers that were asked for take requests."""

    peak: Count = 0
    """Most workers that took requests at once."""

    step: Count = 0
    """Steps of a canary that are done."""

    step_since: Time | None = None
    """When the workers of the present step were all ready."""

    reason: Words = ""
    """Why it failed, if it did."""


class ModelStatus(Part):
    """The model's files."""

    resolved_revision: Words = ""
    """The commit that is served, where the source has any."""

    cache_claim: Words = ""
    """The PersistentVolumeClaim that holds them."""

    download_job: Words = ""
    """The Job that fetches them."""


class AutoscalingStatus(Part):
    """What the operator's scaler does."""

    active: bool = False
    """Whether it scales anything."""

    reason: Words = ""
    """Why it does not, if it does not."""


class InferenceServiceStatus(Part):
    """What is so now."""

    observed_generation: Count = 0
    """The metadata.generation that this is about."""

    url: Words = ""
    """Where the OpenAI API is."""

    model_name: Words = ""
    """What requests call the model."""

    conditions: Conditions = []
    """Ready says whether requests are answered by what the spec asks for; the others say what is missing."""

    prefill: RoleStatus | None = None
    """The prefill workers."""

    decode: RoleStatus | None = None
    """The decode workers."""

    router: RoleStatus | None = None
    """The routers."""

    prefill_summary: Words = ""
    """Ready and wanted prefill workers, such as 2/4."""

    decode_summary: Words = ""
    """Ready and wanted decode workers."""

    router_summary: Words = ""
    """Ready and wanted routers."""

    current_revision: Hash = ""
    """The generation that serves."""

    update_revision: Hash = ""
    """The generation that the spec asks for."""

    revisions: Annotated[list[RevisionStatus], Field(max_length=64)] = []
    """All generations that are there or remembered, the newest first."""

    model: ModelStatus = ModelStatus()
    """The model's files."""

    autoscaling: AutoscalingStatus = AutoscalingStatus()
    """What the operator's scaler does."""
