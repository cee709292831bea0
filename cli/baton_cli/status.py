"""`baton status`: the status of services, as their routers or the API server report it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton_api import installing, labels
from baton_api.errors import SetupError
from baton_api.workers import EngineKind, Role
from baton_cli.doctor.cluster import account
from baton_cli.router_workers import ANSWER_S, base, read, reported_load

WRONG = 1
"""Exit status if a service has problems."""

WIDE = 200
CLUSTER_S = 60.0


def of_url(url: str, api_key: str, as_json: bool) -> None:
    """Print the status of the service behind a router. Raises SetupError if it does not answer."""
    router, workers = base(url), read(url, api_key)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{router}/server_info", headers=headers, trust_env=False, timeout=ANSWER_S)
        info = answer.raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        raise SetupError(f"{url} returned no status: {error}.") from error
    _end([status_of_router(router, info, workers)], as_json)


def of_services(name: str, kubeconfig: str, namespace: str, as_json: bool) -> None:
    """Print the status of InferenceServices. Raises SetupError if the named one does not exist."""
    _end(asyncio.run(services(name, account(kubeconfig, os.environ), namespace)), as_json)


async def services(name: str, kubeconfig: str, namespace: str) -> list[ServiceStatus]:
    try:
        from aiohttp import ClientError
        from kubernetes.aio.client import CoreV1Api, CustomObjectsApi
        from kubernetes.aio.client.exceptions import ApiException

        from baton_operator.cluster import api_server
        from baton_operator.crd import GROUP, VERSION
    except ModuleNotFoundError as error:
        raise SetupError(
            f"The package {error.name} is missing. Install it: {installing.command('operator')}."
        ) from error
    try:
        async with asyncio.timeout(CLUSTER_S), await api_server.connect(kubeconfig) as client:
            custom = CustomObjectsApi(client)
            listed = await custom.list_namespaced_custom_object(
                GROUP, VERSION, namespace, "inferenceservices"
            )
            chosen = [service for service in listed["items"] if name in ("", service["metadata"]["name"])]
            if name and not chosen:
                raise SetupError(
                    f"The InferenceService {name} does not exist in {namespace}. Set another --namespace, "
                    "or list all: kubectl get bsvc -A."
                )
            statuses = []
            for service in chosen:
                selector = f"{labels.SERVICE}={service['metadata']['name']}"
                pods = await CoreV1Api(client).list_namespaced_pod(namespace, label_selector=selector)
                plain: list[Any] = client.sanitize_for_serialization(pods.items)
                statuses.append(status_of_service(service, plain))
            return statuses
    except ApiException as error:
        raise SetupError(
            f"The cluster rejected the request ({error.status} {error.reason}). `baton doctor --cluster` "
            "shows missing permissions."
        ) from error
    except (ClientError, OSError) as error:  # a timeout is one
        raise SetupError(f"The cluster does not answer: {str(error) or 'no answer in time'}.") from error


def _end(standings: Sequence[ServiceStatus], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps([dataclasses.asdict(status) for status in standings], indent=1) + "\n")
    else:
        console = Console()
        if not console.is_terminal:
            console.width = WIDE
        for status in standings:
            show(console, status)
        if not standings:
            console.print("No services found.")
    if not all(status.well for status in standings):
        raise typer.Exit(WRONG)


def show(console: Console, status: ServiceStatus) -> None:
    """Print a summary, one line per part, and the problems with their solutions."""
    sign, colour = ("✓", "green") if status.well else ("!", "yellow") if status.serving else ("✗", "bold red")
    console.print(
        Text.assemble((f"{sign} ", colour), (status.name, "bold"), f"  {status.url}\n  {status.summary}\n")
    )
    table = Table.grid(padding=(0, 2))
    for wraps in (False, False, False, True):
        table.add_column(no_wrap=not wraps, overflow="fold")
    for part in status.parts:
        shade = {True: "green", False: "bold red", None: ""}[part.well]
        table.add_row(
            Text(f"  {part.kind}", style="dim"),
            Text(part.name),
            Text(part.state, style=shade),
            Text(part.detail, style="dim"),
        )
    console.print(table)
    for problem in status.problems:
        console.print(
            Text.assemble(("\n✗ ", "bold red"), problem.message, (f"\n→ {problem.remedy}", "default")),
            soft_wrap=True,
        )
    console.print()


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
            times = container.get("restartCount", 0) + (ended.get("reason") == "OOMKilled")
            reason, message = "OOMKilled", f"killed {times} times"
        elif ended.get("exitCode"):  # until Kubernetes starts it again
            reason, message = "Error", _last_words(ended) or f"exit code {ended['exitCode']}"
        elif waiting.get("reason") in POD_REMEDIES:
            # What a container that crashes wrote last says more than "back-off restarting".
            words = _last_words(last) if waiting["reason"] == "CrashLoopBackOff" else ""
            reason, message = waiting["reason"], words or waiting.get("message", "")
        else:
            continue
        yield _pod_problem(metadata["name"], reason, message, namespace, container.get("name", ""))


def _last_words(run: Mapping[str, Any]) -> str:
    """The end of a container's termination message: if the message is its log, the cause comes last."""
    return str(run.get("message") or "")[-300:]


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
