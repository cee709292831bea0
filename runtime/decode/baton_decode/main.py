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
from baton_engine.transfer.server import ControlServer
from baton_engine.worker import Worker


async def run(settings: WorkerSettings, announce: Announcer, progress: Progress) -> None:
    """Serve until a signal says to stop; see `baton_engine.service.run`."""
    await service.run(settings, announce, progress, decode)


@contextlib.asynccontextmanager
async def decode(worker: Worker) -> AsyncIterator[RoleServices]:
    """Fetch prompts from the prefill workers that the router names, and let them read cached blocks."""
    assert worker.transfer is not None
    settings, secret = worker.settings, worker.settings.ticket_secret.encode()
    async with contextlib.AsyncExitStack() as stack:
        server = None
        if settings.kv_peers:
            server = ControlServer(
                worker.engine,
                worker.transfer,
                worker.identity,
                load=worker.control_load,
                host=settings.control_host,
                port=settings.control_port,
                advertise=settings.advertise_host,
                secret=secret,
                tls=mutual_tls.server(settings.tls_folder, settings.tls_name),
            )
            await server.start()
            stack.push_async_callback(server.close)
        prefills = PrefillWorkers(
            worker.engine,
            worker.cache,
            worker.transfer,
            worker.identity,
            vocab=worker.spec.vocab,
            transfer_deadline_s=settings.transfer_deadline_s,
            secret=secret,
            source="" if server is None else server.address,
            tls=mutual_tls.client(settings.tls_folder, settings.tls_name),
        )
        stack.push_async_callback(prefills.close)
        yield RoleServices(remote=prefills.remote, drain=None if server is None else server.drain)
