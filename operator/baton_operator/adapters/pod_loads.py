"""
Reading, loading and unloading at pods, so that a pod that hangs holds up only itself.

Each pod has at most one task, which carries out its work one request after the other. A caller waits for
tasks only briefly. Failed requests are repeated after a pause that doubles.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from baton_operator.adapters.attempts import READING, Attempts
from baton_operator.adapters.decision import AdapterPod, PodWork
from baton_operator.adapters.worker_api import AdapterApiError

CONCURRENCY = 32
"""Maximum reads of one service, and maximum loading tasks of all services, at the same time."""


class AdapterRequests(Protocol):
    """Requests to pods; see baton_operator.adapters.worker_api.AdapterApi."""

    async def adapters(self, url: str) -> Mapping[str, str]: ...

    async def load(self, url: str, name: str, path: str) -> None: ...

    async def unload(self, url: str, name: str) -> None: ...


class PodLoads:
    """Requests to the pods of all services. `clock` is monotonic."""

    def __init__(self, workers: AdapterRequests, clock: Callable[[], float]) -> None:
        self._workers = workers
        self._attempts = Attempts(clock)
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
        return self._attempts.errors()

    def is_running(self, pods: Sequence[AdapterPod]) -> bool:
        """Whether a task runs at one of the pods."""
        return any(pod.key in self._tasks for pod in pods)

    def next_s(self, pods: Sequence[AdapterPod]) -> float | None:
        """Return the seconds until a failed request is repeated; None if none is."""
        return self._attempts.next_s({pod.key for pod in pods})

    def keep(self, pods: Collection[str], prefix: str) -> None:
        """Forget the errors of all pods whose key begins with `prefix`, except `pods`."""
        self._attempts.keep(pods, prefix)

    async def _read(self, pod: AdapterPod) -> AdapterPod:
        pod = replace(pod, models=None, error="", busy=pod.key in self._tasks)
        if not pod.address or not pod.template.adapters:
            return pod
        if not self._attempts.is_due(pod.key):
            return replace(pod, error=self.errors()[pod.key, READING])
        try:
            models = await self._workers.adapters(pod.url)
        except AdapterApiError as error:
            if pod.ready:  # one that starts refuses connections, and is read again once it is ready
                self._attempts.failed(pod.key, str(error))
            return replace(pod, error=str(error))
        self._attempts.succeeded(pod.key)
        return replace(pod, models=models)

    def _ended(self, key: str, _: asyncio.Task[None]) -> None:
        del self._tasks[key]

    def _due(self, pod: AdapterPod, work: PodWork) -> PodWork:
        def is_due(name: str) -> bool:
            return self._attempts.is_due(pod.key, name)

        unload = tuple(filter(is_due, work.unload))
        load = tuple((name, path) for name, path in work.load if is_due(name))
        return PodWork(unload, load)

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
            self._attempts.failed(pod.key, str(error), name)
        else:
            self._attempts.succeeded(pod.key, name)
