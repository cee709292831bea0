"""
Batches of a service: storage and permissions of its routers, and the Job that runs a BatchJob.

The Job has an index for each pod. An index is not a part of the batch: each pod leases ranges of lines from
the routers until all are answered. The ledger, not the Job, records where the next pod continues.

Runners use a ServiceAccount without permissions. Kubernetes signs a token for them whose audience is the
routers of their service, so neither the operator nor a router creates or reads a Secret for it.
"""

from __future__ import annotations

import math

from baton_api import batch_jobs
from baton_operator import names
from baton_operator.crd import GROUP, VERSION
from baton_operator.kinds.batch_job import BatchJobSpec
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.router_spec import BatchSettings
from baton_operator.manifests.network import DNS, network_policy, tcp
from baton_operator.manifests.objects import Manifest, Owner, digest, given, merged, owned
from baton_operator.manifests.pods import container_security, from_secret, identity, scratch

FILES_FOLDER = "/var/lib/baton-files"
FILES = "files"

RULES: list[Manifest] = [
    {"apiGroups": [GROUP], "resources": ["batchjobs"], "verbs": ["create"]},
    {"apiGroups": [GROUP], "resources": ["batchjobs/status"], "verbs": ["patch"]},
]
"""Additional permissions of routers whose batches run in Jobs."""


def by_jobs(batches: BatchSettings) -> bool:
    """Whether Jobs run the batches."""
    return batches.execution == "Jobs"


def flags(owner: Owner, batches: BatchSettings) -> list[str]:
    """Return the routers' flags for batches."""
    given = []
    if by_jobs(batches):
        given += ["--batch-execution=external", f"--batch-jobs={owner.name}", f"--batch-jobs-uid={owner.uid}"]
    given += [f"--batch-runners={batches.parallelism}"] if batches.parallelism > 1 else []
    files = batches.files
    if files is not None:
        given.append(f"--files-store={files.uri or FILES_FOLDER}")
        given += [f"--files-endpoint={files.endpoint}"] if files.endpoint else []
    return given


def environment(batches: BatchSettings) -> list[Manifest]:
    """Return the routers' variables, which kubelets read from Secrets."""
    secret = batches.database_secret_ref
    if secret is None:
        return []
    return [
        from_secret("BATON_ROUTER_DATABASE", secret.name, "url"),
        from_secret("BATON_ROUTER_BATCH_SECRET", secret.name, "runners", optional=True),
    ]


def volumes(batches: BatchSettings) -> list[Manifest]:
    claim = batches.files.claim_name if batches.files else None
    return [{"name": FILES, "persistentVolumeClaim": {"claimName": claim}}] if claim else []


def mounts(batches: BatchSettings) -> list[Manifest]:
    return [{"name": FILES, "mountPath": FILES_FOLDER}] if volumes(batches) else []


def of_runners(owner: Owner, policy: bool) -> list[Manifest]:
    """Return the runners' ServiceAccount and, with `policy`, their NetworkPolicy."""
    name = batch_jobs.account(owner.name)
    account = owned(owner, "v1", "ServiceAccount", name, {"automountServiceAccountToken": False})
    routers = [{"podSelector": {"matchLabels": names.selecting(owner.name, names.ROUTER)}}]
    egress = [{"to": routers, "ports": tcp(names.ROUTER_PORT)}, DNS]
    selected = names.selecting(owner.name, batch_jobs.ROLE)
    return [account, *([network_policy(owner, name, selected, [], egress)] if policy else [])]


TOKEN_FOLDER, TOKEN_FILE = "/var/run/secrets/baton", "token"
TOKEN_S = 3600
"""Lifetime of a pod's token in seconds. Kubelets replace it before it expires."""

PERMANENT_FAILURE, TERMINATED = 43, 76
"""Exit statuses of a runner: a retry would fail again, and a signal ended it."""

END_S = 30
"""Seconds after SIGTERM to record finished lines."""

DAY_S = 86_400
"""Default completion window in seconds."""

LATE_S = 600
"""Seconds after the completion window until Kubernetes ends a Job. Routers end a batch, and with it the Job,
at the window itself; but a batch that no pod could create has no router to end it."""

TEMPLATE = "baton.dev/pod-template"
"""Annotation of a Job: hash of the BatchJob's podTemplate at its creation."""

QUEUE = "kueue.x-k8s.io/queue-name"


