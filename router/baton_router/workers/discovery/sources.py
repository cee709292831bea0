"""
The sources of workers: flags, DNS and Kubernetes, as the settings name them.

Flags are read once at startup. DNS and Kubernetes are watched, each in its own task that no other failure
affects.
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
from baton_router.settings import DnsName, RouterSettings
from baton_router.workers.discovery.kubernetes import KubernetesWorkers
from baton_router.workers.discovery.listed import ListedWorker

FLAGS_SOURCE = "flags"

RETRY_S = 10.0
"""Seconds after which a failed source is watched again."""

OnWorkers = Callable[[str, frozenset[ListedWorker]], None]
"""Takes a source's name and all its workers."""


class WorkerSource(Protocol):
    """A source of workers."""

    @property
    def trouble(self) -> str:
        """Why its list may be outdated, as a clause; empty if it is not."""
        ...

    async def watch(self, on_list: Callable[[frozenset[ListedWorker]], None]) -> None:
        """Call `on_list` with all workers whenever they may have changed; does not end."""
        ...


class WorkerSources:
    """All sources of this router."""

    def __init__(self, settings: RouterSettings, rng: random.Random) -> None:
        decode = _flags((*settings.decode, *settings.worker), Role.DECODE)
        self.flags = frozenset((*decode, *_flags(settings.prefill, Role.PREFILL)))
        secure = sorted(flag.name for flag in self.flags if flag.secure)
        if secure and not settings.tls_folder:
            raise SetupError(
                f"https://{secure[0]} wants a certificate of this router: name the folder that holds it with "
                "--tls-folder."
            )
        self._sources: dict[str, WorkerSource] = {}
        for role, names in ((Role.DECODE, settings.decode_dns), (Role.PREFILL, settings.prefill_dns)):
            for name in names:
                from baton_router.workers.discovery.kubernetes import DnsWorkers

                query = DnsName.parse(name)
                self._sources[f"DNS: {role} {name}"] = DnsWorkers(
                    query, role, settings.dns_interval_s, secure=bool(settings.tls_folder)
                )
        if settings.kubernetes_selector:
            self._sources["Kubernetes"] = KubernetesWorkers(
                kubernetes_access(settings), settings.kubernetes_selector, settings.kubernetes_port, rng
            )
        self._silent = set(self._sources)
        """Sources that have not reported yet."""

    def complete(self) -> bool:
        """Whether all sources have reported."""
        return not self._silent

    def why_none(self) -> str:
        """Why there is no decode worker, as a clause."""
        if not self._sources:
            return "none is configured: name one with --decode http://HOST:PORT"
        troubles = [source.trouble for source in self._sources.values() if source.trouble]
        if troubles:
            return "; ".join(troubles)
        names = " and ".join(sorted(self._silent or self._sources))
        one = len(self._silent or self._sources) == 1
        if self._silent:
            return f"{names} {'has' if one else 'have'} not reported yet"
        return f"{names} {'lists' if one else 'list'} none"

    async def watch(self, on_workers: OnWorkers, background: BackgroundTasks) -> None:
        """Report the workers of every source until cancelled. If a source fails, its workers stay."""
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
    """Access to the API server."""
    return KubernetesAccess(
        settings.kubernetes_api, Path(settings.kubernetes_account), settings.kubernetes_namespace
    )
