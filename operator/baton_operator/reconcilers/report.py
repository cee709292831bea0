"""Status: what a plan knows of a service, in the words of its status, and what is worth an Event."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from baton_operator import names
from baton_operator.cluster.state import ClusterState, Pod, pod_creation_failure
from baton_operator.manifests import exposure, workers
from baton_operator.manifests.conditions import Fact, Transition, written
from baton_operator.manifests.objects import Manifest, timestamp
from baton_operator.reconcilers.plan import ServiceState
from baton_operator.rollout import revision_history
from baton_operator.rollout.decision import RevisionPlan, RevisionState, RoleName
from baton_operator.scaling import role_scalers

Status = dict[str, Any]


def service_status(
    cluster: ClusterState, state: ServiceState, now: float, unmet: str = ""
) -> tuple[Status, list[Transition]]:
    """
    The whole status, and what has changed of its conditions.

    `unmet` says what the API server refuses of the spec, without which the service does well.
    """
    owner, spec = cluster.owner, state.spec
    facts = _facts(cluster, state, unmet)
    before = cluster.status.get("conditions", ())
    conditions, transitions = written(facts, before, cluster.generation, now)
    roles: Status = {name: _role(cluster, state, name) for name in role_scalers.roles(spec)}
    roles["router"] = _router(cluster, state)
    files = workers.files(owner, state.wanted)
    status = {
        "observedGeneration": cluster.generation,
        "url": _url(cluster, state),
        "modelName": state.wanted.blueprint.served_names[0],
        "conditions": conditions,
        **roles,
        **{f"{name}Summary": _summary(role) for name, role in roles.items()},
        "currentRevision": _current(state),
        "updateRevision": state.wanted.revision,
        "revisions": _revisions(cluster, state),
        "model": {
            "cacheClaim": files.claim,
            "downloadJob": files.job_name if files.job_needed else "",
            "resolvedRevision": state.model.revision,
        },
        "autoscaling": _autoscaling(cluster, state),
    }
    return status, transitions


def rejected_status(cluster: ClusterState, error: ValueError, now: float) -> tuple[Status, list[Transition]]:
    """The status of a service whose spec cannot be carried out: what serves, serves."""
    before = cluster.status.get("conditions", ())
    changed = [
        Fact("SpecSupported", False, "Invalid", str(error)),
        Fact("Ready", False, "Invalid", str(error)),
    ]
    kept = [one for one in before if one["type"] not in ("SpecSupported", "Ready")]
    conditions, transitions = written(changed, before, cluster.generation, now)
    return {**cluster.status, "conditions": [*conditions, *kept]}, transitions


def _facts(cluster: ClusterState, state: ServiceState, unmet: str) -> list[Fact]:
    ready = {name: _ready(state, name) for name in role_scalers.roles(state.spec)}
    routers = sum(pod.ready for pod in cluster.pods if pod.role == names.ROUTER)
    failed = [fate for fate in state.fates.values() if fate.phase == "Failed"]
    facts = [
        _readiness(state, routers),
        _progress(cluster, state),
        _degradation(cluster, state, failed),
        Fact("ModelReady", state.model.present, state.model.phase, state.model.message),
    ]
    for name, count in ready.items():
        enough = count >= state.targets[name]
        message = f"{count} of {state.targets[name]} are ready."
        facts.append(
            Fact(f"{name.capitalize()}Ready", enough, "AllReady" if enough else "SomeMissing", message)
        )
    facts.append(Fact("RouterReady", routers > 0, "SomeReady" if routers else "NoneReady"))
    if state.spec.exposure.type == "HTTPRoute":
        route = cluster.find(exposure.GATEWAY_API, "HTTPRoute", cluster.owner.name)
        facts.append(exposure.route_fact(cluster.owner, state.spec.exposure, route))
    if state.unsupported:
        message = (
            f"The cluster has no {' and no '.join(state.unsupported)}: install it, or ask for none of it."
        )
        facts.append(Fact("SpecSupported", False, "ApiMissing", message))
    elif unmet:
        facts.append(Fact("SpecSupported", False, "ClaimRefused", unmet))
    else:
        facts.append(Fact("SpecSupported", True, "Supported"))
    return [*facts, _scaling(cluster, state), _limit(cluster, state)]


def _url(cluster: ClusterState, state: ServiceState) -> str:
    wanted = state.spec.exposure
    if wanted.type == "HTTPRoute":
        return exposure.route_url(cluster.owner, wanted, cluster.gateways)
    return exposure.service_url(cluster.owner, wanted)


def _readiness(state: ServiceState, routers: int) -> Fact:
    if state.spec.suspend:
        return Fact("Ready", False, "Suspended", "spec.suspend is true.")
    serving = _current(state)
    if not any(state.targets.values()):
        return Fact("Ready", False, "ScaledToZero", "No worker is wanted now.")
    if not routers:
        return Fact("Ready", False, "NoRouter", "No router is ready.")
    settled = serving == state.wanted.revision or state.fates[state.wanted.revision].phase == "Failed"
    if settled and (name := _lacking(state, serving)):
        return Fact("Ready", False, f"No{name.capitalize()}", f"No {name} worker is ready.")
    if serving == state.wanted.revision:
        return Fact("Ready", True, "Serving", f"Requests are answered by the revision {serving}.")
    if not serving:
        reason = "ModelMissing" if not state.model.present else "NoDecode"
        return Fact("Ready", False, reason, "Nobody serves yet.")
    message = f"Requests are answered by the revision {serving}; {state.wanted.revision} is not ready yet."
    return Fact("Ready", False, "RollingOut", message)


def _lacking(state: ServiceState, serving: str) -> RoleName | None:
    """A role of which the revision that serves has no ready worker, although some are wanted."""
    roles = next((one.roles for one in state.seen if one.revision == serving), {})
    for name in role_scalers.roles(state.spec):
        if state.targets[name] and (name not in roles or not roles[name].ready):
            return name
    return None


def _progress(cluster: ClusterState, state: ServiceState) -> Fact:
    fate = state.fates[state.wanted.revision]
    if fate.phase == "Failed":
        return Fact("Progressing", False, "RolloutFailed", f"The revision {fate.revision} failed.")
    if state.spec.rollout.paused and fate.phase != "Serving":
        return Fact("Progressing", False, "Paused", "spec.rollout.paused is true.")
    if not state.model.present:
        fetching = state.model.phase == "Fetching"
        reason = "FetchingModel" if fetching else "FetchFailed"
        return Fact("Progressing", fetching, reason, state.model.message)
    whole = all(_ready(state, name) >= count for name, count in state.targets.items() if count)
    if fate.phase == "Serving" and whole:
        return Fact("Progressing", False, "Complete", "All that is wanted is there.")
    of_it = [names.worker(cluster.owner.name, role, fate.revision) for role in state.wanted.blueprint.roles]
    if rejected_status := _refused(cluster, of_it):
        return Fact("Progressing", True, "PodsRefused", rejected_status[0])
    if trouble := _trouble([pod for pod in cluster.pods if pod.revision == fate.revision]):
        unschedulable = any(one.startswith("Unschedulable") for one in trouble)
        return Fact(
            "Progressing", True, "InsufficientCapacity" if unschedulable else "PodTrouble", trouble[0]
        )
    return Fact("Progressing", True, "RollingOut", f"The revision {fate.revision} is getting ready.")


def _degradation(cluster: ClusterState, state: ServiceState, failed: Sequence[RevisionPlan]) -> Fact:
    if state.wanted.revision in {fate.revision for fate in failed}:
        fate = state.fates[state.wanted.revision]
        cause = fate.reason or revision_history.failure_reason(cluster, fate.revision)
        why = f": {cause}" if cause else ""
        message = f"The revision {fate.revision} failed{why}. Change the spec to try another one."
        return Fact("Degraded", True, "RolledBack", message)
    if state.model.phase == "Failed":
        return Fact("Degraded", True, "FetchFailed", state.model.message)
    return Fact("Degraded", False, "AsExpected")


def _refused(cluster: ClusterState, deployments: Iterable[str]) -> list[str]:
    """Why pods of these Deployments cannot even be made, if they cannot."""
    there = [cluster.find("apps/v1", "Deployment", name) for name in deployments]
    return sorted(filter(None, map(pod_creation_failure, there)))


def _trouble(pods: Sequence[Pod]) -> list[str]:
    """What is in the way of these pods, of which some are missing. An old eviction explains nothing new."""
    present = {pod.trouble for pod in pods if pod.trouble and not pod.finished}
    ended = {pod.trouble for pod in pods if pod.trouble and pod.finished}
    return sorted(present or ended)


def _scaling(cluster: ClusterState, state: ServiceState) -> Fact:
    mode = state.spec.autoscaling.mode
    if mode != "Internal":
        return Fact("ScalingActive", mode == "External", mode)
    said = _said(cluster, state)
    if not said:
        return Fact("ScalingActive", False, "NotScaled", "No role has scaling.")
    for name, one in said.items():
        if one is None:
            return Fact("ScalingActive", False, "Starting", f"Nothing was decided yet of {name}.")
        if one["source"] != "Measured":
            return Fact("ScalingActive", False, one["reason"], f"{name}: {one.get('message', '')}")
    words = ", ".join(f"{name} {one['reason']}" for name, one in said.items() if one)
    return Fact("ScalingActive", True, "Measured", f"{words}.")


def _limit(cluster: ClusterState, state: ServiceState) -> Fact:
    """What keeps a role from having what it needs."""
    for name, one in _said(cluster, state).items():
        if one and one.get("limited"):
            return Fact("ScalingLimited", True, one["limited"], f"{name}: {one.get('message', '')}")
    return Fact("ScalingLimited", False, "NotLimited")


def _said(cluster: ClusterState, state: ServiceState) -> dict[RoleName, Mapping[str, Any] | None]:
    """What the autoscaler has last said of each role that it scales; None if nothing yet."""
    if state.spec.autoscaling.mode == "Disabled":
        return {}
    said: dict[RoleName, Mapping[str, Any] | None] = {}
    for name, role in role_scalers.roles(state.spec).items():
        if role.scaling is not None:
            there = cluster.find(role_scalers.API, role_scalers.KIND, names.role(cluster.owner.name, name))
            said[name] = there.get("status", {}).get("scaling") if there else None
    return said


def _autoscaling(cluster: ClusterState, state: ServiceState) -> Status:
    fact = _scaling(cluster, state)
    return {"active": bool(fact.true), "reason": fact.reason}


def _ready(state: ServiceState, name: RoleName) -> int:
    return sum(one.roles[name].ready for one in state.seen if name in one.roles)


def _role(cluster: ClusterState, state: ServiceState, name: RoleName) -> Status:
    there = [one.roles[name] for one in state.seen if name in one.roles]
    new = next(one for one in state.seen if one.revision == state.wanted.revision)
    labels = {"decode": ("decode", "both")}.get(name, (name,))
    deployments = [
        names.worker(cluster.owner.name, role, revision)
        for revision, one in state.generations.items()
        for role in one.blueprint.roles
        if role in labels
    ]
    pods = [pod for pod in cluster.pods if pod.role in labels]
    ready = sum(role.ready for role in there)
    return {
        "desired": state.targets[name],
        "replicas": sum(role.pods for role in there),
        "ready": ready,
        "updated": new.roles[name].ready if name in new.roles else 0,
        "reason": _in_the_way(cluster, deployments, pods, whole=ready >= state.targets[name]),
    }


def _in_the_way(
    cluster: ClusterState, deployments: Iterable[str], pods: Sequence[Pod], *, whole: bool
) -> str:
    if whole:
        pods = [pod for pod in pods if not pod.finished]
    return next(iter([*_refused(cluster, deployments), *_trouble(pods)]), "")[:1024]


def _router(cluster: ClusterState, state: ServiceState) -> Status:
    pods = [pod for pod in cluster.pods if pod.role == names.ROUTER]
    ready = sum(pod.ready and not pod.terminating for pod in pods)
    desired = 0 if state.spec.suspend else state.spec.router.replicas
    deployments = [names.router(cluster.owner.name)]
    return {
        "desired": desired,
        "replicas": sum(not pod.finished for pod in pods),
        "ready": ready,
        "updated": ready,
        "reason": _in_the_way(cluster, deployments, pods, whole=ready >= desired),
    }


def _summary(role: Status) -> str:
    return f"{role['ready']}/{role['desired']}"


def _current(state: ServiceState) -> str:
    """The revision that gets most requests and can serve; empty if there is none."""
    weights = {name: fate.weight for name, fate in state.fates.items() if fate.weight}
    serving = [one for one in state.seen if one.revision in weights and one.share(state.targets) > 0]
    return max(serving, key=lambda one: weights[one.revision]).revision if serving else ""


def _revisions(cluster: ClusterState, state: ServiceState) -> list[Status]:
    """The revisions that are there or remembered, the newest first."""
    known = [one for one in state.seen if one.revision in state.generations]
    newest = sorted(known, key=lambda one: (one.created, one.revision), reverse=True)
    return [_revision(cluster, one, state.fates[one.revision]) for one in newest]


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
        "reason": fate.reason
        or (revision_history.failure_reason(cluster, one.revision) if fate.phase == "Failed" else ""),
    }
    return {**status, "stepSince": timestamp(fate.step_since)} if fate.step_since is not None else status


def scaler_status(scaler: Manifest, state: ServiceState | None, now: float) -> dict[str, Any]:
    """
    The whole status. `state` is where the service stands, None if there is no service or it cannot be
    carried out.
    """
    spec, metadata = scaler["spec"], scaler["metadata"]
    service, role = spec["serviceName"], spec["role"]
    label = "both" if role == "decode" and state and state.spec.prefill is None else role
    selecting = names.selecting(service, label)
    before = scaler.get("status", {}).get("conditions", ())
    conditions, _ = written([_bound(scaler, state)], before, metadata.get("generation", 0), now)
    there = [one.roles[role] for one in state.seen if role in one.roles] if state else []
    scaled = state is not None and state.spec.autoscaling.mode != "Disabled"
    kept = ("scaling",) if scaled else ()
    return {
        # The autoscaler's to write.
        **{name: value for name, value in scaler.get("status", {}).items() if name in kept},
        "replicas": sum(one.pods for one in there),
        "selector": ",".join(f"{name}={value}" for name, value in sorted(selecting.items())),
        "conditions": conditions,
    }


def _bound(scaler: Manifest, state: ServiceState | None) -> Fact:
    service, role = scaler["spec"]["serviceName"], scaler["spec"]["role"]
    named = names.role(service, role)
    if state is None:
        return Fact("Bound", False, "NoService", f"There is no InferenceService {service} that can be run.")
    if scaler["metadata"]["name"] != named:
        return Fact("Bound", False, "OtherName", f"{service} listens to the RoleScaler {named}.")
    there = role_scalers.roles(state.spec).get(role)
    if there is None or there.scaling is None:
        message = f"{service} has no spec.{role}.scaling, so that its own number of replicas holds."
        return Fact("Bound", False, "NotScaled", message)
    return Fact("Bound", True, "Bound")
