"""
An API server that misbehaves as instructed, and behaves correctly otherwise.

It has discovery, lists by page, watches with bookmarks, server-side apply (fields that an applier leaves
out vanish), versions, and status apart from spec. A real server cannot be made to treat watches and requests
in these ways.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from baton_operator.cluster.api_resources import API, WATCHED, plural
from baton_operator.work_queue import BATCH_CHANGES_S

WRITES = ("POST", "PUT", "PATCH", "DELETE")
"""Methods that change objects."""

SERVED = (
    *((one.api, one.kind) for one in WATCHED if not one.optional),
    ("v1", "Event"),
    ("v1", "Secret"),
    ("coordination.k8s.io/v1", "Lease"),
)

OF_CLUSTER = (("v1", "Namespace"), ("apiextensions.k8s.io/v1", "CustomResourceDefinition"))
"""Kinds without a namespace, which kopf wants to find. It reads none of them."""

Place = tuple[str, str]
"""API and plural."""

OMITTED = ("apiVersion", "kind")
"""Fields that items of a list leave out."""


class FakeApi:
    """`async with FakeApi(folder) as api`; `api.kubeconfig` says how to reach it."""

    def __init__(self, folder: Path) -> None:
        self.kubeconfig = folder / "kubeconfig"
        self.answers: list[int] = []
        """Statuses of the next requests, one after the other, but for the Lease and for watches."""
        self.silent = False
        """With it, watches stay open and bring nothing."""
        self.refused = ""
        """Plural of a kind that no client may read."""
        self.held = ""
        """Plural of a kind whose next write is stored only after `let_go`."""
        self.holds = asyncio.Event()
        """A write has arrived that is held."""
        self.let_go = asyncio.Event()
        self.page = 0
        """Most objects of a list's page; 0: as many as are asked for."""
        self.version = 100
        """Of the newest change."""
        self.requests: Counter[str] = Counter()
        self.watches: Counter[str] = Counter()
        self.watchers: set[str] = set()
        """User agents of all watches."""
        self.objects: dict[tuple[str, str, str, str], Any] = {}
        """By API, plural, namespace and name."""
        self._kinds = {(api, plural(kind)): kind for api, kind in SERVED}
        self._applied: dict[tuple[str, str, str, str], Any] = {}
        self._events: list[tuple[int, Place, Any, Any]] = []
        """Version, place, and the object before and after each change; None where it does not exist."""
        self._oldest = 0
        self._error: int | None = None
        self._fails = ""
        """Plural of the kind whose watch gets the error; empty: any."""
        self._cuts = 0
        self._bookmarks = 0
        self._lists: dict[str, tuple[int, list[Any]]] = {}
        """Rest of lists of which a page was sent, by the token for the next one."""
        self._news = asyncio.Condition()

    async def __aenter__(self) -> FakeApi:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        address = {"server": f"http://127.0.0.1:{self._runner.addresses[0][1]}"}
        lists = {
            "clusters": [{"name": "main", "cluster": address}],
            "users": [{"name": "main", "user": {"token": "token"}}],
            "contexts": [{"name": "main", "context": {"cluster": "main", "user": "main"}}],
        }
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "main", **lists}
        self.kubeconfig.write_text(yaml.safe_dump(config))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def put(self, spec: Any, name: str = "chat", *, lose: bool = False) -> None:
        """Make or change an InferenceService; with `lose` no watch hears of it."""
        where = (API, "inferenceservices", "models", name)
        existing = self.objects.get(where)
        generation = existing["metadata"]["generation"] + 1 if existing else 1
        metadata = {"name": name, "namespace": "models", "uid": f"uid-{name}", "generation": generation}
        changed = {**(existing or {}), "metadata": metadata, "spec": spec}
        await self._store(where, changed, lose=lose)

    async def at_rest(self) -> None:
        """Wait until no client has written for several times as long as changes are gathered."""
        writes, since = -1, time.monotonic()
        while writes != self.writes or time.monotonic() - since < 6 * BATCH_CHANGES_S:
            if writes != self.writes:
                writes, since = self.writes, time.monotonic()
            await asyncio.sleep(0.05)

    @property
    def writes(self) -> int:
        """All but those of the Lease."""
        return sum(
            count
            for name, count in self.requests.items()
            if name.startswith(WRITES) and not name.endswith(" leases")
        )

    async def expire(self) -> None:
        """All watches end with the news that their versions are too old."""
        async with self._news:
            self.version += 1
            self._oldest = self.version
            self._lists.clear()
            self._news.notify_all()

    async def cut(self) -> None:
        """All watches end without a word."""
        async with self._news:
            self._cuts += 1
            self._news.notify_all()

    async def bookmark(self) -> None:
        """Send all watches a bookmark."""
        async with self._news:
            self._bookmarks += 1
            self._news.notify_all()

    async def store(self, api: str, kind: str, body: Any) -> Any:
        """Make or change an object, as others do."""
        metadata = body["metadata"]
        return await self._store((api, plural(kind), metadata["namespace"], metadata["name"]), body)

    async def remove(self, api: str, kind: str, namespace: str, name: str, *, lose: bool = False) -> None:
        """Delete an object, as others do; with `lose` no watch hears of it."""
        await self._remove((api, plural(kind), namespace, name), lose=lose)

    async def fail_watches(self, code: int, resource: str = "") -> None:
        """The next watch that looks (of this plural) gets an error that is not about its version."""
        async with self._news:
            self._error, self._fails = code, resource
            self._news.notify_all()

    def kind(self, where: tuple[str, str, str, str]) -> str:
        return self._kinds[where[:2]]

    def status(self, name: str = "chat") -> Any:
        return self.objects[API, "inferenceservices", "models", name].get("status", {})

    async def _store(self, where: tuple[str, str, str, str], manifest: Any, *, lose: bool = False) -> Any:
        api, resource, *_ = where
        before = self.objects.get(where)
        async with self._news:
            self.version += 1
            kind = self._kinds[api, resource]
            metadata = {
                "uid": before["metadata"]["uid"] if before else f"uid-{self.version}",
                **manifest["metadata"],
                "resourceVersion": str(self.version),
                "namespace": where[2],
            }
            manifest = {**manifest, "apiVersion": api, "kind": kind, "metadata": metadata}
            self.objects[where] = manifest
            if not lose:
                self._events.append((self.version, (api, resource), before, manifest))
            self._news.notify_all()
        return manifest

    async def _remove(self, where: tuple[str, str, str, str], *, lose: bool = False) -> None:
        async with self._news:
            self.version += 1
            before = self.objects.pop(where)
            self._applied.pop(where, None)
            if not lose:
                self._events.append((self.version, where[:2], before, None))
            self._news.notify_all()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        if discovery := self._discovery(parts):
            return web.json_response(discovery)
        api, rest = ("v1", parts[2:]) if parts[0] == "api" else (f"{parts[1]}/{parts[2]}", parts[3:])
        namespace = ""
        if not rest:
            return _status(404)
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        resource, name, status = rest[0], rest[1] if len(rest) > 1 else "", len(rest) > 2
        if (api, resource) not in self._kinds and resource != self.refused:
            return _status(404)
        verb = "watch" if "watch" in request.query else request.method
        self.requests[f"{verb} {resource}"] += 1
        if resource == self.refused:
            return _status(403)
        if resource == self.held and request.method in WRITES:
            self.held = ""
            self.holds.set()
            await self.let_go.wait()
        if resource != "leases" and verb != "watch" and self.answers:
            return _status(self.answers.pop(0))
        where = (api, resource, namespace, name)
        match request.method:
            case "GET" if verb == "watch":
                return await self._watch((api, resource), namespace, request)
            case "GET" if name:
                existing = self.objects.get(where)
                return web.json_response(existing) if existing else _status(404)
            case "GET":
                return self._list((api, resource), namespace, request)
            case "POST":
                body = await request.json()
                where = (*where[:3], body["metadata"]["name"])
                return (
                    _status(409)
                    if where in self.objects
                    else web.json_response(await self._store(where, body))
                )
            case "PUT":
                body = await request.json()
                version = self.objects[where]["metadata"]["resourceVersion"]
                fresh = body["metadata"]["resourceVersion"] == version
                return web.json_response(await self._store(where, body)) if fresh else _status(409)
            case "DELETE":
                if where not in self.objects:
                    return _status(404)
                wanted = (await request.json()).get("preconditions", {}).get("uid")
                if wanted not in (None, self.objects[where]["metadata"]["uid"]):
                    return _status(409)
                await self._remove(where)
                return web.json_response({"kind": "Status", "status": "Success"})
        return await self._patch(where, json.loads(await request.text()), request.content_type, status)

    async def _patch(
        self, where: tuple[str, str, str, str], body: Any, kind: str, status: bool
    ) -> web.StreamResponse:
        existing = self.objects.get(where)
        if kind == "application/apply-patch+yaml":
            changed = _merged(_without(existing or {}, self._applied.get(where, {}), body), body)
            self._applied[where] = body
            if existing is not None and _same(existing, changed):
                return web.json_response(existing)
        elif existing is None:
            return _status(404)
        else:
            body.get("metadata", {}).pop("uid", None)
            changed = _merged(existing, {"status": body["status"]} if status else body)
        return web.json_response(await self._store(where, changed))

    def _list(self, place: Place, namespace: str, request: web.Request) -> web.Response:
        token = request.query.get("continue")
        if token and token not in self._lists:
            return _status(410)
        if token:
            version, items = self._lists.pop(token)
        else:
            version = self.version
            items = [
                one
                for (*listed_place, within, _), one in self.objects.items()
                if tuple(listed_place) == place and namespace in ("", within) and _selected(one, request)
            ]
        metadata = {"resourceVersion": str(version)}
        limit = int(request.query.get("limit", "0"))
        size = min(self.page, limit) if self.page and limit else limit
        if size and len(items) > size:
            metadata["continue"] = f"{version}-{len(self._lists)}-{self.requests.total()}"
            self._lists[metadata["continue"]] = version, items[size:]
            items = items[:size]
        plain = [{name: value for name, value in one.items() if name not in OMITTED} for one in items]
        return web.json_response({"metadata": metadata, "items": plain})

    async def _watch(self, place: Place, namespace: str, request: web.Request) -> web.StreamResponse:
        seen = int(request.query["resourceVersion"])
        self.watches[place[1]] += 1
        self.watchers.add(request.headers["User-Agent"])
        stream = web.StreamResponse()
        await stream.prepare(request)

        async def send(kind: str, body: Any) -> None:
            await stream.write(json.dumps({"type": kind, "object": body}).encode() + b"\n")

        def marked() -> Any:
            return {"kind": self._kinds[place], "metadata": {"resourceVersion": str(seen)}}

        if not self.silent:
            await send("BOOKMARK", marked())
        cuts, bookmarks = self._cuts, self._bookmarks
        while True:
            async with self._news:
                code = 410 if seen < self._oldest else self._error
                if code != 410 and self._fails not in ("", place[1]):
                    code = None
                fresh = [one for one in self._events if one[0] > seen]
                if not code and not fresh and cuts == self._cuts and bookmarks == self._bookmarks:
                    await self._news.wait()
                    continue
            if self.silent:
                await asyncio.Event().wait()
            if cuts != self._cuts:
                return stream
            if code:
                self._error = None if code != 410 else self._error
                await send(
                    "ERROR", {"kind": "Status", "code": code, "message": "as told", "reason": "Expired"}
                )
                return stream
            for version, place_changed, before, after in fresh:
                seen = version
                if place_changed == place and namespace in ("", (after or before)["metadata"]["namespace"]):
                    kind = _event(before, after, request)
                    body = after or before
                    if kind == "DELETED":
                        # As it was last, with the version of the change that took it away.
                        metadata = {**body["metadata"], "resourceVersion": str(version)}
                        body = {**body, "metadata": metadata}
                    if kind:
                        await send(kind, body)
            if bookmarks != self._bookmarks:
                bookmarks = self._bookmarks
                await send("BOOKMARK", marked())

    def _discovery(self, parts: list[str]) -> Any:
        groups = sorted({api for api, _ in (*SERVED, *OF_CLUSTER) if "/" in api})
        match parts:
            case ["api"]:
                return {"kind": "APIVersions", "versions": ["v1"]}
            case ["apis"]:
                return {"kind": "APIGroupList", "groups": [_group(api) for api in groups]}
            case ["apis", group]:
                return next((_group(api) for api in groups if api.startswith(group + "/")), None)
            case ["api", "v1"] | ["apis", _, _]:
                api = "/".join(parts[1:])
                resources = [
                    {
                        "name": plural(kind),
                        "singularName": kind.lower(),
                        "kind": kind,
                        "namespaced": (served_api, kind) not in OF_CLUSTER,
                        "verbs": ["get", "list", "watch", "patch"],
                    }
                    for served_api, kind in (*SERVED, *OF_CLUSTER)
                    if served_api == api
                ]
                return (
                    {"kind": "APIResourceList", "groupVersion": api, "resources": resources}
                    if resources
                    else None
                )
        return None


