"""
A revision: what of a spec makes the workers, under a name that is a hash of it.

Equal workers have equal names, so a change that was taken back is the old revision again. How many there
are, how they are scaled, reached and evicted is no part of it: that changes while they run. What a
revision was made from is kept in a ConfigMap and never rendered from anything else, so that a later spec
cannot restart workers that serve.

The name is a hash only when a revision is first made. Afterwards the label of its ConfigMap says it: a
later operator may hash in another way, and must find the workers of an earlier one under their own name.
"""

from __future__ import annotations

import hashlib
import json

from pydantic import Field

from baton_api.workers import Role
from baton_operator.kinds.engine import Engine, Transfer
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.model import Model
from baton_operator.kinds.part import Part
from baton_operator.kinds.service_policies import MutualTls
from baton_operator.kinds.worker_role import WorkerRole

TEMPLATE_VERSION = 1
"""Version of the way in which pods are made from a spec. A higher one makes new revisions of the same
specs: a rollout replaces all workers. Raise it when pods that run are wrong, and not when they could be
nicer. Without a raise, workers that run keep the template that they were started with."""

REVISION_LENGTH = 8

# What of a role changes while its workers run.
_LIVE = frozenset({"replicas", "scaling", "disruption", "rollout"})


class Blueprint(Part):
    """What the workers of one revision are made from."""

    template_version: int = 1
    """The TEMPLATE_VERSION of the operator that made it. The default never changes: it stands for what
    0.1.0 wrote, which was nothing."""
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
        """The revision that `spec` asks for."""
        return cls(
            template_version=TEMPLATE_VERSION,
            served_names=(spec.model.name or service, *spec.model.aliases),
            model=_without_claim(spec.model),
            engine=spec.engine,
            transfer=spec.transfer,
            prefill=spec.prefill and _fixed(spec.prefill),
            decode=_fixed(spec.decode),
            service_account_name=spec.security.service_account_name or "",
            image_pull_secrets=tuple(spec.security.image_pull_secrets),
            mutual_tls=spec.security.mutual_tls,
        )

    @property
    def digest(self) -> str:
        """8 hexadecimal digits, equal for blueprints that make the same workers."""
        same = self.model_copy(update={"model": _without_claim(self.model)})
        # Without what stands at its default: a field that a later version adds changes no digest.
        written = same.model_dump(by_alias=True, mode="json", exclude_defaults=True)
        written["templateVersion"] = self.template_version
        text = json.dumps(written, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:REVISION_LENGTH]

    @property
    def roles(self) -> dict[Role, WorkerRole]:
        """The roles that there are. Decode workers without prefill workers do both."""
        if self.prefill is None:
            return {Role.BOTH: self.decode}
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode}


class Revision(Part):
    """A blueprint, and what was settled when it was first built."""

    blueprint: Blueprint
    image: str
    """The operator's default image at that time; blueprints may name others."""
    created: float
    """Unix seconds."""
    revision: str = Field(exclude=True)
    """The name, from the label of its ConfigMap."""


def _without_claim(model: Model) -> Model:
    """The same model without the size and class of the claim to be made, which workers do not depend on."""
    if model.cache.type != "PVC":
        return model
    cache = model.cache.model_copy(update={"size": None, "storage_class_name": None})
    return model.model_copy(update={"cache": cache})


def _fixed(role: WorkerRole) -> WorkerRole:
    return role.model_copy(update={name: WorkerRole.model_fields[name].get_default() for name in _LIVE})
