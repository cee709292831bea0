"""
The Job that runs a BatchJob: one index, one pod at a time, until its runner says that nothing is left.

A batch is not cut into shards. One runner keeps as many lines under way as the service takes, and where the
next pod goes on is written down in the ledger, not in the Job: an index more would only wait for the lease.
"""

from __future__ import annotations

import hashlib
import json

from baton_api import batch_jobs
from baton_operator import names
from baton_operator.crd import GROUP, VERSION
from baton_operator.kinds.batch_job import BatchJobSpec
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.manifests.objects import Manifest, given, merged
from baton_operator.manifests.pods import container_security, pod_security, scratch

TOKEN_FOLDER, TOKEN_FILE = "/var/run/secrets/baton", "token"
TOKEN_S = 3600
"""Seconds for which a pod's token is good; kubelets write a new one long before."""

REFUSED, TOLD_TO = 43, 76
"""A runner's exit statuses: to start it again is of no use, and somebody asked it to end."""

END_S = 30
"""Seconds for what is done to be recorded."""

DAY_S = 86_400
"""Of a batch that says nothing of its time."""

LATE_S = 600
"""Seconds beyond its batch's time after which a Job is given up. Routers end the batch before, and with it
the Job; but not one that was never made, because no pod could start."""

TEMPLATE = "baton.dev/pod-template"
"""On a Job: what its BatchJob's podTemplate was when it was made, as a hash."""

QUEUE = "kueue.x-k8s.io/queue-name"


def job(batch_job: Manifest, service: InferenceServiceSpec, image: str) -> Manifest:
    """The Job as it is made; `image` is the routers', unless the service names another."""
    spec = BatchJobSpec.model_validate(batch_job["spec"])
    metadata = batch_job["metadata"]
    name = metadata["name"]
    there = {
        **names.of_role(spec.service_name, batch_jobs.ROLE),
        batch_jobs.LABEL: name,
        **({QUEUE: spec.queue_name} if spec.queue_name else {}),
    }
    owner = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "BatchJob", "name": name, "uid": metadata["uid"]}
    template = {"metadata": {"labels": there}, "spec": _pod(batch_job, spec, service, image)}
    body = {
        "completionMode": "Indexed",
        "completions": 1,
        "parallelism": 1,
        "backoffLimitPerIndex": spec.max_retries,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                _on_exit("FailJob", REFUSED),
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                _on_exit("Ignore", TOLD_TO),
            ]
        },
        **given(activeDeadlineSeconds=_deadline_s(spec)),
        **changeable(spec),
        # Kueue admits what is at rest when it is made.
        "suspend": spec.suspend or spec.queue_name is not None,
        "template": merged(template, spec.pod_template),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": metadata["namespace"],
            "labels": there,
            "annotations": {TEMPLATE: template_hash(spec)},
            "ownerReferences": [{**owner, "controller": True}],
        },
        "spec": body,
    }


def changeable(spec: BatchJobSpec) -> Manifest:
    """What of a Job's spec may be changed while it is there."""
    made: Manifest = {"ttlSecondsAfterFinished": spec.ttl_after_finished.whole_seconds}
    if spec.queue_name is None or spec.suspend:
        made["suspend"] = spec.suspend
    return made


def template_hash(spec: BatchJobSpec) -> str:
    """Of podTemplate, of which API servers cannot tell whether it has changed."""
    text = json.dumps(spec.pod_template, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _deadline_s(spec: BatchJobSpec) -> int | None:
    """Of a Job that may never get as far as a batch."""
    window_s = spec.completion_window.whole_seconds if spec.completion_window else DAY_S
    return window_s + LATE_S if spec.input_file_id else None


def _pod(batch_job: Manifest, spec: BatchJobSpec, service: InferenceServiceSpec, image: str) -> Manifest:
    volumes, mounts = scratch("/tmp")
    audience = batch_jobs.audience(batch_job["metadata"]["namespace"], spec.service_name)
    token = {"path": TOKEN_FILE, "audience": audience, "expirationSeconds": TOKEN_S}
    projected = {"sources": [{"serviceAccountToken": token}]}
    environment: list[Manifest] = [{"name": "HOME", "value": "/tmp"}]
    if (secret := spec.api_key_secret_ref) is not None:
        reference = {"secretKeyRef": {"name": secret.name, "key": "key"}}
        environment.append({"name": "BATON_API_KEY", "valueFrom": reference})
    pull = service.security.image_pull_secrets
    return {
        "restartPolicy": "Never",
        "serviceAccountName": batch_jobs.account(spec.service_name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": END_S,
        "securityContext": pod_security(),
        **given(imagePullSecrets=[{"name": name} for name in pull]),
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
    flags += [f"--token-file={TOKEN_FOLDER}/{TOKEN_FILE}", f"--concurrency={spec.concurrency}"]
    if spec.batch_id:
        return [*flags, f"--batch={spec.batch_id}"]
    whose = f"--batch-job={metadata['name']}/{metadata['uid']}"
    flags += [f"--input-file={spec.input_file_id}", f"--endpoint={spec.endpoint}", whose]
    window = spec.completion_window
    return [*flags, f"--completion-window={window.whole_seconds}s"] if window else flags


def _on_exit(action: str, status: int) -> Manifest:
    codes = {"containerName": names.MAIN, "operator": "In", "values": [status]}
    return {"action": action, "onExitCodes": codes}
