"""
Certificates of a service's workers and routers, if they are to show some to each other.

One certificate for all pods of a service: whoever has it belongs to the service. Pods mount its Secret,
which the operator never reads: cert-manager writes it, or whoever is named. A pod whose Secret is not there
yet waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton_operator.kinds.service_policies import MutualTls
from baton_operator.manifests.exposure import CERTIFICATE_API
from baton_operator.manifests.objects import Manifest, Owner, made

FOLDER = "/etc/baton/mtls"
VOLUME = "mtls"

READABLE = 0o440
"""By the pod's user, who is in the group of its files."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What pods need to show a certificate; nothing at all without one."""

    flags: list[str]
    volumes: list[Manifest]
    mounts: list[Manifest]


def shown(owner: Owner, wanted: MutualTls | None) -> Shown:
    """For a worker's or a router's container."""
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
    Certificates by KIND/NAME, a text as `OperatorSettings.mutual_tls_issuer` is one; none if it is empty.

    >>> by_issuer("ClusterIssuer/own").issuer_ref.name
    'own'
    """
    kind, _, name = issuer.partition("/")
    return MutualTls.model_validate({"issuerRef": {"kind": kind, "name": name}}) if issuer else None


def peer(owner: Owner) -> str:
    """The name in the certificate: of the service, so that no other one's will do."""
    return f"{owner.name}.{owner.namespace}.svc.cluster.local"


def certificate(owner: Owner, wanted: MutualTls | None) -> list[Manifest]:
    """What cert-manager makes the Secret of, and renews when a third of its time is left."""
    if wanted is None or wanted.issuer_ref is None:
        return []
    body = {
        "secretName": _secret(owner, wanted),
        "dnsNames": [peer(owner)],
        "usages": ["digital signature", "server auth", "client auth"],
        "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
        "duration": "2160h0m0s",
        "renewBefore": "720h0m0s",
        "issuerRef": {"name": wanted.issuer_ref.name, "kind": wanted.issuer_ref.kind},
    }
    return [made(owner, CERTIFICATE_API, "Certificate", f"{owner.name}-mtls", {"spec": body})]


def _secret(owner: Owner, wanted: MutualTls) -> str:
    return wanted.secret_name or f"{owner.name}-mtls"
