"""
The Secret by which routers sign tickets and workers verify them: one for each service.

The operator creates it with a random value and cannot read it. Pods get it as an environment variable, so a
pod keeps the value that it started with. Workers of a revision that has no Secret accept every request.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence

from baton_operator import names
from baton_operator.kinds.engine import Variable
from baton_operator.kinds.part import Anything
from baton_operator.manifests.objects import Key, Manifest, Owner, key, owned
from baton_operator.manifests.pods import from_secret

KEY = "secret"
"""Key of the Secret that holds the value."""

ROUTER_VARIABLE, WORKER_VARIABLE = "BATON_ROUTER_TICKET_SECRET", "BATON_TICKET_SECRET"


def secret(owner: Owner, value: str) -> Manifest:
    """Return the Secret. It is immutable: delete it to rotate the value."""
    data = {KEY: base64.b64encode(value.encode()).decode()}
    body = {"type": "Opaque", "immutable": True, "data": data}
    return owned(owner, "v1", "Secret", names.tickets(owner.name), body)


def variable(name: str, service: str, pod_template: Anything | None) -> list[Variable]:
    """The environment variable `name`; empty if the pod template of the spec sets it."""
    if any(one.get("name") == name for one in _environment(pod_template or {})):
        return []
    return [Variable.model_validate(from_secret(name, names.tickets(service), KEY))]


def missing(
    service: str, existing: Mapping[Key, Manifest], applied: Sequence[Manifest], troubles: Sequence[str]
) -> bool:
    """
    Whether the Secret may have to be created: its existence cannot be read.

    That is so before the first Deployment that refers to it, and when a pod cannot start without it:
    `troubles` are the reasons why pods do not run.
    """
    name = names.tickets(service)
    new = [one for one in applied if not _refers(existing.get(key(one), {}), name)]
    return any(_refers(one, name) for one in new) or any(name in one for one in troubles)


def _refers(manifest: Manifest, secret: str) -> bool:
    if manifest.get("kind") != "Deployment":
        return False
    variables = _environment(manifest["spec"]["template"])
    sources = [one.get("valueFrom", {}).get("secretKeyRef", {}) for one in variables]
    return any(one.get("name") == secret for one in sources)


def _environment(template: Manifest) -> Iterator[Manifest]:
    """Environment variables of all containers of a pod template."""
    for container in (template.get("spec") or {}).get("containers") or ():
        yield from container.get("env") or ()
