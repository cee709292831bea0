"""A real API server as the operator meets it: custom resources, its account, and a log of what it asked."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from kubernetes.aio.client import ApiClient

from baton_api import labels
from baton_operator import chart
from baton_operator.cluster import api_server
from baton_operator.cluster.api_resources import API, WATCHED, path, path_of
from baton_operator.cluster.api_server import ApiServer
from baton_operator.cluster.cache import ObjectCache
from baton_operator.cluster.reflector import Reflectors
from baton_operator.cluster.state import ClusterReader
from baton_operator.crd import RESOURCES
from baton_operator.manifests.objects import Manifest
from baton_operator.reconcilers.inference_service import InferenceServiceReconciler
from baton_operator.reconcilers.plan import OperatorDefaults, RouterRollouts
from tests.charts.helm import of_kind, render
from tests.router.real_kubernetes import RealKubernetes, real_kubernetes

IMAGES = OperatorDefaults("registry.example/worker:1", "registry.example/router:1")
OPERATOR = "baton"
"""The namespace of operators."""

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
OTHERS = (
    ("gateway.networking.k8s.io", "v1", "HTTPRoute", "httproutes"),
    ("gateway.networking.k8s.io", "v1", "Gateway", "gateways"),
    ("cert-manager.io", "v1", "Certificate", "certificates"),
    ("leaderworkerset.x-k8s.io", "v1", "LeaderWorkerSet", "leaderworkersets"),
    ("inference.networking.k8s.io", "v1", "InferencePool", "inferencepools"),
)
"""Kinds that other projects define; their own definitions are not needed to write objects of them."""

LIMIT_S = 300.0
"""Seconds after which a test gives up, on a machine however busy."""

WRITES = frozenset({"create", "patch", "update", "delete"})


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """One request of the operator's, as the API server has logged it."""

    verb: str
    group: str
    resource: str
    name: str
    namespace: str
    code: int
    agent: str

    @classmethod
    def of(cls, entry: dict[str, Any], user: str) -> ApiRequest | None:
        target = entry.get("objectRef")
        if entry["user"]["username"] != user or target is None:
            return None
        kind = target.get("resource", "")
        resource = f"{kind}/{target['subresource']}" if "subresource" in target else kind
        return cls(
            entry["verb"],
            target.get("apiGroup", ""),
            resource,
            target.get("name", ""),
            target.get("namespace", ""),
            entry.get("responseStatus", {}).get("code", 0),
            entry.get("userAgent", ""),
        )

    @property
    def is_work(self) -> bool:
        """Whether it writes something else than the operator's own Lease."""
        return self.verb in WRITES and self.resource != "leases"

    @property
    def who(self) -> str:
        """The operator's identity."""
        return self.agent.partition("baton-operator/")[2]


