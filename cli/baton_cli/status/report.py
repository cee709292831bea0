"""The status of a service, as its router or the API server reports it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton_api.engines import EngineKind
from baton_api.workers import Role
from baton_cli.router_workers import reported_load


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the service, or one of its conditions."""

    kind: str
    """Such as `decode worker`, `revision` or `condition`."""
    name: str
    state: str
    well: bool | None
    """None: neither healthy nor broken."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem and its solution."""

    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The status of one service."""

    name: str
    serving: bool
    """Whether requests are answered."""
    summary: str
    """The status in one sentence."""
    url: str = ""
    parts: tuple[Part, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def well(self) -> bool:
        """Whether requests are answered and there are no problems."""
        return self.serving and not self.problems


WELL = frozenset({"ready", "half_open", "full"})
PASSING = frozenset({"starting", "draining"})

WORKER_REMEDIES = {
    "down": "Check that its process runs and that the router can reach it: curl http://{worker}/health.",
    "not_ready": "Its log and http://{worker}/ready show what it waits for.",
    "ejected": "Its log shows why requests fail. The router tries it again by itself.",
}

WARNING_REMEDY = "The worker serves. Restart it with other flags or another version, or list it elsewhere."


def status_of_router(
    url: str, info: Mapping[str, Any], workers: Sequence[Mapping[str, Any]]
) -> ServiceStatus:
    """Return the status by the responses of `GET /server_info` and `GET /workers`."""
    refusal = "" if info["status"] == "ready" else str(info["status"])
    models = ", ".join(model["id"] for model in info["models"]) or "no model"
    parts = tuple(map(_part, workers))
    problems = [
        Problem(
            f"The {row['role']} worker {_title(row)} is {row['state']}"
            + (f": {row['reason']}." if row["reason"] else "."),
            WORKER_REMEDIES[row["state"]].format(worker=row["worker"]),
        )
        for row in workers
        if row["state"] in WORKER_REMEDIES
    ]
    problems += [
        Problem(f"The {row['role']} worker {_title(row)}: {warning}.", WARNING_REMEDY)
        for row in workers
        for warning in row.get("warnings", ())
    ]
    configured = {row["role"] for row in workers}
    able = {row["role"] for row in workers if row["state"] in WELL}
    if Role.PREFILL in configured and Role.PREFILL not in able:
        problems.append(
            Problem(
                "No prefill worker is available, so decode workers compute all prompts.",
                "Start a prefill worker, or repair the existing ones. The router discovers them by itself.",
            )
        )
    if refusal:
        remedy = (
            "Start a worker, or repair the existing ones." if workers else "Configure workers for the router."
        )
        problems.insert(0, Problem(refusal, remedy))
    return ServiceStatus(
        name=models,
        serving=not refusal,
        summary=refusal or f"Requests are answered; Baton {info['version']}.",
        url=f"{url}/v1",
        parts=parts,
        problems=tuple(problems),
    )


def _part(row: Mapping[str, Any]) -> Part:
    load, engine = reported_load(row), (row["load"] or {}).get("engine", EngineKind.BATON)
    details = [f"{load.get('running', 0)} running, {load.get('queued', 0)} queued"] if load else []
    if engine != EngineKind.BATON:
        details = details or ["load unknown"]
        details.append(f"{engine} {row['load'].get('version') or 'of unknown version'}")
    if row["revision"]:
        details.append(f"revision {row['revision']}")
    if row["reason"]:
        details.append(row["reason"])
    details += row.get("warnings", ())
    state = row["state"]
    well = True if state in WELL else None if state in PASSING else False
    return Part(f"{row['role']} worker", _title(row), state, well, "; ".join(details))


def _title(row: Mapping[str, Any]) -> str:
    """Return the worker's own name and its address. Routers before 0.2.0 know the address only."""
    return f"{row['name']} ({row['worker']})" if row.get("name") else str(row["worker"])


GOOD = frozenset(
    {
        *("Ready", "Available", "ModelReady", "PrefillReady", "DecodeReady", "RouterReady", "SpecSupported"),
        "ExposureReady",
    }
)
"""Conditions that should be true."""

BAD = frozenset({"Degraded", "Failed", "ScalingLimited"})
"""Conditions that should be false."""

ROLES = ("prefill", "decode", "router")

INTENDED = frozenset({"Suspended", "ScaledToZero"})
"""Intended reasons for not being ready."""

CONDITION_REMEDIES = {
    "Suspended": "Resume it: kubectl -n {namespace} patch bsvc {name} --type=merge "
    '-p \'{{"spec": {{"suspend": false}}}}\'',
    "Invalid": "Correct the spec as the message says, and apply it again.",
    "ModelMissing": "Check the download: kubectl -n {namespace} get jobs,pods -l baton.dev/service={name}.",
    "RolledBack": "Correct the spec. The previous revision serves requests.",
    "ApiMissing": "Install the API that the message names, or remove the field from the spec.",
}
LOOK = (
    "Check its pods and events: kubectl -n {namespace} describe pods -l baton.dev/service={name}; "
    "kubectl -n {namespace} events --for bsvc/{name}."
)

