"""
Adapters of pods: the client of the API of Baton and vLLM to list, load and unload, and a task for each pod.

vLLM loads in the process that computes, so a load may take as long as the current batch and, with a
repository of the Hub, as long as its download. A pod may answer anything: answers are bounded, and redirects
are not followed.

Each pod has at most one task, which carries out its work one request after the other. A caller waits for
tasks only briefly. Failed requests are repeated after a pause that doubles; an operator that restarts simply
tries again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import aiohttp

from baton_operator import answers
from baton_operator.adapters.decision import AdapterPod, PodWork

READ_S = 4.0
"""Time limit of a list in seconds."""

LOAD_S = 300.0
"""Time limit of a load or unload in seconds."""

ANSWER_LIMIT = 1 << 20
"""Maximum bytes of an answer."""

MESSAGE_LIMIT = 600

KEY_HINT = "The worker requires an API key. Set the operator's --worker-api-key-file."
NO_PATHS_HINT = "The worker does not serve {path}. Its image may be too old, or of another engine."


class AdapterApiError(Exception):
    """A pod did not do what was requested. The message says why."""


class AdapterApi:
    """Client of the workers of all services. Close it at the end."""

    def __init__(self, key_file: str = "", load_s: float = LOAD_S, read_s: float = READ_S) -> None:
        """`key_file`: file with the API key of the workers, read for each request; empty: no key."""
        self._key_file = key_file
        self._load_s = load_s
        self._read_s = read_s
        self._session: aiohttp.ClientSession | None = None

    async def adapters(self, url: str) -> Mapping[str, str]:
        """Return the path of each loaded adapter by its name. Raises AdapterApiError."""
        body = await self._answer("GET", url, "/v1/models", None, self._read_s)
        try:
            listed = json.loads(body)["data"]
            return {str(model["id"]): str(model.get("root") or "") for model in listed if model.get("parent")}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise AdapterApiError(f"{url}/v1/models returned an invalid list of models.") from error

    async def load(self, url: str, name: str, path: str) -> None:
        """Load an adapter. Raises AdapterApiError with the message of the worker."""
        body = {"lora_name": name, "lora_path": path}
        await self._answer("POST", url, "/v1/load_lora_adapter", body, self._load_s)

    async def unload(self, url: str, name: str) -> None:
        """Unload an adapter. Raises AdapterApiError with the message of the worker."""
        await self._answer("POST", url, "/v1/unload_lora_adapter", {"lora_name": name}, self._load_s)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _answer(
        self, method: str, url: str, path: str, body: Mapping[str, str] | None, limit_s: float
    ) -> bytes:
        try:
            async with asyncio.timeout(limit_s):
                status, content = await self._request(method, url + path, body)
        except TimeoutError as error:
            raise AdapterApiError(f"No answer from {url}{path} within {limit_s:g} s.") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise AdapterApiError(f"Cannot reach {url}{path}: {type(error).__name__}: {error}") from error
        if status == 200:
            return content
        raise AdapterApiError(_refusal(status, path, content))

    async def _request(self, method: str, url: str, body: Mapping[str, str] | None) -> tuple[int, bytes]:
        if self._session is None:
            # Each pod is asked rarely: connections would only go stale.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = answers.session(connector=connector)
        headers = answers.bearer(self._key_file)
        return await answers.fetch(self._session, method, url, limit=ANSWER_LIMIT, json=body, headers=headers)


def _refusal(status: int, path: str, content: bytes) -> str:
    """Return the message of an error in vLLM's shape, or what it means."""
    try:
        answer: Any = json.loads(content)
        error = answer.get("error")
        message = error.get("message", "") if isinstance(error, dict) else ""
    except (ValueError, AttributeError):
        message = ""
    if status in (401, 403) and not message:
        message = KEY_HINT
    if status == 404 and not message:
        message = NO_PATHS_HINT.format(path=path)
    text = " ".join(str(message).split()) or f"The worker answered {path} without a reason."
    return f"{status}: {text[:MESSAGE_LIMIT]}"


CONCURRENCY = 32
"""Maximum reads of one service, and maximum loading tasks of all services, at the same time."""

FIRST_S = 1.0
LIMIT_S = 300.0
"""Limits of the exponential backoff in seconds."""

READING = ""
"""Name of the attempt to read the adapters of a pod; the others have the name of an adapter."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The last failure of an attempt at a pod."""

    message: str
    count: int
    due: float
    """When the next attempt may begin."""


class AdapterRequests(Protocol):
    """Requests to pods; see baton_operator.adapters.worker_api.AdapterApi."""

    async def adapters(self, url: str) -> Mapping[str, str]: ...

    async def load(self, url: str, name: str, path: str) -> None: ...

    async def unload(self, url: str, name: str) -> None: ...


