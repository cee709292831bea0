"""
A revision: the part of a spec that defines the workers, named by its hash.

Equal workers have equal names, so reverting a change restores the old revision. Replicas, scaling, exposure
and disruption budgets are not part of a revision: they change while workers run. A ConfigMap stores each
revision, and workers are rendered only from it, so a later spec cannot restart serving workers.

The name is computed once, when a revision is created. Later operators read it from the label of the
ConfigMap, since they may compute other hashes.
"""

from __future__ import annotations

from pydantic import Field

from baton_api.workers import Role
from baton_operator.kinds.engine import Engine, Transfer
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.model import Model
from baton_operator.kinds.part import Part
from baton_operator.kinds.service_policies import MutualTls
from baton_operator.kinds.worker_role import WorkerRole
from baton_operator.manifests.objects import digest

TEMPLATE_VERSION = 1
"""Version of the rendering of pods from a spec. A higher version creates new revisions of the same specs,
and rollouts replace all workers. Raise it only if running pods are wrong. Otherwise running workers keep
their template."""

REVISION_LENGTH = 8

# Fields of a role that change while its workers run.
_LIVE = frozenset({"replicas", "scaling", "pod_disruption_budget", "update_strategy"})


class Blueprint(Part):
    """The definition of the workers of one revision."""

    template_version: int = 1
    """TEMPLATE_VERSION of the operator that created it. The default stays 1: defaults are not stored."""
    served_names: tuple[str, ...]
    model: Model
    engine: Engine
    transfer: Transfer
    prefill: WorkerRole | None = None
    decode: WorkerRole
    service_account_name: str = ""
    image_pull_secrets: tuple[str, ...] = ()
    mutual_tls: MutualTls | None = None

    @classmethod
    def of(cls, service: str, spec: InferenceServiceSpec) -> Blueprint:
        """Return the blueprint of a spec."""
        return cls(
            template_version=TEMPLATE_VERSION,
            served_names=(spec.model.name or service, *spec.model.aliases),
            model=_without_claim(spec.model),
            engine=spec.engine,
            transfer=spec.transfer,
            prefill=spec.prefill and _fixed(spec.prefill),
            decode=_fixed(spec.decode),
            service_account_name=spec.security.service_account_name or "",
            image_pull_secrets=tuple(spec.security.pull_secret_names),
            mutual_tls=spec.security.mutual_tls,
        )

    @property
    def digest(self) -> str:
        """8 hexadecimal digits, equal for blueprints of the same workers."""
        same = self.model_copy(update={"model": _without_claim(self.model)})
        # Defaults are excluded, so a field that a later version adds changes no digest.
        written = same.model_dump(by_alias=True, mode="json", exclude_defaults=True)
        written["templateVersion"] = self.template_version
        return digest(written)[:REVISION_LENGTH]

    @property
    def roles(self) -> dict[Role, WorkerRole]:
        """Existing roles. Without prefill workers, decode workers have the role `both`."""
        if self.prefill is None:
            return {Role.BOTH: self.decode}
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode}


class Revision(Part):
    """A blueprint, and what was fixed when the revision was created."""

    blueprint: Blueprint
    image: str
    """Default image of the operator for the engine at that time; the blueprint may name others."""
    fetch_image: str = ""
    """Image that downloads the model for other engines than Baton, whose images cannot."""
    created: float
    """Unix seconds."""
    name: str = Field(exclude=True)
    """Name of the revision, from the label of its ConfigMap."""


def _without_claim(model: Model) -> Model:
    """Return the model without size, class and mode of its claim, which do not affect workers."""
    if model.cache.type != "PVC":
        return model
    cache = model.cache.model_copy(update={"size": None, "storage_class_name": None, "access_mode": None})
    return model.model_copy(update={"cache": cache})


def _fixed(role: WorkerRole) -> WorkerRole:
    return role.model_copy(update={name: WorkerRole.model_fields[name].get_default() for name in _LIVE})
