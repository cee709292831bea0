"""
What all engines' health checks have in common: requests, metrics in Prometheus' text format, and layouts.

A layout is a text of the properties of a worker that decide whether it forms pairs: `Load.compatibility` of
other engines. Workers with equal texts form pairs; the differences of others say why not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from baton_api.workers import EngineKind, Load, Role
from baton_http.upstream import Headers, Reply, ReplyTooLarge, Upstream, fetch

REPLY_LIMIT = 4 * 1024**2
"""Maximum bytes of a reply; metrics of a worker are the longest."""

OK = 200
UNAUTHORIZED = 401

INVALID_REPLY_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ReplyTooLarge)
"""Errors of reading a reply that is not a worker's load."""


class ListedModel(msgspec.Struct):
    """An entry of `/v1/models`. vLLM and SGLang name an adapter's model as `parent`."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    data: list[ListedModel]


_models = msgspec.json.Decoder(ModelList)


class EngineChecks(Protocol):
    """The health checks of one worker, by one engine. Keeps what was learned from one to the next."""

    async def load(self) -> tuple[Load, str]:
        """
        The worker's load, and why it takes no requests, as a clause (empty if it does).

        Raises UpstreamLost, and `INVALID_REPLY_ERRORS` for an invalid reply.
        """
        ...


class WorkerApi:
    """Short requests to one worker."""

    def __init__(self, upstream: Upstream, role: Role, authorizing: Headers, secret: bytes = b"") -> None:
        """`role` is the one under which it is listed. `authorizing` are headers. `secret` signs tickets."""
        self.upstream = upstream
        self.role = role
        self.secret = secret
        self._headers = authorizing

    async def get(self, target: str, more: Headers | None = None) -> Reply:
        """Raises UpstreamLost, and DecodeError if the worker requires another API key."""
        reply = await fetch(self.upstream, "GET", target, [*self._headers, *(more or ())], limit=REPLY_LIMIT)
        if reply.status == UNAUTHORIZED:
            raise msgspec.DecodeError(
                "it requires another API key: set BATON_ROUTER_WORKER_API_KEY to the workers' key"
            )
        return reply

    async def post(self, target: str, body: dict[str, Any]) -> Reply:
        given = [*self._headers, (b"content-type", b"application/json")]
        return await fetch(self.upstream, "POST", target, given, msgspec.json.encode(body), limit=REPLY_LIMIT)

    async def models(self) -> list[ListedModel]:
        """The served models and adapters. Raises UpstreamLost and INVALID_REPLY_ERRORS."""
        reply = await self.get("/v1/models")
        if reply.status != OK:
            raise msgspec.DecodeError(f"GET /v1/models was answered with {reply.status}")
        return _models.decode(reply.body).data

    async def ready(self, target: str) -> str:
        """Why the worker takes no requests, as a clause; empty if `target` is answered with 200."""
        reply = await self.get(target)
        return "" if reply.status == OK else f"GET {target} was answered with {reply.status}"


_SEPARATOR = "; "


def layout_text(engine: EngineKind, properties: dict[str, str]) -> str:
    """
    Return the engine and the properties as one text.

    >>> layout_text(EngineKind.VLLM, {"version": "0.32.0", "block size": "16"})
    'engine: vllm; version: 0.32.0; block size: 16'
    """
    return _SEPARATOR.join(f"{name}: {value}" for name, value in {"engine": engine, **properties}.items())


def layout_differences(one: str, other: str) -> list[tuple[str, str, str]]:
    """
    Return name and both values of each property that differs.

    >>> layout_differences("engine: vllm; block size: 16", "engine: vllm; block size: 32")
    [('block size', '16', '32')]
    """
    ours, theirs = _properties(one), _properties(other)
    names = dict.fromkeys((*ours, *theirs))
    return [
        (name, ours.get(name, "unknown"), theirs.get(name, "unknown"))
        for name in names
        if ours.get(name) != theirs.get(name)
    ]


def _properties(layout: str) -> dict[str, str]:
    """The properties of a layout; a digest, as Baton's workers report it, is one property."""
    if ": " not in layout:
        return {"KV layout": layout}
    pairs = (one.partition(": ") for one in layout.split(_SEPARATOR))
    return {name: value for name, _, value in pairs}


def _samples(text: str, name: str) -> Iterator[tuple[str, str]]:
    """
    Labels and value of each sample of `name`.

    Searches for literals: a regular expression that looks at each line took 18 times as long.
    """
    text = f"\n{text}\n"
    for start in (f"\n{name}{{", f"\n{name} "):
        at = text.find(start)
        while at >= 0:
            at += len(start)
            end = text.index("\n", at)
            labels, _, value = text[at:end].rpartition("} ")
            yield labels, value
            at = text.find(start, end)


def total(text: str, name: str) -> float | None:
    """
    The sum of all samples of `name`; None without one.

    >>> total('vllm:num_requests_running{engine="0"} 2.0', "vllm:num_requests_running")
    2.0
    """
    values = [float(value) for _, value in _samples(text, name)]
    return sum(values) if values else None


def mean(text: str, name: str) -> float | None:
    """
    The mean of all samples of `name`, such as a ratio of each data-parallel rank; None without one.

    >>> mean('usage{engine="0"} 0.25\\nusage{engine="1"} 0.75', "usage")
    0.5
    """
    values = [float(value) for _, value in _samples(text, name)]
    return sum(values) / len(values) if values else None


def label_values(text: str, name: str) -> dict[str, str]:
    """The labels of the first sample of `name`; empty without one."""
    labels, _ = next(_samples(text, name), ("", ""))
    return dict(_LABEL.findall(labels))


_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