POD_REMEDIES = {
    "ImagePullBackOff": "Check the image's name and spec.security.imagePullSecrets.",
    "ErrImagePull": "Check the image's name and spec.security.imagePullSecrets.",
    "CrashLoopBackOff": "Read its last log lines: "
    "kubectl -n {namespace} logs {pod} -c {container} --previous.",
    "Error": "Read its last log lines: kubectl -n {namespace} logs {pod} -c {container}.",
    "OOMKilled": "Give the role more memory, or reduce spec.engine.kvCacheMemory.",
    "Unschedulable": "Free or add the resources that the message names, or request less for the role.",
    "CreateContainerConfigError": "Create the Secret or ConfigMap that the message names.",
}


def status_of_service(service: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> ServiceStatus:
    """Return the status of an InferenceService with its pods."""
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    status = service.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    ready = conditions.get("Ready")
    problems = list(_problems(service, status, conditions))
    for pod in pods:
        problems += _of_pod(pod, namespace)
    parts = (*_roles(status), *_revisions(status), *map(_condition, conditions.values()))
    summary = f"{ready['reason']}: {ready['message']}" if ready else "The operator has not reconciled it yet."
    return ServiceStatus(
        name=f"{namespace}/{name}",
        serving=ready is not None and ready["status"] == "True",
        summary=summary,
        url=status.get("url") or "",
        parts=parts,
        problems=tuple(problems),
    )


def _problems(
    service: Mapping[str, Any], status: Mapping[str, Any], conditions: Mapping[str, Any]
) -> Iterator[Problem]:
    metadata = service["metadata"]
    generation = metadata.get("generation", 0)
    if not conditions or status.get("observedGeneration", 0) < generation:
        yield Problem(
            f"The operator has reconciled generation {status.get('observedGeneration', 0)} of {generation}.",
            "Check that an operator runs: kubectl get pods -A -l app.kubernetes.io/name=baton.",
        )
    for condition in conditions.values():
        kind, reason = condition["type"], condition["reason"]
        wrong = condition["status"] != "True" if kind in GOOD else condition["status"] == "True"
        if kind not in GOOD | BAD or not wrong or reason in INTENDED:
            continue
        if kind == "Available":
            continue  # Ready reports the same with a solution
        if kind == "Ready" and any(
            conditions.get(other, {}).get("status") == "False" for other in GOOD - {"Ready", "Available"}
        ):
            continue  # the other condition names the cause
        yield Problem(
            f"{kind} is {condition['status']} ({reason}). {condition['message']}".rstrip(),
            CONDITION_REMEDIES.get(reason, LOOK).format(
                name=metadata["name"], namespace=metadata["namespace"]
            ),
        )


def _of_pod(pod: Mapping[str, Any], namespace: str) -> Iterator[Problem]:
    metadata, status = pod["metadata"], pod.get("status") or {}
    if metadata.get("deletionTimestamp") or status.get("phase") in ("Succeeded", "Failed"):
        return  # others take its place
    for condition in status.get("conditions") or ():
        if condition.get("reason") == "Unschedulable":
            yield _pod_problem(metadata["name"], "Unschedulable", condition.get("message", ""))
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        state, before = container.get("state") or {}, container.get("lastState") or {}
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        last = before.get("terminated") or {}
        if "OOMKilled" in (ended.get("reason"), last.get("reason")):
            reason, message = "OOMKilled", f"killed {container.get('restartCount', 1)} times"
        elif ended.get("exitCode"):  # until Kubernetes starts it again
            reason, message = "Error", ended.get("message") or f"exit code {ended['exitCode']}"
        elif waiting.get("reason") in POD_REMEDIES:
            # The last words of the container say more than "back-off restarting".
            reason, message = waiting["reason"], last.get("message") or waiting.get("message", "")
        else:
            continue
        yield _pod_problem(metadata["name"], reason, message, namespace, container.get("name", ""))


def _pod_problem(pod: str, reason: str, message: str, namespace: str = "", container: str = "") -> Problem:
    detail = f": {' '.join(message[:300].split()).rstrip('.')}" if message else ""
    remedy = POD_REMEDIES[reason].format(pod=pod, namespace=namespace, container=container)
    return Problem(f"The pod {pod} has a problem ({reason}){detail}.", remedy)


def _roles(status: Mapping[str, Any]) -> Iterator[Part]:
    for role in ROLES:
        replicas = status.get(role)
        if replicas is not None:
            ready, desired = replicas.get("readyReplicas", 0), replicas.get("desiredReplicas", 0)
            what = "routers" if role == "router" else f"{role} workers"
            yield Part("role", what, f"{ready} of {desired} ready", ready >= desired, "")


def _revisions(status: Mapping[str, Any]) -> Iterator[Part]:
    for revision in status.get("revisions") or ():
        detail = f"{revision.get('weight', 0)} % of requests, {revision.get('prefillReady', 0)} prefill and "
        detail += f"{revision.get('decodeReady', 0)} decode workers ready"
        if "failure" in revision:
            detail = f"{revision['failure']}; {detail}"
        well = {"Serving": True, "Failed": False}.get(revision["phase"])
        yield Part("revision", revision["name"], revision["phase"], well, detail)


def _condition(condition: Mapping[str, Any]) -> Part:
    kind, status = condition["type"], condition["status"]
    well = status == "True" if kind in GOOD else status != "True" if kind in BAD else None
    detail = ": ".join(filter(None, (condition["reason"], condition["message"])))
    return Part("condition", kind, status, well, detail)
