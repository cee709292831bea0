"""
Certificates for mutual TLS between the workers and routers of a service.

All pods of a service share one certificate, which identifies the service. Pods mount its Secret, which
cert-manager or the user creates and the operator never reads. A pod waits until its Secret exists.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton_operator.kinds.service_policies import MutualTls
from baton_operator.manifests import exposure
from baton_operator.manifests.objects import Manifest, Owner

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
