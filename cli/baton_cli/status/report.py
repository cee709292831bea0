"""What there is to say of a service, wherever it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton_api.workers import Role


@dataclass(frozen=True, slots=True)
class Part:
    """Something that the service is made of, or a statement about it."""

    kind: str
    """Such as `decode worker`, `generation`, `condition`."""
    name: str
    state: str
    well: bool | None
    """None: neither good nor bad."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that is wrong."""

    what: str
    way_out: str


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """One service."""

    name: str
    serving: bool
    """Whether requests are answered."""
    summary: str
    """How it is, in a sentence."""
    url: str = ""
    parts: tuple[Part, ...] = ()
    troubles: tuple[Trouble, ...] = ()

    @property
    def well(self) -> bool:
        """Whether requests are answered and nothing is wrong."""
        return self.serving and not self.troubles


WELL = frozenset({"ready", "on_trial", "full"})
PASSING = frozenset({"starting", "draining"})

WORKER_REMEDIES = {
    "down": "See that its process runs, and that the router reaches its address: curl http://{worker}/health.",
    "not_ready": "Its log says what it waits for: http://{worker}/ready.",
    "ejected": "Its log says why requests fail on it; it is tried again by itself.",
}


def status_of_router(
    url: str, info: Mapping[str, Any], workers: Sequence[Mapping[str, Any]]
) -> ServiceStatus:
    """`info` is what `GET /server_info` says, `workers` what `GET /workers` does."""
    refusal = "" if info["status"] == "ready" else str(info["status"])
    models = ", ".join(one["id"] for one in info["models"]) or "no model"
    parts = tuple(map(_part, workers))
    troubles = [
        Trouble(
            f"The {one['role']} worker {one['worker']} is {one['state']}"
            + (f": {one['reason']}." if one["reason"] else "."),
            WORKER_REMEDIES[one["state"]].format(worker=one["worker"]),
        )
        for one in workers
        if one["state"] in WORKER_REMEDIES
    ]
    asked_for = {one["role"] for one in workers}
    able = {one["role"] for one in workers if one["state"] in WELL}
    if Role.PREFILL in asked_for and Role.PREFILL not in able:
        troubles.append(
            Trouble(
                "No prefill worker takes requests, so that decode workers compute all prompts themselves.",
                "Start one, or mend those that are there; the router finds it by itself.",
            )
        )
    if refusal:
        way_out = "Start a worker, or mend those that are there." if workers else "Give the router workers."
        troubles.insert(0, Trouble(refusal, way_out))
    return ServiceStatus(
        name=models,
        serving=not refusal,
        summary=refusal or f"Requests are answered; Baton {info['version']}.",
        url=f"{url}/v1",
        parts=parts,
        troubles=tuple(troubles),
    )


def _part(row: Mapping[str, Any]) -> Part:
    load = row["load"] or {}
    said = [f"{load.get('running', 0)} running, {load.get('queued', 0)} waiting"] if load else []
    if row["revision"]:
        said.append(f"generation {row['revision']}")
    if row["reason"]:
        said.append(row["reason"])
    state = row["state"]
    well = True if state in WELL else None if state in PASSING else False
    return Part(f"{row['role']} worker", row["worker"], state, well, "; ".join(said))


GOOD = frozenset(
    {
        *("Ready", "Available", "ModelReady", "PrefillReady", "DecodeReady", "RouterReady", "SpecSupported"),
        "ExposureReady",
    }
)
"""Conditions that should be true."""

BAD = frozenset({"Degraded", "Failed", "ScalingLimited"})
"""Conditions that should not."""

ROLES = ("prefill", "decode", "router")

INTENDED = frozenset({"Suspended", "ScaledToZero"})
"""Reasons for not being ready that somebody wanted."""

CONDITION_REMEDIES = {
    "Suspended": 'Let it run: kubectl patch bsvc {name} --type=merge -p \'{{"spec": {{"suspend": false}}}}\'',
    "Invalid": "Change the spec as the message says, and apply it again.",
    "ModelMissing": "See how far fetching is: kubectl get jobs,pods -l baton.dev/service={name}.",
    "RolledBack": "Correct the spec: the previous revision serves now.",
    "ApiMissing": "Install what it names in the cluster, or take the field out of the spec.",
}
LOOK = (
    "Look at its pods and events: kubectl describe pods -l baton.dev/service={name}; "
    "kubectl events --for bsvc/{name}."
)

