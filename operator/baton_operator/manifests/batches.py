"""
Batches in a service's objects: where its routers keep them, and who may speak to routers for them.

Runners have an account without any right. What Kubernetes signs for them is a token that is meant for the
routers of their service, so that neither the operator nor a router ever has a Secret to make or to read.
"""

from __future__ import annotations

from baton_api import batch_jobs
from baton_operator import names
from baton_operator.crd import GROUP
from baton_operator.kinds.router_spec import BatchSettings
from baton_operator.manifests.network import DNS
from baton_operator.manifests.objects import Manifest, Owner, made

FILES_FOLDER = "/var/lib/baton-files"
FILES = "files"

RULES: list[Manifest] = [
    {"apiGroups": [GROUP], "resources": ["batchjobs"], "verbs": ["create"]},
    {"apiGroups": [GROUP], "resources": ["batchjobs/status"], "verbs": ["patch"]},
]
"""What a router may do besides, if Jobs run its batches."""


def by_jobs(batches: BatchSettings) -> bool:
    return batches.execution == "Jobs"


def flags(owner: Owner, batches: BatchSettings) -> list[str]:
    """Of the routers."""
    given = []
    if by_jobs(batches):
        given += ["--batch-execution=external", f"--batch-jobs={owner.name}", f"--batch-jobs-uid={owner.uid}"]
    files = batches.files
    if files is not None:
        given.append(f"--files-store={files.uri or FILES_FOLDER}")
        given += [f"--files-endpoint={files.endpoint}"] if files.endpoint else []
    return given


def environment(batches: BatchSettings) -> list[Manifest]:
    """Of the routers: what kubelets read of Secrets for them."""
    secret = batches.database_secret_ref
    if secret is None:
        return []
    return [
        _from_secret("BATON_ROUTER_DATABASE", secret.name, "url"),
        _from_secret("BATON_ROUTER_BATCH_SECRET", secret.name, "runners", optional=True),
    ]


def environment_sources(batches: BatchSettings) -> list[Manifest]:
    """Secrets of which the routers' environment has all."""
    secret = batches.files.credentials_secret_ref if batches.files else None
    return [{"secretRef": {"name": secret.name}}] if secret else []


def volumes(batches: BatchSettings) -> list[Manifest]:
    claim = batches.files.claim_name if batches.files else None
    return [{"name": FILES, "persistentVolumeClaim": {"claimName": claim}}] if claim else []


def mounts(batches: BatchSettings) -> list[Manifest]:
    return [{"name": FILES, "mountPath": FILES_FOLDER}] if volumes(batches) else []


def of_runners(owner: Owner, policy: bool) -> list[Manifest]:
    """What a service has for its runners: their account, and with `policy` who they may speak to."""
    name = batch_jobs.account(owner.name)
    account = made(owner, "v1", "ServiceAccount", name, {"automountServiceAccountToken": False})
    routers = [{"podSelector": {"matchLabels": names.selecting(owner.name, names.ROUTER)}}]
    body = {
        "podSelector": {"matchLabels": names.selecting(owner.name, batch_jobs.ROLE)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [],
        "egress": [{"to": routers, "ports": [{"protocol": "TCP", "port": names.ROUTER_PORT}]}, DNS],
    }
    border = made(owner, "networking.k8s.io/v1", "NetworkPolicy", name, {"spec": body})
    return [account, border] if policy else [account]


def _from_secret(name: str, secret: str, key: str, optional: bool = False) -> Manifest:
    reference = {"name": secret, "key": key, **({"optional": True} if optional else {})}
    return {"name": name, "valueFrom": {"secretKeyRef": reference}}