class PodLoads:
    """Requests to the pods of all services. `clock` is monotonic."""

    def __init__(self, workers: AdapterRequests, clock: Callable[[], float]) -> None:
        self._workers = workers
        self._clock = clock
        self._failures: dict[tuple[str, str], Failure] = {}
        """By pod key and name of the attempt."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """By pod key."""
        self._slots = asyncio.Semaphore(CONCURRENCY)

    async def read(self, pods: Sequence[AdapterPod]) -> list[AdapterPod]:
        """Return the pods with what they list now."""
        limit = asyncio.Semaphore(CONCURRENCY)

        async def read(pod: AdapterPod) -> AdapterPod:
            async with limit:
                return await self._read(pod)

        return await asyncio.gather(*map(read, pods))

    def due(self, pods: Sequence[AdapterPod], work: Mapping[str, PodWork]) -> dict[str, PodWork]:
        """Return the work that may start now, by pod key."""
        todo = {
            pod.key: self._due(pod, work[pod.key])
            for pod in pods
            if pod.key in work and pod.key not in self._tasks
        }
        return {key: one for key, one in todo.items() if one.unload or one.load}

    def start(self, pods: Sequence[AdapterPod], work: Mapping[str, PodWork]) -> list[asyncio.Task[None]]:
        """Start the work that is due, and return its tasks."""
        todo, started = self.due(pods, work), []
        for pod in pods:
            if pod.key in todo:
                task = asyncio.create_task(self._do(pod, todo[pod.key]))
                self._tasks[pod.key] = task
                task.add_done_callback(partial(self._ended, pod.key))
                started.append(task)
        return started

    def errors(self) -> Mapping[tuple[str, str], str]:
        """Return the last error by pod key and name of the adapter."""
        return {key: failure.message for key, failure in self._failures.items()}

    def is_running(self, pods: Sequence[AdapterPod]) -> bool:
        """Whether a task runs at one of the pods."""
        return any(pod.key in self._tasks for pod in pods)

    def next_s(self, pods: Sequence[AdapterPod]) -> float | None:
        """Return the seconds until a failed request is repeated; None if none is."""
        keys = {pod.key for pod in pods}
        waits = [failure.due for (pod, _), failure in self._failures.items() if pod in keys]
        return max(0.0, min(waits) - self._clock()) if waits else None

    def keep(self, pods: Collection[str], prefix: str) -> None:
        """Forget the errors of all pods whose key begins with `prefix`, except `pods`."""
        for pod, name in list(self._failures):
            if pod.startswith(prefix) and pod not in pods:
                del self._failures[pod, name]

    async def _read(self, pod: AdapterPod) -> AdapterPod:
        pod = replace(pod, models=None, error="", busy=pod.key in self._tasks)
        if not pod.host or not pod.template.adapters:
            return pod
        if not self._is_due(pod, READING):
            return replace(pod, error=self._failures[pod.key, READING].message)
        try:
            models = await self._workers.adapters(pod.url)
        except AdapterApiError as error:
            if pod.ready:  # one that starts refuses connections, and is read again once it is ready
                self._failed(pod, READING, error)
            return replace(pod, error=str(error))
        self._failures.pop((pod.key, READING), None)
        return replace(pod, models=models)

    def _ended(self, key: str, _: asyncio.Task[None]) -> None:
        del self._tasks[key]

    def _due(self, pod: AdapterPod, work: PodWork) -> PodWork:
        unload = tuple(name for name in work.unload if self._is_due(pod, name))
        load = tuple((name, path) for name, path in work.load if self._is_due(pod, name))
        return PodWork(unload, load)

    def _is_due(self, pod: AdapterPod, name: str) -> bool:
        failure = self._failures.get((pod.key, name))
        return failure is None or failure.due <= self._clock()

    def _failed(self, pod: AdapterPod, name: str, error: AdapterApiError) -> None:
        before = self._failures.get((pod.key, name))
        count = before.count + 1 if before else 1
        pause = min(LIMIT_S, FIRST_S * 2.0 ** min(count - 1, 20))
        self._failures[pod.key, name] = Failure(str(error), count, self._clock() + pause)

    async def _do(self, pod: AdapterPod, work: PodWork) -> None:
        async with self._slots:
            for name in work.unload:
                await self._try(pod, name, self._workers.unload(pod.url, name))
            for name, path in work.load:
                await self._try(pod, name, self._load(pod, name, path))

    async def _load(self, pod: AdapterPod, name: str, path: str) -> None:
        await self._workers.load(pod.url, name, path)
        if (await self._workers.adapters(pod.url)).get(name) != path:
            raise AdapterApiError(f"The worker accepted {name} from {path}, but does not list it.")

    async def _try(self, pod: AdapterPod, name: str, request: Coroutine[None, None, None]) -> None:
        try:
            await request
        except AdapterApiError as error:
            self._failed(pod, name, error)
        else:
            self._failures.pop((pod.key, name), None)
