"""
Reading, loading and unloading at pods, so that a pod that hangs holds up only itself.

Each pod has at most one task, which carries out its work one request after the other. A caller waits for
tasks only briefly. Failed requests are repeated after a pause that doubles; an operator that restarts simply
tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from baton_operator.adapters.decision import AdapterPod, PodWork
from baton_operator.adapters.worker_api import AdapterApiError

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
        return {key: one.message for key, one in self._failures.items()}

    def is_running(self, pods: Sequence[AdapterPod]) -> bool:
        """Whether a task runs at one of the pods."""
        return any(pod.key in self._tasks for pod in pods)

    def next_s(self, pods: Sequence[AdapterPod]) -> float | None:
        """Return the seconds until a failed request is repeated; None if none is."""
        keys = {pod.key for pod in pods}
        waits = [one.due for (pod, _), one in self._failures.items() if pod in keys]
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
