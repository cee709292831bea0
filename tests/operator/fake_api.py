"""
An API server that misbehaves as it is told to, and behaves otherwise.

It has discovery, lists, watches with bookmarks, server-side apply (fields that an applier leaves out vanish),
versions, and status apart from spec. What it does to watches and requests no test could ask of a real one.
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

from baton_operator.api_resources import API, WATCHED, plural
from baton_operator.handlers import GATHER_S

LOOK = "GET inferenceservices"
"""A request of who looks at a service."""

SERVED = (
    *((one.api, one.kind) for one in WATCHED if not one.optional),
    ("v1", "Event"),
    ("coordination.k8s.io/v1", "Lease"),
    ("v1", "Namespace"),
    ("apiextensions.k8s.io/v1", "CustomResourceDefinition"),
)
"""kopf does not begin before it knows of the last two, though nobody lists them."""

Place = tuple[str, str]
"""API and plural."""


class FakeApi:
    """`async with FakeApi(folder) as api`; `api.kubeconfig` says how to reach it."""

    def __init__(self, folder: Path) -> None:
        self.kubeconfig = folder / "kubeconfig"
        self.answers: list[int] = []
        """Statuses of the next requests, one after the other, but for the Lease and for watches."""
        self.silent = False
        """With it, watches stay open and bring nothing."""
        self.requests: Counter[str] = Counter()
        self.watches: Counter[str] = Counter()
        self.objects: dict[tuple[str, str, str, str], Any] = {}
        """By API, plural, namespace and name."""
        self._kinds = {(api, plural(kind)): kind for api, kind in SERVED}
        self._applied: dict[tuple[str, str, str, str], Any] = {}
        self._events: list[tuple[int, Place, str, Any]] = []
        self._version = 100
        self._oldest = 0
        self._error: int | None = None
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
        made = {"apiVersion": "v1", "kind": "Config", "current-context": "main", **lists}
        self.kubeconfig.write_text(yaml.safe_dump(made))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def put(self, spec: Any, name: str = "chat", *, lose: bool = False) -> None:
        """Make or change an InferenceService; with `lose` no watch hears of it."""
        where = (API, "inferenceservices", "models", name)
        there = self.objects.get(where)
        generation = there["metadata"]["generation"] + 1 if there else 1
        metadata = {"name": name, "namespace": "models", "uid": f"uid-{name}", "generation": generation}
        made = {**(there or {}), "metadata": metadata, "spec": spec}
        await self._store(where, made, lose=lose)

    async def at_rest(self) -> None:
        """Nobody has looked at an InferenceService for as long as looks are gathered, several times over."""
        looks, since = -1, time.monotonic()
        while looks != self.requests[LOOK] or time.monotonic() - since < 6 * GATHER_S:
            if looks != self.requests[LOOK]:
                looks, since = self.requests[LOOK], time.monotonic()
            await asyncio.sleep(0.05)

    async def expire(self) -> None:
        """All watches end with the news that their versions are too old."""
        async with self._news:
            self._version += 1
            self._oldest = self._version
            self._news.notify_all()

    async def fail_watches(self, code: int) -> None:
        """All watches get an error that is not about their version."""
        async with self._news:
            self._error = code
            self._news.notify_all()

    def status(self, name: str = "chat") -> Any:
        return self.objects[API, "inferenceservices", "models", name].get("status", {})

    async def _store(self, where: tuple[str, str, str, str], made: Any, *, lose: bool = False) -> Any:
        api, resource, *_ = where
        event = "MODIFIED" if where in self.objects else "ADDED"
        async with self._news:
            self._version += 1
            kind = self._kinds[api, resource]
            metadata = {
                "uid": f"uid-{self._version}",
                **made["metadata"],
                "resourceVersion": str(self._version),
            }
            made = {**made, "apiVersion": api, "kind": kind, "metadata": metadata}
            self.objects[where] = made
            if not lose:
                self._events.append((self._version, (api, resource), event, made))
            self._news.notify_all()
        return made

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        if found := self._discovery(parts):
            return web.json_response(found)
        api, rest = ("v1", parts[2:]) if parts[0] == "api" else (f"{parts[1]}/{parts[2]}", parts[3:])
        namespace = ""
        if not rest:
            return _status(404)
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        resource, name, status = rest[0], rest[1] if len(rest) > 1 else "", len(rest) > 2
        if (api, resource) not in self._kinds:
            return _status(404)
        verb = "watch" if "watch" in request.query else request.method
        self.requests[f"{verb} {resource}"] += 1
        if resource != "leases" and verb != "watch" and self.answers:
            return _status(self.answers.pop(0))
        where = (api, resource, namespace, name)
        match request.method:
            case "GET" if verb == "watch":
                return await self._watch((api, resource), request)
            case "GET" if name:
                there = self.objects.get(where)
                return web.json_response(there) if there else _status(404)
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
                self.objects.pop(where, None)
                return web.json_response({})
        return await self._patch(where, json.loads(await request.text()), request.content_type, status)

    async def _patch(
        self, where: tuple[str, str, str, str], body: Any, kind: str, status: bool
    ) -> web.StreamResponse:
        there = self.objects.get(where)
        if kind == "application/apply-patch+yaml":
            made = _merged(_without(there or {}, self._applied.get(where, {}), body), body)
            self._applied[where] = body
            if there is not None and _same(there, made):
                return web.json_response(there)
        elif there is None:
            return _status(404)
        else:
            body.get("metadata", {}).pop("uid", None)
            made = _merged(there, {"status": body["status"]} if status else body)
        return web.json_response(await self._store(where, made))

    def _list(self, place: Place, namespace: str, request: web.Request) -> web.Response:
        wanted = [
            one
            for (*there, within, _), one in self.objects.items()
            if tuple(there) == place and namespace in ("", within) and _selected(one, request)
        ]
        return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": wanted})

    async def _watch(self, place: Place, request: web.Request) -> web.StreamResponse:
        seen = int(request.query["resourceVersion"])
        self.watches[place[1]] += 1
        stream = web.StreamResponse()
        await stream.prepare(request)

        async def send(kind: str, body: Any) -> None:
            await stream.write(json.dumps({"type": kind, "object": body}).encode() + b"\n")

        await send("BOOKMARK", {"kind": self._kinds[place], "metadata": {"resourceVersion": str(seen)}})
        while True:
            async with self._news:
                code = 410 if seen < self._oldest else self._error
                fresh = [one for one in self._events if one[0] > seen]
                if not code and not fresh:
                    await self._news.wait()
                    continue
            if self.silent:
                await asyncio.Event().wait()
            if code:
                self._error = None if code != 410 else self._error
                await send(
                    "ERROR", {"kind": "Status", "code": code, "message": "as told", "reason": "Expired"}
                )
                return stream
            for version, there, kind, body in fresh:
                seen = version
                if there == place and _selected(body, request):
                    await send(kind, body)

    def _discovery(self, parts: list[str]) -> Any:
        groups = sorted({api for api, _ in SERVED if "/" in api})
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
                        "namespaced": True,
                        "verbs": ["get", "list", "watch", "patch"],
                    }
                    for there, kind in SERVED
                    if there == api
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


def _merged(base: Any, over: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    made = {**base, **{name: _merged(base.get(name), value) for name, value in over.items()}}
    return {name: value for name, value in made.items() if value is not None}


def _without(there: Any, before: Any, now: Any) -> Any:
    """`there` without the fields that were applied before and are not any more."""
    if not isinstance(there, dict) or not isinstance(before, dict) or not isinstance(now, dict):
        return there
    kept = {name: value for name, value in there.items() if name not in before or name in now}
    return {name: _without(value, before.get(name), now.get(name)) for name, value in kept.items()}


def _same(there: Any, made: Any) -> bool:
    return bool({**made, "metadata": {**there["metadata"], **made["metadata"]}} == there)


def _status(code: int) -> web.Response:
    return web.json_response(
        {"kind": "Status", "code": code, "message": f"answer {code}, as told"}, status=code
    )