def _group(api: str) -> Any:
    group, version = api.split("/")
    one = {"groupVersion": api, "version": version}
    return {"name": group, "versions": [one], "preferredVersion": one}


def _selected(one: Any, request: web.Request) -> bool:
    pairs = [pair.split("=") for pair in request.query.get("labelSelector", "").split(",") if pair]
    labels = one["metadata"].get("labels", {})
    return all(labels.get(name) == value for name, value in pairs)


def _event(before: Any, after: Any, request: web.Request) -> str:
    """Return the event of a change for a watch that sees some objects only; empty if there is no event."""
    was = before is not None and _selected(before, request)
    is_so = after is not None and _selected(after, request)
    return {(False, True): "ADDED", (True, True): "MODIFIED", (True, False): "DELETED"}.get((was, is_so), "")


def _merged(base: Any, over: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    merged = {**base, **{name: _merged(base.get(name), value) for name, value in over.items()}}
    return {name: value for name, value in merged.items() if value is not None}


def _without(existing: Any, before: Any, now: Any) -> Any:
    """`existing` without the fields that were applied before and are not any more."""
    if not isinstance(existing, dict) or not isinstance(before, dict) or not isinstance(now, dict):
        return existing
    kept = {name: value for name, value in existing.items() if name not in before or name in now}
    return {name: _without(value, before.get(name), now.get(name)) for name, value in kept.items()}


def _same(existing: Any, applied: Any) -> bool:
    return bool({**applied, "metadata": {**existing["metadata"], **applied["metadata"]}} == existing)


def _status(code: int) -> web.Response:
    return web.json_response(
        {"kind": "Status", "code": code, "message": f"answer {code}, as told"}, status=code
    )