POD_REMEDIES = {
    "ImagePullBackOff": "Check the image's name and spec.security.imagePullSecrets.",
    "ErrImagePull": "Check the image's name and spec.security.imagePullSecrets.",
    "CrashLoopBackOff": "Read what it said last: kubectl logs {pod} --previous.",
    "OOMKilled": "Give the role more memory, or say less with spec.engine.kvCache.",
    "Unschedulable": "Free or add what the message names, or ask for less in the role's resources.",
    "CreateContainerConfigError": "Make the Secret or ConfigMap that the message names.",
}


def status_of_service(service: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> ServiceStatus:
    """`pods` are those of the service."""
    name = service["metadata"]["name"]
    status = service.get("status") or {}
    conditions = {one["type"]: one for one in status.get("conditions") or ()}
    ready = conditions.get("Ready")
    troubles = list(_troubles(name, service, status, conditions))
    for pod in pods:
        troubles += _of_pod(pod)
    parts = (*_roles(status), *_generations(status), *map(_condition, conditions.values()))
    said = f"{ready['reason']}: {ready['message']}" if ready else "The operator has not looked at it yet."
    return ServiceStatus(
        name=f"{service['metadata'].get('namespace', '')}/{name}",
        serving=ready is not None and ready["status"] == "True",
        summary=said,
        url=status.get("url") or "",
        parts=parts,
        troubles=tuple(troubles),
    )


def _troubles(
    name: str, service: Mapping[str, Any], status: Mapping[str, Any], conditions: Mapping[str, Any]
) -> Iterator[Trouble]:
    generation = service["metadata"].get("generation", 0)
    if not conditions or status.get("observedGeneration", 0) < generation:
        yield Trouble(
            f"The operator has seen generation {status.get('observedGeneration', 0)} of {generation}.",
            "See that an operator runs: kubectl get pods -A -l app.kubernetes.io/name=baton.",
        )
    for condition in conditions.values():
        kind, reason = condition["type"], condition["reason"]
        wrong = condition["status"] != "True" if kind in GOOD else condition["status"] == "True"
        if kind not in GOOD | BAD or not wrong or reason in INTENDED:
            continue
        if kind == "Available":
            continue  # Ready says the same, with what to do
        if kind == "Ready" and any(
            conditions.get(other, {}).get("status") == "False" for other in GOOD - {"Ready", "Available"}
        ):
            continue  # what is missing says so itself
        yield Trouble(
            f"{kind} is {condition['status']} ({reason}). {condition['message']}".rstrip(),
            CONDITION_REMEDIES.get(reason, LOOK).format(name=name),
        )


def _of_pod(pod: Mapping[str, Any]) -> Iterator[Trouble]:
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("reason") == "Unschedulable":
            yield _pod_trouble(name, "Unschedulable", condition.get("message", ""))
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting") or {}
        ended = (container.get("lastState") or {}).get("terminated") or {}
        if ended.get("reason") == "OOMKilled":
            yield _pod_trouble(name, "OOMKilled", f"killed {container.get('restartCount', 1)} times")
        elif waiting.get("reason") in POD_REMEDIES:
            yield _pod_trouble(name, waiting["reason"], waiting.get("message", ""))


def _pod_trouble(pod: str, reason: str, message: str) -> Trouble:
    said = f": {message[:300].rstrip('.')}" if message else ""
    return Trouble(f"The pod {pod} is not well ({reason}){said}.", POD_REMEDIES[reason].format(pod=pod))


def _roles(status: Mapping[str, Any]) -> Iterator[Part]:
    for role in ROLES:
        there = status.get(role)
        if there is not None:
            ready, desired = there.get("ready", 0), there.get("desired", 0)
            what = "routers" if role == "router" else f"{role} workers"
            yield Part(
                "role", what, f"{ready} of {desired} ready", ready >= desired, there.get("message", "")
            )


def _generations(status: Mapping[str, Any]) -> Iterator[Part]:
    for one in status.get("revisions") or ():
        said = f"{one.get('weight', 0)} % of the requests, {one.get('prefillReady', 0)} prefill and "
        said += f"{one.get('decodeReady', 0)} decode workers ready"
        if one.get("message"):
            said += f"; {one['message']}"
        well = {"Serving": True, "Failed": False}.get(one["phase"])
        yield Part("generation", one["name"], one["phase"], well, said)


def _condition(condition: Mapping[str, Any]) -> Part:
    kind, status = condition["type"], condition["status"]
    well = status == "True" if kind in GOOD else status != "True" if kind in BAD else None
    said = ": ".join(filter(None, (condition["reason"], condition["message"])))
    return Part("condition", kind, status, well, said)
