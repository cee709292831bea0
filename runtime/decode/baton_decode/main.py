"""The process of a decode worker: a worker and its connections to prefill workers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from baton_api import mutual_tls
from baton_api.announcements import Announcer
from baton_decode.prefill_workers import PrefillWorkers
from baton_engine import service
from baton_engine.model.progress import Progress
from baton_engine.service import RoleServices
from baton_engine.settings import WorkerSettings
from baton_engine.worker import Worker


async def run(settings: WorkerSettings, announce: Announcer, progress: Progress) -> None:
    """Serve until a signal says to stop; see `baton_engine.service.run`."""
    await service.run(settings, announce, progress, decode)


@contextlib.asynccontextmanager
async def decode(worker: Worker) -> AsyncIterator[RoleServices]:
    """Fetch prompts from the prefill workers that the router names."""
    assert worker.transfer is not None
    prefills = PrefillWorkers(
        worker.engine,
        worker.cache,
        worker.transfer,
        worker.identity,
        vocab=worker.spec.vocab,
        transfer_deadline_s=worker.settings.transfer_deadline_s,
        secret=worker.settings.ticket_secret.encode(),
        tls=mutual_tls.client(worker.settings.tls_folder, worker.settings.tls_name),
    )
    try:
        yield RoleServices(remote=prefills.remote)
    finally:
        await prefills.close()
