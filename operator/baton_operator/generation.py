"""
A generation: what of a spec makes the workers, under a name that is a hash of it.

Equal workers have equal names, so a change that was taken back is the old generation again. How many there
are, how they are scaled, reached and evicted is no part of it: that changes while they run. What a
generation was made from is kept in a ConfigMap and never rendered from anything else, so that neither a later
spec nor a later operator can restart workers that serve.
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
"""Of the way in which pods are made from a spec. A higher one makes other names of the same specs, so all
workers are replaced: it goes up when pods that run are wrong, and not when they could be nicer."""

REVISION_LENGTH = 8

# What of a role changes while its workers run.
_LIVE = frozenset({"replicas", "scaling", "disruption", "rollout"})


class Blueprint(Part):
    """What the workers of one generation are made from."""

    template_version: int = Field(default=TEMPLATE_VERSION)
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
        """The generation that `spec` asks for."""
        return cls(
            served_names=(spec.model.name or service, *spec.model.aliases),
            model=spec.model,
            engine=spec.engine,
            transfer=spec.transfer,
            prefill=spec.prefill and _fixed(spec.prefill),
            decode=_fixed(spec.decode),
            service_account_name=spec.security.service_account_name or "",
            image_pull_secrets=tuple(spec.security.image_pull_secrets),
            mutual_tls=spec.security.mutual_tls,
        )

    @property
    def revision(self) -> str:
        """The name: 8 hexadecimal digits."""
        # Without what stands at its default: a field that a later version adds changes no name.
        written = self.model_dump(by_alias=True, mode="json", exclude_defaults=True)
        written["templateVersion"] = self.template_version
        text = json.dumps(written, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:REVISION_LENGTH]

    @property
    def roles(self) -> dict[Role, WorkerRole]:
        """The roles that there are. Decode workers without prefill workers do both."""
        if self.prefill is None:
            return {Role.BOTH: self.decode}
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode}


class Generation(Part):
    """A blueprint, and what was settled when it was first built."""

    blueprint: Blueprint
    image: str
    """The operator's default image at that time; blueprints may name others."""
    created: float
    """Unix seconds."""

    @property
    def revision(self) -> str:
        return self.blueprint.revision


def _fixed(role: WorkerRole) -> WorkerRole:
    return role.model_copy(update={name: WorkerRole.model_fields[name].get_default() for name in _LIVE})
