"""
Whether the model files of a revision are present: a pure decision.

Files that a Job fetches into a claim count as present once that is proved: the Job completed, or a worker
that reads them is ready. A deleted Job proves nothing, because Kubernetes deletes failed ones as well. So
the ConfigMap of each revision that uses the files stores the proof.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from baton_operator import names
from baton_operator.cluster.state import ClusterState, Pod
from baton_operator.manifests import workers
from baton_operator.manifests.model_files import CLAIM, PIN_KEY, ModelFiles
from baton_operator.manifests.objects import Manifest, by_type
from baton_operator.manifests.revision import Revision

PROOF = "baton.dev/model-fetched"
"""Annotation of a revision's ConfigMap: a Proof as JSON."""

FAILED = "Failed"
"""Reason of the condition ModelReady from the failure of the Job until the files are present."""

FetchPhase = Literal["Present", "Fetching", "Failed"]


@dataclass(frozen=True, slots=True)
class Proof:
    """Record of fetched files."""

    claim: str
    """UID of the claim that holds the files; empty for a claim that the operator did not make."""
    revision: str
    """Commit, or digest of the file versions; empty if not reported."""

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True, slots=True)
class ModelFetch:
    """Progress of fetching the model files of one revision."""

    phase: FetchPhase
    message: str = ""
    proof: Proof | None = None
    """Proof to store. None if the files are missing or no Job fetches them."""
    revision: str = ""
    """Fetched revision as in Proof; several if pods fetched different ones."""
    pin: str = ""
    """Commit that all pods of the revision fetch, once one pod has fetched the newest."""
    outdated_job: bool = False
    """Whether the existing Job fills a deleted claim and blocks a new Job."""

    @property
    def present(self) -> bool:
        return self.phase == "Present"


def model_fetches(cluster: ClusterState, revisions: Mapping[str, Revision]) -> dict[str, ModelFetch]:
    """Return the progress for each revision."""
    files = {revision: workers.files(cluster.owner, one) for revision, one in revisions.items()}
    return {revision: _fetch(cluster, files, revision) for revision in revisions}


def _fetch(cluster: ClusterState, files: Mapping[str, ModelFiles], revision: str) -> ModelFetch:
    wanted = files[revision]
    if not wanted.job_needed:
        return _fetched_by_pods(cluster, wanted, revision)
    same = [name for name, one in files.items() if one.place == wanted.place]
    claim = cluster.find("v1", "PersistentVolumeClaim", wanted.claim)
    uid: str = claim["metadata"].get("uid", "") if claim else ""
    job = cluster.find("batch/v1", "Job", wanted.job_name)
    outdated = job is not None and job["metadata"].get("annotations", {}).get(CLAIM, uid) != uid
    proofs = [_proof(cluster, name) for name in same]
    proof = next((one for one in proofs if one is not None and one.claim == uid), None)
    if _condition(job, "Complete") and not outdated:
        reported = next((pod.note for pod in cluster.pods if pod.job == wanted.job_name and pod.note), "")
        proof = Proof(uid, reported or (proof.revision if proof else ""))
    elif proof is None and any(pod.revision in same and pod.ready for pod in cluster.pods):
        proof = Proof(uid, "")
    if proof is not None:
        return ModelFetch("Present", proof=proof, revision=proof.revision, outdated_job=outdated)
    if claim is None and wanted.makes_claim:
        return ModelFetch("Fetching", f"The claim {wanted.claim} does not exist yet.")
    failed, message = _progress(cluster, wanted.job_name, job)
    return ModelFetch("Failed" if failed else "Fetching", message, outdated_job=outdated)


def _proof(cluster: ClusterState, revision: str) -> Proof | None:
    existing = cluster.find("v1", "ConfigMap", names.revision_config_map(cluster.owner.name, revision))
    text = (existing or {}).get("metadata", {}).get("annotations", {}).get(PROOF)
    try:
        noted = json.loads(text or "")
        return Proof(str(noted["claim"]), str(noted["revision"]))
    except (ValueError, KeyError, TypeError):
        return None  # missing or invalid: prove the files again


def _condition(job: Manifest | None, type: str) -> dict[str, Any]:
    existing = by_type(job).get(type, {})
    return existing if existing.get("status") == "True" else {}


def _progress(cluster: ClusterState, name: str, job: Manifest | None) -> tuple[bool, str]:
    """Return whether fetching failed, and the message for status."""
    last = _last_trouble([pod for pod in cluster.pods if pod.job == name])
    words = f" Last pod: {last}." if last else ""
    if failure := _condition(job, "Failed"):
        why = f"{failure.get('reason', 'Failed')}: {failure.get('message', '')}".rstrip(": .")
        way_out = "Fix the cause and delete the Job to retry immediately."
        return True, f"The Job {name} failed: {why}.{words} {way_out}"
    before = by_type(cluster.service).get("ModelReady")
    same = cluster.status.get("model", {}).get("downloadJob") == name
    if before is not None and before["reason"] == FAILED and same:
        return True, before.get("message", "")  # the failure stands until another Job completes
    if job is None or any(pod.job == name for pod in cluster.pods):
        return False, f"The Job {name} is fetching the files.{words}"
    return False, f"The Job {name} has no pod yet. See `kubectl describe job {name}`."


def _last_trouble(pods: list[Pod]) -> str:
    troubled = [pod for pod in pods if pod.trouble]
    return max(troubled, key=lambda pod: (pod.created, pod.name)).trouble.rstrip(".") if troubled else ""


def _fetched_by_pods(cluster: ClusterState, files: ModelFiles, revision: str) -> ModelFetch:
    """Return the progress if each pod fetches by itself. The first one pins the commit for the others."""
    pods = [pod for pod in cluster.pods if files.fetched and pod.revision == revision and pod.note]
    existing = cluster.find("v1", "ConfigMap", files.pin)
    first = min(pods, key=lambda pod: (pod.created, pod.name)).note if pods else ""
    pin: str = existing["data"][PIN_KEY] if existing else first
    fetched = sorted({pod.note for pod in pods} | ({pin} if pin else set()))
    # Not "Fetching": that would keep the pods, which fetch, from starting.
    message = "Each worker's pod fetches the files when it starts." if files.fetched else ""
    return ModelFetch("Present", message, revision=", ".join(fetched), pin=pin if files.pinned else "")
