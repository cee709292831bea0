"""The revisions of a service: the stored ones, the state of each, and the one that the spec asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from baton_api import labels
from baton_api.workers import Role
from baton_operator import names
from baton_operator.cluster.rollout_health import RolloutHealth
from baton_operator.cluster.state import ClusterState, Pod
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.manifests import workers
from baton_operator.manifests.model_files import PIN_KEY
from baton_operator.manifests.objects import Manifest, Owner, owned, seconds
from baton_operator.manifests.revision import Blueprint, Revision
from baton_operator.rollout.decision import RevisionState, RoleName, RoleState
from baton_operator.rollout.model_fetch import PROOF, Proof

REVISION_KEY = "generation.json"


def known_revisions(cluster: ClusterState) -> dict[str, Revision]:
    """Return the revisions that have a ConfigMap, by name."""
    stored = [
        Revision.model_validate(
            {**json.loads(one["data"][REVISION_KEY]), "name": one["metadata"]["labels"][labels.REVISION]}
        )
        for one in cluster.of_kind("ConfigMap")
        if REVISION_KEY in one.get("data", {})
    ]
    return {revision.name: revision for revision in stored}


def wanted_revision(
    cluster: ClusterState,
    spec: InferenceServiceSpec,
    revisions: Mapping[str, Revision],
    image: str,
    router_image: str,
    now: float,
) -> Revision:
    """Return the existing or new revision of the spec. Raises ValueError if rollbackTo names an unknown one.
    `image`: default image of the engine. `router_image`: image of routers, which downloads models
    for engines whose images cannot. It is small.
    """
    if (name := spec.rollout.rollback_to) is not None:
        if name in revisions:
            return revisions[name]
        existing = ", ".join(sorted(revisions)) or "none"
        raise ValueError(f"Invalid spec.rollout.rollbackTo: {name}. Stored revisions: {existing}.")
    blueprint = Blueprint.of(cluster.owner.name, spec)
    digest = blueprint.digest
    same = [revision for revision in revisions.values() if revision.blueprint.digest == digest]
    if not same:
        fetch_image = "" if spec.engine.type == "Baton" else router_image
        return Revision(blueprint=blueprint, image=image, fetch_image=fetch_image, created=now, name=digest)
    # Operators with other hashes may have created equal revisions. Keep the one that serves.
    return max(same, key=lambda one: (_note(cluster, one.name).get("weight", 0), one.created))


def revision_config_map(cluster: ClusterState, revision: Revision, proof: Proof | None) -> Manifest:
    """Return the ConfigMap that stores a revision and the proof that its model was fetched."""
    owner = cluster.owner
    name = names.revision_config_map(owner.name, revision.name)
    before = cluster.find("v1", "ConfigMap", name)
    # The data is immutable, and another version of the operator might serialize it differently.
    data = (
        before["data"]
        if before
        else {REVISION_KEY: revision.model_dump_json(by_alias=True, exclude_defaults=True)}
    )
    labels_ = {**names.of_service(owner.name), labels.REVISION: revision.name}
    annotations = {PROOF: proof.text} if proof else None
    return owned(owner, "v1", "ConfigMap", name, {"data": data, "immutable": True}, labels_, annotations)


def model_pin(owner: Owner, revision: Revision, commit: str) -> Manifest:
    """Return the ConfigMap with the commit that all pods of a revision fetch."""
    name = names.model_pin(owner.name, revision.name)
    labels_ = {**names.of_service(owner.name), labels.REVISION: revision.name}
    return owned(owner, "v1", "ConfigMap", name, {"data": {PIN_KEY: commit}}, labels_)


def role_names(revision: Revision) -> dict[RoleName, Role]:
    """Return the roles of a revision by their names in the spec."""
    return {"prefill" if role is Role.PREFILL else "decode": role for role in revision.blueprint.roles}


def revision_state(cluster: ClusterState, revision: Revision, now: float) -> RevisionState:
    """Return the state of a revision, from its objects and its entry in the last status."""
    note = _note(cluster, revision.name)
    pods = [pod for pod in cluster.pods if pod.revision == revision.name and not pod.finished]
    roles: dict[RoleName, RoleState] = {}
    for name, role in role_names(revision).items():
        existing = cluster.find(*workers.workload_key(cluster.owner, revision, role))
        replicas = existing["spec"].get("replicas", 1) if existing else 0
        # One pod of each worker: the first, where a worker has several nodes.
        of_role = [pod for pod in pods if pod.role == role and not pod.follower]
        ready = _ready(of_role)
        if workers.is_group(revision.blueprint.roles[role]):
            # A first node may be ready while another one is not.
            ready = min(ready, (existing or {}).get("status", {}).get("readyReplicas", 0))
        roles[name] = RoleState(replicas, ready, len(of_role))
    one = RevisionState(revision.name, revision.created, roles, note.get("weight", 0))
    ready = sum(role.ready for role in roles.values())
    begins = one.waiting and note.get("settled", True)
    goes_on = begins or ready > note.get("peak", 0) or not note
    return replace(
        one,
        failed=note.get("phase") == "Failed",
        failure=note.get("failure", ""),
        progressed=now if goes_on else seconds(note["progressedAt"]),
        restarts=max((pod.restarts for pod in pods), default=0),
        health=cluster.health.get(revision.name, RolloutHealth()),
        step=note.get("step", 0),
        step_since=seconds(note["stepSince"]) if "stepSince" in note else None,
    )


def ready_peak(cluster: ClusterState, one: RevisionState) -> int:
    """Return the highest number of its workers that were ready at once."""
    before: int = _note(cluster, one.revision).get("peak", 0)
    return max(before, sum(role.ready for role in one.roles.values()))


def _note(cluster: ClusterState, revision: str) -> dict[str, Any]:
    """Return the entry of a revision in the last status."""
    notes: Sequence[dict[str, Any]] = cluster.status.get("revisions", ())
    return next((note for note in notes if note["name"] == revision), {})


def _ready(pods: Sequence[Pod]) -> int:
    return sum(pod.ready and not pod.terminating for pod in pods)
