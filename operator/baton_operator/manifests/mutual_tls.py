"""
What workers and routers of a service trust each other by: a certificate, and the key that signs tickets.

All pods of a service share one certificate, which identifies the service. Pods mount its Secret, which
cert-manager or the user creates and the operator never reads. A pod waits until its Secret exists.

The operator creates the Secret of tickets with a random value and cannot read it. Pods get it as an
environment variable, so a pod keeps the value that it started with. Workers of a revision that has no Secret
accept every request.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from baton_operator import names
from baton_operator.kinds.engine import Variable
from baton_operator.kinds.part import Anything
from baton_operator.kinds.service_policies import MutualTls
from baton_operator.manifests import exposure
from baton_operator.manifests.objects import Key, Manifest, Owner, key, owned
from baton_operator.manifests.pods import from_secret

FOLDER = "/etc/baton/mtls"
VOLUME = "mtls"

READABLE = 0o440
"""File mode: readable by the group, to which the pod's user belongs."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Flags, volumes and mounts of a pod with a certificate; empty without one."""

    flags: list[str]
    volumes: list[Manifest]
    mounts: list[Manifest]


def shown(owner: Owner, wanted: MutualTls | None) -> Shown:
    """Return what the container of a worker or router needs."""
    if wanted is None:
        return Shown([], [], [])
    secret = {"secretName": _secret(owner, wanted), "defaultMode": READABLE}
    return Shown(
        [f"--tls-folder={FOLDER}", f"--tls-name={peer(owner)}"],
        [{"name": VOLUME, "secret": secret}],
        [{"name": VOLUME, "mountPath": FOLDER, "readOnly": True}],
    )


def by_issuer(issuer: str) -> MutualTls | None:
    """
    Return the settings for an issuer KIND/NAME, as in `OperatorSettings.mutual_tls_issuer`; None if empty.

    >>> by_issuer("ClusterIssuer/own").issuer_ref.name
    'own'
    """
    kind, _, name = issuer.partition("/")
    return MutualTls.model_validate({"issuerRef": {"kind": kind, "name": name}}) if issuer else None


def peer(owner: Owner) -> str:
    """Return the DNS name in the certificate, which is unique for the service."""
    return f"{owner.name}.{owner.namespace}.svc.cluster.local"


def certificate(owner: Owner, wanted: MutualTls | None) -> list[Manifest]:
    """Return the Certificate from which cert-manager creates the Secret, renewed 30 days before its end."""
    if wanted is None or wanted.issuer_ref is None:
        return []
    made = exposure.certificate(
        owner,
        f"{owner.name}-mtls",
        _secret(owner, wanted),
        [peer(owner)],
        wanted.issuer_ref,
        usages=["digital signature", "server auth", "client auth"],
        privateKey={"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
        duration="2160h0m0s",
        renewBefore="720h0m0s",
    )
    return [made]


def _secret(owner: Owner, wanted: MutualTls) -> str:
    return wanted.secret_name or f"{owner.name}-mtls"


TICKET_KEY = "secret"
"""Key of the Secret that holds the value."""

ROUTER_VARIABLE, WORKER_VARIABLE = "BATON_ROUTER_TICKET_SECRET", "BATON_TICKET_SECRET"


def ticket_secret(owner: Owner, value: str) -> Manifest:
    """Return the Secret. It is immutable: delete it to rotate the value."""
    data = {TICKET_KEY: base64.b64encode(value.encode()).decode()}
    body = {"type": "Opaque", "immutable": True, "data": data}
    return owned(owner, "v1", "Secret", names.tickets(owner.name), body)


def ticket_variable(name: str, service: str, pod_template: Anything | None) -> list[Variable]:
    """The environment variable `name`; empty if the pod template of the spec sets it."""
    if any(one.get("name") == name for one in _environment(pod_template or {})):
        return []
    return [Variable.model_validate(from_secret(name, names.tickets(service), TICKET_KEY))]


def missing_ticket_secret(
    service: str, existing: Mapping[Key, Manifest], applied: Sequence[Manifest], troubles: Sequence[str]
) -> bool:
    """
    Whether the Secret may have to be created: its existence cannot be read.

    That is so before the first Deployment that refers to it, and when a pod cannot start without it:
    `troubles` are the reasons why pods do not run.
    """
    name = names.tickets(service)
    new = [manifest for manifest in applied if not _refers(existing.get(key(manifest), {}), name)]
    return any(_refers(manifest, name) for manifest in new) or any(name in trouble for trouble in troubles)


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
