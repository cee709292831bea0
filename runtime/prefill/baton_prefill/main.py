"""The process of a prefill worker: a worker and its control server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from baton_api import mutual_tls
from baton_api.announcements import Announcer
from baton_engine import service
from baton_engine.model.progress import Progress
from baton_engine.service import RoleServices
from baton_engine.settings import WorkerSettings
from baton_engine.tiers.peers import PeerCaches
from baton_engine.worker import Worker
from baton_prefill.server import PrefillServer, PromptLimits, ServerLimits


async def run(settings: WorkerSettings, announce: Announcer, progress: Progress) -> None:
    """Serve until a signal says to stop; see `baton_engine.service.run`."""
    await service.run(settings, announce, progress, prefill)


@contextlib.asynccontextmanager
async def prefill(worker: Worker) -> AsyncIterator[RoleServices]:
    """Compute prompts for decode workers."""
    assert worker.transfer is not None

    settings = worker.settings
    peers = None
    if settings.kv_peers:
        peers = PeerCaches(
            worker.engine,
            worker.transfer,
            worker.identity,
            secret=settings.ticket_secret.encode(),
            hung_s=settings.transfer_deadline_s,
            tls=mutual_tls.client(settings.tls_folder, settings.tls_name),
        )
    prompts = PromptLimits(worker.spec.vocab, worker.engine.limits.max_model_len - 1, worker.cache.block_size)
    server = PrefillServer(
        worker.client,
        worker.engine,
        worker.transfer,
        worker.identity,
        ServerLimits(prompt=prompts),
        worker.grammars.prepare,
        load=worker.control_load,
        host=settings.control_host,
        port=settings.control_port,
        advertise=settings.advertise_host,
        secret=settings.ticket_secret.encode(),
        tls=mutual_tls.server(settings.tls_folder, settings.tls_name),
        tracing=worker.tracing,
        adapters=worker.adapters,
        peer_caches=peers,
    )
    await server.start()
    try:
        yield RoleServices(control=server.address, drain=server.drain)
    finally:
        await server.close()
        if peers is not None:
            await peers.close()
