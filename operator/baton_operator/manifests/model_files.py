"""
How pods get the files of a model: from the image, from a volume, or downloaded before the worker starts.

`baton fetch` downloads them: in a Job into a claim that all pods share, or in an init container of each pod.
In a folder of the node, the first pod downloads and the others wait for it. Only the download mounts the
volume writable. It leaves a marker, so a later download of the same files ends at once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from baton_api.announcements import PINNED_REVISION, RESULT_FILE
from baton_operator import names
from baton_operator.kinds.model import Model
from baton_operator.kinds.worker_role import Placement
from baton_operator.manifests.objects import Manifest, Owner, given, owned
from baton_operator.manifests.pods import all_of_secret, container_security, identity, placed, scratch

FOLDER = "/models"
"""Where the volume with a model's files is mounted."""

VOLUME = "model"
CLAIM = "baton.dev/claim"
"""Annotation of a Job: UID of the claim that it fills. A later claim may have the same name."""

MEMORY_LIMIT = "4Gi"
"""Memory limit of a download, which streams files of any size."""

PIN_KEY = "revision"
"""Key of the ConfigMap that names the commit which all pods of a revision fetch."""

TERMINATION_LOG = "/dev/termination-log"

JOB_TTL_S = 86_400
JOB_RETRIES = 6


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one model in the pods of a service."""

    service: str
    model: Model
    image: str
    pin: str = ""
    """ConfigMap that may name the commit to fetch where the model names no revision."""

    @property
    def pinned(self) -> bool:
        """Whether pods download the commit that the operator pinned, instead of the newest one each."""
        return self.scheme == "hf" and not self.model.revision and not self.job_needed

    @property
    def scheme(self) -> str:
        return self.model.uri.partition("://")[0]

    @property
    def fetched(self) -> bool:
        """Whether the files are downloaded."""
        return self.scheme in ("hf", "s3", "gs")

    @property
    def job_needed(self) -> bool:
        """Whether a Job downloads them for all pods."""
        return self.fetched and self.model.cache.type == "PVC"

    @property
    def key(self) -> str:
        """Hash of source, revision and patterns: the folder of the files."""
        wanted = [self.model.uri, self.model.revision or "", *self.model.allow_patterns]
        return hashlib.sha256("\0".join(wanted).encode()).hexdigest()[:8]

    @property
    def place(self) -> tuple[str, str]:
        """The claim with the files, and the folder in it."""
        return self.claim, self.key

    @property
    def job_name(self) -> str:
        """Name of the Job that downloads them. Another claim has another Job."""
        named = self.model.cache.claim_name
        place = hashlib.sha256(f"{self.key}/{named}".encode()).hexdigest()[:8] if named else self.key
        return names.model_job(self.service, place)

    @property
    def claim(self) -> str:
        """Name of the PersistentVolumeClaim that holds them; empty without one."""
        if self.scheme == "pvc":
            return self._rest.partition("/")[0]
        if self.model.cache.type != "PVC":
            return ""
        return self.model.cache.claim_name or names.model_claim(self.service)

    @property
    def makes_claim(self) -> bool:
        """Whether the operator creates the claim."""
        return self.model.cache.type == "PVC" and not self.model.cache.claim_name

    @property
    def path(self) -> str:
        """The argument MODEL of a worker."""
        match self.scheme:
            case "builtin" | "file":
                return self._rest
            case "pvc":
                return f"{FOLDER}/{self._rest.partition('/')[2]}".rstrip("/")
            case "oci":
                return FOLDER
        return f"{FOLDER}/{self.key}"

    @property
    def volumes(self) -> list[Manifest]:
        """Volumes of the workers' pods."""
        if self.claim:
            return [_claimed(self.claim, readOnly=True)]
        if self.scheme == "oci":
            return [{"name": VOLUME, "image": {"reference": self._rest}}]
        if not self.fetched:
            return []
        if self.model.cache.type == "HostPath":
            folder = {"path": self.model.cache.path, "type": "DirectoryOrCreate"}
            return [{"name": VOLUME, "hostPath": folder}]
        return [{"name": VOLUME, "emptyDir": given(sizeLimit=self.model.cache.size)}]

    @property
    def mounts(self) -> list[Manifest]:
        return [{"name": VOLUME, "mountPath": FOLDER, "readOnly": True}] if self.volumes else []

    @property
    def init_containers(self) -> list[Manifest]:
        """Init container that downloads the files in the pod itself."""
        return [self._fetching("fetch")] if self.fetched and not self.job_needed else []

    def job(
        self, owner: Owner, *, pull_secrets: list[str], claim_uid: str, account: str, placement: Placement
    ) -> Manifest:
        """
        Return the Job that downloads the files into the claim. Its name identifies the files.

        Its pod has the placement and the ServiceAccount of the workers, so that both reach the volume and the
        cloud's storage. `claim_uid`: empty for a claim of the user.
        """
        volumes, _ = scratch("/tmp")
        near = placement.model_copy(update={"runtime_class_name": None, "topology_spread_constraints": []})
        pod = {
            **placed(near, {}),
            **identity(account, pull_secrets),
            "restartPolicy": "Never",  # a failed pod stays, with its log and termination message
            "containers": [self._fetching(names.MAIN)],
            "volumes": [_claimed(self.claim), *volumes],
        }
        labels = {**names.of_service(self.service), "app.kubernetes.io/component": "model"}
        spec: dict[str, Any] = {
            "backoffLimit": JOB_RETRIES,
            "ttlSecondsAfterFinished": JOB_TTL_S,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        }
        annotations = {CLAIM: claim_uid} if claim_uid else None
        return owned(owner, "batch/v1", "Job", self.job_name, {"spec": spec}, labels, annotations)

    def persistent_volume_claim(self, owner: Owner) -> Manifest | None:
        """Return the claim; None if the operator does not create one."""
        cache = self.model.cache
        if not self.makes_claim or not cache.size:
            return None
        spec = {
            "accessModes": [cache.access_mode or "ReadWriteMany"],
            "resources": {"requests": {"storage": cache.size}},
            **given(storageClassName=cache.storage_class_name),
        }
        name = names.model_claim(self.service)
        return owned(owner, "v1", "PersistentVolumeClaim", name, {"spec": spec})

    @property
    def _pinning(self) -> list[Manifest]:
        if not self.pinned:
            return []
        source = {"name": self.pin, "key": PIN_KEY, "optional": True}
        return [{"name": PINNED_REVISION, "valueFrom": {"configMapKeyRef": source}}]

    @property
    def _rest(self) -> str:
        return self.model.uri.partition("://")[2]

    def _fetching(self, name: str) -> Manifest:
        model = self.model
        options = [f"--revision={model.revision}"] if model.revision else []
        options += [f"--allow={pattern}" for pattern in model.allow_patterns]
        _, mounts = scratch("/tmp")
        storage = given(**{"ephemeral-storage": model.cache.size}) if model.cache.type == "None" else {}
        return {
            "name": name,
            "image": self.image,
            "args": ["fetch", model.uri, self.path, *options],
            "env": [
                {"name": "HOME", "value": "/tmp"},
                {"name": RESULT_FILE, "value": TERMINATION_LOG},
                *self._pinning,
            ],
            **all_of_secret(model.credentials_secret_ref),
            "securityContext": container_security(),
            "resources": {
                "requests": {"cpu": "500m", "memory": "512Mi", **storage},
                "limits": {"memory": MEMORY_LIMIT, **storage},
            },
            "terminationMessagePath": TERMINATION_LOG,
            "terminationMessagePolicy": "FallbackToLogsOnError",  # so that status can say what went wrong
            "volumeMounts": [{"name": VOLUME, "mountPath": FOLDER}, *mounts],
        }


def _claimed(claim: str, **options: bool) -> Manifest:
    return {"name": VOLUME, "persistentVolumeClaim": {"claimName": claim, **options}}