def job(batch_job: Manifest, service: InferenceServiceSpec, image: str) -> Manifest:
    """Return the Job at its creation. `image`: default image of routers."""
    spec = BatchJobSpec.model_validate(batch_job["spec"])
    metadata = batch_job["metadata"]
    name = metadata["name"]
    job_labels = {
        **names.of_role(spec.service_name, batch_jobs.ROLE),
        batch_jobs.LABEL: name,
        **({QUEUE: spec.queue_name} if spec.queue_name else {}),
    }
    owner = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "BatchJob", "name": name, "uid": metadata["uid"]}
    template = {"metadata": {"labels": job_labels}, "spec": _pod(batch_job, spec, service, image)}
    body = {
        "completionMode": "Indexed",
        "completions": spec.parallelism,
        "parallelism": spec.parallelism,
        "backoffLimitPerIndex": spec.max_retries,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                _on_exit("FailJob", PERMANENT_FAILURE),
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                _on_exit("Ignore", TERMINATED),
            ]
        },
        **given(activeDeadlineSeconds=_deadline_s(spec)),
        **changeable(spec),
        # Kueue admits Jobs that are suspended at their creation.
        "suspend": spec.suspend or spec.queue_name is not None,
        "template": merged(template, spec.pod_template),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": metadata["namespace"],
            "labels": job_labels,
            "annotations": {TEMPLATE: template_hash(spec)},
            "ownerReferences": [{**owner, "controller": True}],
        },
        "spec": body,
    }


def changeable(spec: BatchJobSpec) -> Manifest:
    """Return the fields of a Job's spec that can change after its creation."""
    fields: Manifest = {"ttlSecondsAfterFinished": spec.ttl_after_finished.whole_seconds}
    if spec.queue_name is None or spec.suspend:
        fields["suspend"] = spec.suspend
    return fields


def template_hash(spec: BatchJobSpec) -> str:
    """Return the hash of podTemplate. The template of a Job has defaults and cannot be compared with it."""
    return digest(spec.pod_template)


def _deadline_s(spec: BatchJobSpec) -> int | None:
    """Return the deadline of a Job that has to create its batch; None for an existing batch."""
    window_s = spec.completion_window.whole_seconds if spec.completion_window else DAY_S
    return window_s + LATE_S if spec.input_file_id else None


def _pod(batch_job: Manifest, spec: BatchJobSpec, service: InferenceServiceSpec, image: str) -> Manifest:
    volumes, mounts = scratch("/tmp")
    audience = batch_jobs.audience(batch_job["metadata"]["namespace"], spec.service_name)
    token = {"path": TOKEN_FILE, "audience": audience, "expirationSeconds": TOKEN_S}
    projected = {"sources": [{"serviceAccountToken": token}]}
    environment: list[Manifest] = [{"name": "HOME", "value": "/tmp"}]
    if (secret := spec.api_key_secret_ref) is not None:
        environment.append(from_secret("BATON_API_KEY", secret.name, "key"))
    return {
        **identity(batch_jobs.account(spec.service_name), service.security.pull_secret_names),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": END_S,
        "containers": [
            {
                "name": names.MAIN,
                "image": service.router.image or image,
                "args": _arguments(batch_job, spec),
                "env": environment,
                "resources": {
                    "requests": {"cpu": "250m", "memory": "256Mi"},
                    "limits": {"memory": "1Gi"},
                },
                "securityContext": container_security(),
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "volumeMounts": [
                    {"name": "token", "mountPath": TOKEN_FOLDER, "readOnly": True},
                    *mounts,
                ],
            }
        ],
        "volumes": [{"name": "token", "projected": projected}, *volumes],
    }


def _arguments(batch_job: Manifest, spec: BatchJobSpec) -> list[str]:
    metadata = batch_job["metadata"]
    flags = ["batch", "run", f"--router=http://{spec.service_name}"]
    concurrency = math.ceil(spec.concurrency / spec.parallelism)
    flags += [f"--token-file={TOKEN_FOLDER}/{TOKEN_FILE}", f"--concurrency={concurrency}"]
    if spec.batch_id:
        return [*flags, f"--batch={spec.batch_id}"]
    identity = f"--batch-job={metadata['name']}/{metadata['uid']}"
    flags += [f"--input-file={spec.input_file_id}", f"--endpoint={spec.endpoint}", identity]
    window = spec.completion_window
    return [*flags, f"--completion-window={window.whole_seconds}s"] if window else flags


def _on_exit(action: str, status: int) -> Manifest:
    codes = {"containerName": names.MAIN, "operator": "In", "values": [status]}
    return {"action": action, "onExitCodes": codes}
