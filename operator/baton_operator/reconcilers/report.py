"""The status of an InferenceService: conditions, counts and revisions, from its plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from baton_operator import names
from baton_operator.cluster.state import ClusterState, Pod, pod_creation_failure
from baton_operator.manifests import exposure, workers
from baton_operator.manifests.objects import (
    Fact,
    Key,
    Manifest,
    Transition,
    by_type,
    timestamp,
    updated,
    written,
)
from baton_operator.manifests.workers import GROUP_API, GROUP_KIND, INSTALLATION, LEADER, WORKER_INDEX
from baton_operator.reconcilers.plan import ServiceState
from baton_operator.rollout import revision_history
from baton_operator.rollout.decision import RevisionPlan, RevisionState, RoleName
from baton_operator.scaling import roles
from baton_operator.scaling.roles import worker_roles

Status = dict[str, Any]


def service_status(
    cluster: ClusterState, state: ServiceState, now: float, unmet: str = ""
) -> tuple[Status, list[Transition]]:
    """
    Return the whole status, and the conditions that changed.

    `unmet`: an object that the API server rejected and without which the service works.
    """
    statuses: Status = {name: _role(state, name) for name in worker_roles(state.spec)}
    statuses["router"] = _router(cluster, state)
    facts = _facts(cluster, state, statuses, unmet)
    before = cluster.status.get("conditions", ())
    conditions, transitions = written(facts, before, cluster.generation, now)
    files = workers.files(cluster.owner, state.target)
    status = {
        "observedGeneration": cluster.generation,
        "url": _url(cluster, state),
        "modelName": state.target.blueprint.served_names[0],
        "conditions": conditions,
        **statuses,
        "currentRevision": _current(state),
        "updateRevision": state.target.name,
        "revisions": _revisions(cluster, state),
        "model": {
            "cacheClaim": files.claim,
            "downloadJob": files.job_name if files.job_needed else "",
            "resolvedRevision": state.model.revision,
        },
    }
    return status, transitions


def rejected_status(cluster: ClusterState, error: ValueError, now: float) -> tuple[Status, list[Transition]]:
    """Return the status of a service whose spec the operator refuses. Workers that serve continue."""
    before = cluster.status.get("conditions", ())
    serving = _still_serving(cluster)
    reason = "SpecRefused" if serving else "Invalid"
    message = f"An earlier spec is served. This one is refused: {error}" if serving else str(error)
    changed = [
        Fact("SpecSupported", False, "Invalid", str(error)),
        Fact("Ready", serving, reason, message),
        Fact("Available", serving, reason, message),
    ]
    conditions, transitions = written(changed, before, cluster.generation, now)
    status = {"observedGeneration": cluster.generation, "conditions": updated(before, conditions)}
    return {**cluster.status, **status}, transitions


def _still_serving(cluster: ClusterState) -> bool:
    """Whether routers and workers of the current revision are ready, without a plan."""
    current = cluster.status.get("currentRevision")
    ready = {
        pod.role
        for pod in cluster.pods
        if pod.ready and not pod.terminating and pod.revision in (current, "")
    }
    return names.ROUTER in ready and ("both" in ready or {"prefill", "decode"} <= ready)


def _facts(cluster: ClusterState, state: ServiceState, roles: Status, unmet: str) -> list[Fact]:
    routers = sum(pod.ready for pod in cluster.pods if pod.role == names.ROUTER)
    facts = [
        *_readiness(state, routers),
        _progress(cluster, state),
        _degradation(state),
        Fact("ModelReady", state.model.present, state.model.phase, state.model.message),
    ]
    for name in worker_roles(state.spec):
        message, enough = _pods_message(cluster, state, name, roles[name])
        reason = "AllReady" if enough else "SomeMissing"
        facts.append(Fact(f"{name.capitalize()}Ready", enough, reason, message))
    message, enough = _pods_message(cluster, state, "router", roles["router"])
    reason = "NoneReady" if not routers else "AllReady" if enough else "SomeReady"
    facts.append(Fact("RouterReady", routers > 0, reason, message))
    if state.spec.exposure.type == "HTTPRoute":
        route = cluster.find(exposure.GATEWAY_API, "HTTPRoute", cluster.owner.name)
        facts.append(exposure.route_fact(cluster.owner, state.spec.exposure, route))
    if state.unsupported:
        facts.append(Fact("SpecSupported", False, "ApiMissing", _missing(state)))
    elif unmet:
        facts.append(Fact("SpecSupported", False, "ClaimRefused", unmet))
    else:
        facts.append(Fact("SpecSupported", True, "Supported"))
    return [*facts, _scaling(cluster, state), _limit(cluster, state)]


def _missing(state: ServiceState) -> str:
    """Return which APIs the cluster lacks, and what to do."""
    missing = " and ".join(state.unsupported)
    message = f"The cluster does not serve {missing}. Install it, or remove the fields that need it."
    if GROUP_API in state.unsupported:
        message += f" Workers with parallelism.nodes above 1 need {GROUP_KIND}: see {INSTALLATION}."
    return message


def _url(cluster: ClusterState, state: ServiceState) -> str:
    wanted = state.spec.exposure
    if wanted.type == "HTTPRoute":
        return exposure.route_url(cluster.owner, wanted, cluster.gateways)
    return exposure.service_url(cluster.owner, wanted)


def _readiness(state: ServiceState, routers: int) -> list[Fact]:
    """
    Ready and Available.

    They differ at zero: no worker is available, but a request waits for one and is answered.
    """
    now = _availability(state, routers)
    ready = replace(now, type="Ready")
    timeout = state.spec.router.scale_from_zero_timeout
    if now.reason == "ScaledToZero" and routers and timeout.seconds:
        message = f"Scaled to zero. A request waits up to {timeout} for the first worker."
        ready = Fact("Ready", True, "ScaledToZero", message)
    return [ready, now]


def _availability(state: ServiceState, routers: int) -> Fact:
    if state.spec.suspend:
        return Fact("Available", False, "Suspended", "spec.suspend is true.")
    if not any(state.targets.values()):
        return Fact("Available", False, "ScaledToZero", "The desired number of workers is 0.")
    wanted, serving = state.target.name, _current(state)
    no_router = Fact("Available", False, "NoRouter", "No router is ready.")
    if serving and not routers:
        return no_router
    if serving == wanted:
        return Fact("Available", True, "Serving", f"Revision {serving} serves requests.")
    if serving:
        failed = state.revision_plans[wanted].phase == "Failed"
        message = (
            f"Revision {serving} serves requests; {wanted} {'failed' if failed else 'is not ready yet'}."
        )
        return Fact("Available", True, "RolledBack" if failed else "RollingOut", message)
    if not state.model.present:
        return Fact("Available", False, "ModelMissing", state.model.message)
    if GROUP_API in state.unsupported:
        return Fact("Available", False, "ApiMissing", _missing(state))
    # Routers become ready with the first workers, so missing workers are the cause.
    name = _lacking(state, wanted)
    if name is None and not routers:
        return no_router
    name = name or "decode"
    return Fact("Available", False, f"No{name.capitalize()}", f"No {name} worker is ready.")


def _lacking(state: ServiceState, revision: str) -> RoleName | None:
    """A role without a ready worker in this revision, although some are desired."""
    roles = next((found.roles for found in state.seen if found.revision == revision), {})
    for name in worker_roles(state.spec):
        if state.targets[name] and (name not in roles or not roles[name].ready):
            return name
    return None


def _progress(cluster: ClusterState, state: ServiceState) -> Fact:
    fate = state.revision_plans[state.target.name]
    if fate.phase == "Failed":
        return Fact("Progressing", False, "RolloutFailed", f"{_failed(fate)}.")
    if state.spec.rollout.paused and fate.phase != "Serving":
        return Fact("Progressing", False, "Paused", "spec.rollout.paused is true.")
    if not state.model.present:
        fetching = state.model.phase == "Fetching"
        reason = "FetchingModel" if fetching else "FetchFailed"
        return Fact("Progressing", fetching, reason, state.model.message)
    if GROUP_API in state.unsupported:
        return Fact("Progressing", False, "ApiMissing", _missing(state))
    whole = all(_ready(state, name) >= count for name, count in state.targets.items() if count)
    if fate.phase == "Serving" and whole:
        return Fact("Progressing", False, "Complete", "All workers of the current revision are ready.")
    of_it = [workers.workload_key(cluster.owner, state.target, role) for role in state.target.blueprint.roles]
    if refused := _refused(cluster, of_it):
        return Fact("Progressing", True, "PodsRefused", refused[0])
    if trouble := _trouble([pod for pod in cluster.pods if pod.revision == fate.revision]):
        reason = "InsufficientCapacity" if trouble[0].startswith("Unschedulable") else "PodTrouble"
        return Fact("Progressing", True, reason, trouble[0])
    return Fact("Progressing", True, "RollingOut", f"Workers of revision {fate.revision} are starting.")


def _degradation(state: ServiceState) -> Fact:
    fate = state.revision_plans[state.target.name]
    if fate.phase == "Failed":
        message = f"{_failed(fate)}. Change the spec to start another rollout."
        return Fact("Degraded", True, "RolledBack", message)
    if state.model.phase == "Failed":
        return Fact("Degraded", True, "FetchFailed", state.model.message)
    return Fact("Degraded", False, "AsExpected")


def _failed(fate: RevisionPlan) -> str:
    return f"Revision {fate.revision} failed{f': {fate.failure}' if fate.failure else ''}"


def _refused(cluster: ClusterState, workloads: Iterable[Key]) -> list[str]:
    """Errors with which the API server rejects new pods of these Deployments."""
    existing = [cluster.find(*workload) for workload in workloads]
    return sorted(filter(None, map(pod_creation_failure, existing)))


def _trouble(pods: Sequence[Pod]) -> list[str]:
    """
    Problems of these pods. Those of finished pods count only without problems of running ones, and those of
    pods that are being deleted, such as the pods of a spec that was corrected, not at all.
    """
    troubled = [pod for pod in pods if pod.trouble and not pod.terminating]
    present = {pod.trouble for pod in troubled if not pod.finished}
    ended = {pod.trouble for pod in troubled if pod.finished}
    return sorted(present or ended)


def _scaling(cluster: ClusterState, state: ServiceState) -> Fact:
    mode = state.spec.autoscaling.mode
    if mode != "Internal":
        return Fact("ScalingActive", mode == "External", mode)
    decisions = _scaling_conditions(cluster, state, "ScalingActive")
    if not decisions:
        return Fact("ScalingActive", False, "NotScaled", "No role has scaling.")
    for name, decision in decisions.items():
        if decision is None:
            return Fact("ScalingActive", False, "Starting", f"The autoscaler has not decided on {name} yet.")
        if decision["status"] != "True":
            return Fact("ScalingActive", False, decision["reason"], f"{name}: {decision['message']}")
    words = ", ".join(f"{name} {decision['reason']}" for name, decision in decisions.items() if decision)
    return Fact("ScalingActive", True, "Measured", f"{words}.")


def _limit(cluster: ClusterState, state: ServiceState) -> Fact:
    """Whether a limit keeps a role below the number of workers that it needs, or that was requested."""
    for name, condition in _scaling_conditions(cluster, state, "ScalingLimited").items():
        if condition and condition["status"] == "True":
            return Fact("ScalingLimited", True, condition["reason"], f"{name}: {condition['message']}")
    for name, role in worker_roles(state.spec).items():
        scaler = _scaler(cluster, name)
        if role.scaling is None or scaler is None or state.spec.autoscaling.mode != "External":
            continue
        requested, most = scaler["spec"]["replicas"], role.scaling.max_replicas
        if requested > most:
            message = f"{name}: {requested} workers are requested, and scaling.maxReplicas is {most}."
            return Fact("ScalingLimited", True, "AtMaximum", message)
    return Fact("ScalingLimited", False, "NotLimited")


def _scaler(cluster: ClusterState, name: RoleName) -> Manifest | None:
    return cluster.find(roles.API, roles.KIND, names.role(cluster.owner.name, name))


def _scaling_conditions(
    cluster: ClusterState, state: ServiceState, type: str
) -> dict[RoleName, Mapping[str, Any] | None]:
    """The condition `type` of each role that the autoscaler scales; None before its first decision."""
    if state.spec.autoscaling.mode == "Disabled":
        return {}
    scaled = [name for name, role in worker_roles(state.spec).items() if role.scaling is not None]
    return {name: by_type(_scaler(cluster, name)).get(type) for name in scaled}


def _ready(state: ServiceState, name: RoleName) -> int:
    return sum(one.ready for one in state.of_role(name))


def _role(state: ServiceState, name: RoleName) -> Status:
    existing = state.of_role(name)
    new = next(found for found in state.seen if found.revision == state.target.name)
    return {
        "desiredReplicas": state.targets[name],
        "replicas": sum(role.pods for role in existing),
        "readyReplicas": sum(role.ready for role in existing),
        "updatedReplicas": new.roles[name].ready if name in new.roles else 0,
    }


def _router(cluster: ClusterState, state: ServiceState) -> Status:
    pods = [pod for pod in cluster.pods if pod.role == names.ROUTER]
    ready = sum(pod.ready and not pod.terminating for pod in pods)
    return {
        "desiredReplicas": 0 if state.spec.suspend else state.spec.router.replicas,
        "replicas": sum(not pod.finished for pod in pods),
        "readyReplicas": ready,
        "updatedReplicas": ready,
    }


def _pods_message(cluster: ClusterState, state: ServiceState, name: str, role: Status) -> tuple[str, bool]:
    """Return the number of ready pods with what keeps the others from it, and whether none is missing."""
    ready, desired = role["readyReplicas"], role["desiredReplicas"]
    labels = roles.labels_of(name)
    workloads: list[Key] = [
        workers.workload_key(cluster.owner, revision, role)
        for revision in state.revisions.values()
        for role in revision.blueprint.roles
        if role in labels
    ]
    if name == "router":
        workloads.append(("apps/v1", "Deployment", names.router(cluster.owner.name)))
    pods = [pod for pod in cluster.pods if pod.role in labels]
    if ready >= desired:
        pods = [pod for pod in pods if not pod.finished]
    problem = next(iter([*_refused(cluster, workloads), *_trouble(pods)]), "")
    return f"{ready}/{desired} ready{f': {problem}' if problem else ''}", ready >= desired


def _current(state: ServiceState) -> str:
    """The revision that receives most requests and can serve them; empty if no revision can."""
    weights = {name: fate.weight for name, fate in state.revision_plans.items() if fate.weight}
    serving = [found for found in state.seen if found.revision in weights and found.share(state.targets) > 0]
    return max(serving, key=lambda revision: weights[revision.revision]).revision if serving else ""


def _revisions(cluster: ClusterState, state: ServiceState) -> list[Status]:
    """Running revisions, and those kept for a rollback, newest first."""
    kept = [found for found in state.seen if found.revision in state.revisions]
    newest = sorted(kept, key=lambda revision: (revision.created, revision.revision), reverse=True)
    return [_revision(cluster, revision, state.revision_plans[revision.revision]) for revision in newest]


def _revision(cluster: ClusterState, one: RevisionState, fate: RevisionPlan) -> Status:
    status = {
        "name": one.revision,
        "phase": fate.phase,
        "weight": fate.weight,
        "prefillReady": one.roles["prefill"].ready if "prefill" in one.roles else 0,
        "decodeReady": one.roles["decode"].ready,
        "createdAt": timestamp(one.created),
        "progressedAt": timestamp(one.progressed),
        "settled": not one.waiting,
        "peak": revision_history.ready_peak(cluster, one),
        "step": fate.step,
    }
    if fate.failure:
        status["failure"] = fate.failure
    if fate.step_since is not None:
        status["stepSince"] = timestamp(fate.step_since)
    return status


def scaler_status(
    scaler: Manifest, state: ServiceState | None, now: float, *, scaled: bool, refused: str = ""
) -> dict[str, Any]:
    """
    Return the whole status of a RoleScaler.

    `state`: the state of its service; None if the service does not exist, or if its spec is refused:
    `refused` says why.
    `scaled`: whether the autoscaler writes there, too. What it wrote stays.
    """
    spec, metadata = scaler["spec"], scaler["metadata"]
    service, role = spec["serviceName"], spec["role"]
    label = "both" if role == "decode" and state and state.spec.prefill is None else role
    selecting = names.selecting(service, label)
    if state is not None and workers.is_group(worker_roles(state.spec).get(role, state.spec.decode)):
        selecting[WORKER_INDEX] = LEADER
    before = scaler.get("status", {})
    known = before.get("conditions", ())
    conditions, _ = written([_bound(scaler, state, refused)], known, metadata.get("generation", 0), now)
    status: Status = {}
    if scaled:
        conditions = updated(known, conditions)
        status = {name: before[name] for name in ("scaling",) if name in before}
    existing = state.of_role(role) if state else []
    return {
        **status,
        "replicas": sum(one.pods for one in existing),
        "selector": ",".join(f"{name}={value}" for name, value in sorted(selecting.items())),
        "conditions": conditions,
    }


def _bound(scaler: Manifest, state: ServiceState | None, refused: str) -> Fact:
    service, role = scaler["spec"]["serviceName"], scaler["spec"]["role"]
    named = names.role(service, role)
    if refused:
        message = f"The spec of the InferenceService {service} is refused: {refused}"
        return Fact("Bound", False, "ServiceInvalid", message)
    if state is None:
        return Fact("Bound", False, "NoService", f"The InferenceService {service} does not exist.")
    if scaler["metadata"]["name"] != named:
        return Fact("Bound", False, "OtherName", f"{service} uses the RoleScaler {named}.")
    existing = worker_roles(state.spec).get(role)
    if existing is None or existing.scaling is None:
        message = f"{service} has no spec.{role}.scaling: its spec.{role}.replicas applies."
        return Fact("Bound", False, "NotScaled", message)
    return Fact("Bound", True, "Bound")