class RealCluster:
    """With namespaces `models` and `baton`, the CRDs, and the operator's account."""

    def __init__(self, api: RealKubernetes, folder: Path) -> None:
        self.api = api
        self.admin = api.admin
        self.folder = folder
        self.kubeconfig = folder / "operator.kubeconfig"
        self.user = "operator"
        """The operator's user name at the API server."""

    async def prepare(self) -> None:
        for name in ("models", OPERATOR):
            await self.api.post("/api/v1/namespaces", {"metadata": {"name": name}})
        for one in RESOURCES:
            await self.api.post(CRDS, one.definition)
        await self.served(*(f"/apis/{API}/{one.plural}" for one in RESOURCES))
        assets = os.environ.get("KUBEBUILDER_ASSETS")
        if shutil.which("helm", path=assets) or shutil.which("helm"):
            self.kubeconfig.write_text(self._kubeconfig(await self.install()))
        else:
            await self.allow()
            self.kubeconfig.write_text(self._kubeconfig("token-of-the-operator"))
        await self.granted(self.user, "list", f"{API}/inferenceservices", "models")
        await self.granted(self.user, "create", "coordination.k8s.io/v1/leases", OPERATOR)

    async def install(self) -> str:
        """The chart's own account and rights, as helm renders them; gives a token of that account."""
        manifests = render({}, f"--namespace={OPERATOR}")
        (account,) = of_kind(manifests, "ServiceAccount")
        kinds = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
        for one in (manifest for kind in kinds for manifest in of_kind(manifests, kind)):
            namespace = "" if one["kind"].startswith("Cluster") else OPERATOR
            await self.api.post(path(one["apiVersion"], one["kind"], namespace), one)
        name = account["metadata"]["name"]
        self.user = f"system:serviceaccount:{OPERATOR}:{name}"
        return await self.token(OPERATOR, name)

    async def token(self, namespace: str, account: str) -> str:
        """Return a token as a pod of this account gets it."""
        response = await self.admin.post(
            f"{path('v1', 'ServiceAccount', namespace, account)}/token",
            json={"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}},
        )
        token: str = response.raise_for_status().json()["status"]["token"]
        return token

    async def granted(self, user: str, verb: str, resource: str, namespace: str) -> None:
        """Wait until the API server, which watches roles and bindings, grants this right."""
        group, _, plural = resource.split("/")
        target = {"namespace": namespace, "verb": verb, "group": group, "resource": plural}
        body = {"spec": {"user": user, "resourceAttributes": target}}

        async def so() -> bool:
            answer = await self.admin.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", json=body)
            return bool(answer.raise_for_status().json()["status"]["allowed"])

        await self.until(so)

    async def allow(self) -> None:
        """Just what the operator's rules say, where there is no helm to render them."""
        group, user = "rbac.authorization.k8s.io", {"kind": "User", "name": "operator"}
        subjects = [{"apiGroup": group, **user}]
        name = {"metadata": {"name": "operator"}}
        for where, kind, rules in (
            (RBAC, "ClusterRole", chart.rules((*chart.SERVICES, *chart.CLUSTER))),
            (f"{RBAC}/namespaces/{OPERATOR}", "Role", chart.rules(chart.own("baton-operator"))),
        ):
            plural = kind.lower() + "s"
            reference = {"apiGroup": group, "kind": kind, "name": "operator"}
            await self.api.post(f"{where}/{plural}", {**name, "rules": rules})
            binding = plural.replace("roles", "rolebindings")
            await self.api.post(f"{where}/{binding}", {**name, "roleRef": reference, "subjects": subjects})

    async def define_others(self) -> None:
        """Install the definitions of Gateway API and its extension, cert-manager and LeaderWorkerSet."""
        for group, version, kind, plural in OTHERS:
            schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
            await self.api.post(CRDS, _crd(group, version, kind, plural, schema))
        await self.served(*(f"/apis/{group}/{version}/{plural}" for group, version, _, plural in OTHERS))

    async def served(self, *paths: str) -> None:
        for one in paths:
            await self.until(lambda one=one: self._is_served(one))  # type: ignore[misc]

    async def put(
        self, spec: Any, name: str = "chat", namespace: str = "models", kind: str = "InferenceService"
    ) -> None:
        """Make a custom resource, or change its spec."""
        body = {"apiVersion": API, "kind": kind, "metadata": {"name": name}, "spec": spec}
        where = path(API, kind, namespace)
        answer = await self.admin.post(where, json=body)
        while answer.status_code == 409:  # it exists, or the operator wrote its status meanwhile
            existing = await self.admin.get(f"{where}/{name}")
            body = {**existing.json(), "spec": spec}
            answer = await self.admin.put(f"{where}/{name}", json=body)
        assert answer.status_code in (200, 201), answer.text

    async def service(self, name: str = "chat", namespace: str = "models") -> dict[str, Any]:
        response = await self.admin.get(path(API, "InferenceService", namespace, name))
        service: dict[str, Any] = response.raise_for_status().json()
        return service

    async def condition(self, type: str, name: str = "chat", kind: str = "InferenceService") -> str:
        """Status and reason; empty if the condition is not set yet."""
        existing = (await self.admin.get(path(API, kind, "models", name))).json()
        matches = [one for one in existing.get("status", {}).get("conditions", ()) if one["type"] == type]
        return f"{matches[0]['status']} {matches[0]['reason']}" if matches else ""

    async def objects(self, namespace: str = "models") -> dict[str, Manifest]:
        """Return all objects of the kinds that the operator makes, without fields that differ each time."""
        by_name: dict[str, Manifest] = {}
        uids: list[str] = []
        for resource in WATCHED:
            kind = resource.kind
            if resource.optional or kind in ("Pod", "BatchJob", "LoraAdapter"):
                continue
            for one in (await self.admin.get(path(resource.api, kind, namespace))).json()["items"]:
                by_name[f"{kind} {one['metadata']['name']}"] = _plain(one)
                uids.append(one["metadata"]["uid"])
        text = json.dumps(by_name, sort_keys=True)
        for uid in uids:  # selectors of Jobs are made of their own, and Jobs name those of claims
            text = text.replace(uid, "UID")
        objects: dict[str, Manifest] = json.loads(text.replace(namespace, "NAMESPACE"))
        return objects

    async def ready_pods(self, name: str = "chat", namespace: str = "models") -> None:
        """Act as controllers and kubelets: as many ready pods as Deployments want, and done Jobs."""
        where = path("v1", "Pod", namespace)
        wanted = set()
        for one in (await self.admin.get(path("apps/v1", "Deployment", namespace))).json()["items"]:
            of_it = one["metadata"]["labels"]
            if of_it[labels.SERVICE] != name:
                continue
            for number in range(one["spec"]["replicas"]):
                pod = f"{one['metadata']['name']}-{number}"
                wanted.add(pod)
                body = {
                    "metadata": {"name": pod, "labels": of_it},
                    "spec": {"containers": [{"name": "main", "image": "none"}]},
                }
                if (await self.admin.post(where, json=body)).status_code == 409:
                    continue
                ready = {"conditions": [{"type": "Ready", "status": "True"}], "phase": "Running"}
                await self.api.patch(f"{where}/{pod}/status", {"status": ready})
        selector = {"labelSelector": f"baton.dev/service={name}"}
        for one in (await self.admin.get(where, params=selector)).json()["items"]:
            if one["metadata"]["name"] not in wanted:
                await self.api.delete(f"{where}/{one['metadata']['name']}")
        for one in (await self.admin.get(path("batch/v1", "Job", namespace))).json()["items"]:
            now = "2026-01-01T00:00:00Z"
            done = {
                "startTime": now,
                "completionTime": now,
                "succeeded": 1,
                "uncountedTerminatedPods": {},
                "conditions": [
                    {"type": kind, "status": "True", "lastTransitionTime": now}
                    for kind in ("SuccessCriteriaMet", "Complete")
                ],
            }
            await self.api.patch(
                f"{path_of({**one, 'apiVersion': 'batch/v1', 'kind': 'Job'})}/status", {"status": done}
            )

    def requests(self, since: int = 0) -> list[ApiRequest]:
        """Return the requests of the operator's account, from that entry on."""
        return self.requests_of(self.user, since)

    def requests_of(self, user: str, since: int = 0) -> list[ApiRequest]:
        """Return the requests of this account, from that entry on."""
        text = self.api.audit.read_text() if self.api.audit.exists() else ""
        lines = text.rpartition("\n")[0].splitlines()  # without one that is being written
        entries = [ApiRequest.of(json.loads(line), user) for line in lines]
        return [one for one in entries if one is not None][since:]

    async def until(self, claim: Callable[[], Any]) -> None:
        await until(claim)

    async def _is_served(self, where: str) -> bool:
        return (await self.admin.get(where)).status_code == 200

    def _kubeconfig(self, token: str) -> str:
        named = {
            "clusters": {
                "cluster": {"server": self.api.url, "certificate-authority": str(self.api.account / "ca.crt")}
            },
            "users": {"user": {"token": token}},
            "contexts": {"context": {"cluster": "main", "user": "main"}},
        }
        lists = {name: [{"name": "main", **value}] for name, value in named.items()}
        return yaml.safe_dump({"apiVersion": "v1", "kind": "Config", "current-context": "main", **lists})


@asynccontextmanager
async def real_cluster(folder: Path) -> AsyncIterator[RealCluster]:
    async with real_kubernetes(folder) as api:
        cluster = RealCluster(api, folder)
        await cluster.prepare()
        yield cluster


@asynccontextmanager
async def client(cluster: RealCluster) -> AsyncIterator[ApiClient]:
    api_client = await api_server.connect(str(cluster.kubeconfig))
    try:
        yield api_client
    finally:
        await api_client.close()


class Listed:
    """A cache of one namespace that `relist` fills, instead of a watch."""

    def __init__(
        self,
        client: ApiClient,
        guard: Callable[[], None] = lambda: None,
        answered: Callable[[str, int], None] = lambda method, code: None,
        namespace: str = "models",
    ) -> None:
        self.cache = ObjectCache([namespace], lambda change: None)
        self.api = ApiServer(client, guard, answered, self.cache)
        free = ApiServer(client, lambda: None, lambda method, code: None)
        self._reflectors = Reflectors(free, self.cache, time.monotonic, random.Random(0))

    async def relist(self) -> None:
        await self._reflectors.relist()


class Inside:
    """The operator's reconciler in the test's own process, at a time that stands still."""

    def __init__(
        self,
        client: ApiClient,
        guard: Callable[[], None] = lambda: None,
        answered: Callable[[str, int], None] = lambda method, code: None,
        now: float = 1_800_000_000.0,
    ) -> None:
        self.now = now
        self.transitions: list[str] = []
        self.writes = 0
        self._client = client
        self._guard = guard
        self._answered = answered

    async def reconcile(self, name: str = "chat", namespace: str = "models") -> float | None:
        def counting() -> None:
            self.writes += 1
            self._guard()

        listed = Listed(self._client, counting, self._answered, namespace)
        await listed.relist()
        return await self.reconcile_from(listed, name, namespace)

    async def reconcile_from(
        self, listed: Listed, name: str = "chat", namespace: str = "models"
    ) -> float | None:
        """Reconcile from this cache, which others may share."""
        reconciler = InferenceServiceReconciler(
            listed.api,
            ClusterReader(listed.cache),
            IMAGES,
            lambda about, transition: self.transitions.append(
                f"{transition.fact.type} {transition.fact.status}"
            ),
            lambda namespace, name, status, objectives: None,
            lambda: self.now,
            600.0,
            RouterRollouts(),
        )
        return await reconciler.reconcile(namespace, name)


class Process:
    """`baton operator` as people start it."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.log = log

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as asking:
            return await asking.get(self.url + path)

    async def status(self, path: str) -> int:
        return (await self.get(path)).status_code

    async def figure(self, name: str) -> float:
        """The sum of a metric's samples, or the one sample with these labels."""
        lines = (await self.get("/metrics")).text.splitlines()
        return sum(
            float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + " ", name + "{"))
        )

    @property
    def cpu_s(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    @property
    def resident_mb(self) -> float:
        resident: int = psutil.Process(self.process.pid).memory_info().rss
        return resident / 2**20


def running_operator(cluster: RealCluster, name: str, *options: str) -> AbstractAsyncContextManager[Process]:
    return started(cluster.folder, cluster.kubeconfig, name, *options)


@asynccontextmanager
async def started(folder: Path, kubeconfig: Path, name: str, *options: str) -> AsyncIterator[Process]:
    log = folder / f"{name}.log"
    arguments = [
        "operator", f"--kubeconfig={kubeconfig}", "--port=0", f"--lease-namespace={OPERATOR}",
        f"--identity={name}", f"--worker-image={IMAGES.worker}", f"--router-image={IMAGES.router}", *options,
    ]  # fmt: skip
    with log.open("wb") as writing:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "baton_cli.main", *arguments, stderr=writing
        )
    try:
        await until(lambda: process.returncode is not None or "Health and metrics" in log.read_text())
        assert process.returncode is None, log.read_text()
        url = log.read_text().rpartition("Health and metrics at ")[2].partition('"')[0].rstrip(".")
        yield Process(process, url, log)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def until(claim: Callable[[], Any]) -> None:
    """Ask again and again; a claim that fails, or cannot be answered, is not true yet."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            answer = claim()
            if await answer if isinstance(answer, Awaitable) else answer:
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, f"not so within {LIMIT_S:.0f} s"
        await asyncio.sleep(0.05)


def counted(requests: list[ApiRequest]) -> Counter[str]:
    return Counter(f"{one.verb} {one.resource}" for one in requests)


def _crd(group: str, version: str, kind: str, plural: str, schema: Any) -> Manifest:
    return {
        "metadata": {
            "name": f"{plural}.{group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved"},
        },
        "spec": {
            "group": group,
            "names": {"kind": kind, "plural": plural},
            "scope": "Namespaced",
            "versions": [
                {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
            ],
        },
    }


def _plain(manifest: Manifest) -> Manifest:
    metadata = {
        name: value
        for name, value in manifest["metadata"].items()
        if name
        not in ("uid", "resourceVersion", "creationTimestamp", "managedFields", "generation", "namespace")
    }
    for owner in metadata.get("ownerReferences", ()):
        owner["uid"] = ""
    # The hash of what an object was made from has the owner in it.
    metadata.get("annotations", {}).pop("baton.dev/applied", None)
    cleaned = {**manifest, "metadata": metadata}
    if manifest.get("spec", {}).get("clusterIP"):
        cleaned["spec"] = {
            name: value for name, value in manifest["spec"].items() if name not in ("clusterIP", "clusterIPs")
        }
    return cleaned
