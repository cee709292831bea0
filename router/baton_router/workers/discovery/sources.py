"""
All who list workers, as the settings name them.

Flags list theirs once, before anything else happens; DNS and Kubernetes are asked for as long as the router
runs, each in a task of its own that no failure of another concerns.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from baton_api.background import BackgroundTasks
from baton_api.errors import SetupError
from baton_api.metrics import BackgroundTask
from baton_api.workers import Role
from baton_http.kubernetes import KubernetesAccess
from baton_router.settings import RouterSettings
from baton_router.workers.discovery.dns import DnsName
from baton_router.workers.discovery.kubernetes import KubernetesWorkers
from baton_router.workers.discovery.listed import ListedWorker

FLAGS_SOURCE = "flags"

RETRY_S = 10.0
"""Seconds after which a source that cannot be followed at all is tried again."""

OnWorkers = Callable[[str, frozenset[ListedWorker]], None]
"""Takes a source's name and all workers that it knows of now."""


class WorkerSource(Protocol):
    """Somebody who lists workers."""

    @property
    def trouble(self) -> str:
        """Why its list may be an old one, as a clause; empty if it is not."""
        ...

    async def watch(self, on_list: Callable[[frozenset[ListedWorker]], None]) -> None:
        """Tell all workers at once, whenever there may be others; does not end by itself."""
        ...


class WorkerSources:
    """Whoever lists workers of this router."""

    def __init__(self, settings: RouterSettings, rng: random.Random) -> None:
        decode, prefill = _flags(settings.decode, Role.DECODE), _flags(settings.prefill, Role.PREFILL)
        self.flags = frozenset((*decode, *prefill))
        secure = sorted(one.name for one in self.flags if one.secure)
        if secure and not settings.tls_folder:
            raise SetupError(
                f"https://{secure[0]} wants a certificate of this router: name the folder that holds it with "
                "--tls-folder."
            )
        self._sources: dict[str, WorkerSource] = {}
        for role, names in ((Role.DECODE, settings.decode_dns), (Role.PREFILL, settings.prefill_dns)):
            for name in names:
                from baton_router.workers.discovery.dns import DnsWorkers

                query = DnsName.parse(name)
                self._sources[f"DNS: {role} {name}"] = DnsWorkers(
                    query, role, settings.dns_interval_s, secure=bool(settings.tls_folder)
                )
        if settings.kubernetes_selector:
            self._sources["Kubernetes"] = KubernetesWorkers(
                kubernetes_access(settings), settings.kubernetes_selector, settings.kubernetes_port, rng
            )
        self._silent = set(self._sources)
        """Those that have not told anything yet."""

    def complete(self) -> bool:
        """Whether all have said something."""
        return not self._silent

    def why_none(self) -> str:
        """Why there is no decode worker if there is none, as a clause."""
        if not self._sources:
            return "none is configured: name one with --decode http://HOST:PORT"
        troubles = [source.trouble for source in self._sources.values() if source.trouble]
        if troubles:
            return "; ".join(troubles)
        names = " and ".join(sorted(self._silent or self._sources))
        one = len(self._silent or self._sources) == 1
        if self._silent:
            return f"{names} {'has' if one else 'have'} not told yet"
        return f"{names} {'lists' if one else 'list'} none"

    async def watch(self, on_workers: OnWorkers, background: BackgroundTasks) -> None:
        """Tell what each source lists, until cancelled. Workers of a source that fails stay as they are."""
        async with asyncio.TaskGroup() as group:
            for name, source in self._sources.items():
                kept = self._run_source(name, source, partial(self._on_list, on_workers, name), background)
                group.create_task(kept, name=name)
            await asyncio.Event().wait()

    async def _run_source(
        self,
        name: str,
        source: WorkerSource,
        on_list: Callable[[frozenset[ListedWorker]], None],
        background: BackgroundTasks,
    ) -> None:
        while True:
            with background.guard(BackgroundTask.DISCOVERY, name):
                await source.watch(on_list)
            await asyncio.sleep(RETRY_S)

    def _on_list(self, on_workers: OnWorkers, name: str, listed: frozenset[ListedWorker]) -> None:
        self._silent.discard(name)
        on_workers(name, listed)


def _flags(urls: Iterable[str], role: Role) -> Iterable[ListedWorker]:
    for url in urls:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        yield ListedWorker(parts.hostname or "", port, role, secure=secure)


def kubernetes_access(settings: RouterSettings) -> KubernetesAccess:
    """Where the API server is, and who asks it."""
    return KubernetesAccess(
        settings.kubernetes_api, Path(settings.kubernetes_account), settings.kubernetes_namespace
    )
