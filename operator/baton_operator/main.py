"""
The operator's process: it serves health checks, waits for the Lease, and then reconciles.

An operator that loses the Lease exits immediately without cleanup, because another one may work already.
The next leader derives all work from the cluster.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from kubernetes.aio.client.exceptions import ApiException

from baton_api.errors import SetupError
from baton_operator import work_queue
from baton_operator.adapters.pod_loads import PodLoads
from baton_operator.adapters.worker_api import AdapterApi
from baton_operator.cluster import api_server
from baton_operator.cluster.api_resources import API
from baton_operator.cluster.api_server import ApiServer
from baton_operator.cluster.cache import ObjectCache, ObjectChange
from baton_operator.cluster.events import EventPoster
from baton_operator.cluster.leadership import Leadership
from baton_operator.cluster.reflector import Reflectors
from baton_operator.cluster.state import ClusterReader
from baton_operator.health import HealthServer
from baton_operator.manifests.conditions import Transition
from baton_operator.manifests.mutual_tls import by_issuer
from baton_operator.manifests.objects import Manifest
from baton_operator.metrics import OperatorMetrics, ProcessMetrics
from baton_operator.reconcilers.batch_job import BatchJobReconciler
from baton_operator.reconcilers.inference_service import InferenceServiceReconciler
from baton_operator.reconcilers.lora_adapters import LoraAdapterReconciler
from baton_operator.reconcilers.plan import OperatorDefaults
from baton_operator.reconcilers.reconciler import Reconciler
from baton_operator.reconcilers.router_rollouts import RouterRollouts
from baton_operator.rollout import rollout_health
from baton_operator.rollout.rollout_health import RouterHealthSource
from baton_operator.scaling.autoscaler import Autoscaler
from baton_operator.scaling.prometheus import PrometheusClient
from baton_operator.scaling.roles import ScalingSettings
from baton_operator.settings import OperatorSettings
from baton_operator.work_queue import WorkQueue

log = logging.getLogger(__name__)

LOST = 1
"""Exit status of an operator that lost the Lease or its watches."""

CRDS_S = 5.0
"""Seconds between two checks for the custom resources."""

Listening = Callable[[str], None]


def run(settings: OperatorSettings, listening: Listening) -> None:
    """Run until SIGINT or SIGTERM; `listening` receives the URL of the server. Raises SetupError."""
    for name in ("worker_image", "router_image"):
        if not getattr(settings, name):
            flag = "--" + name.replace("_", "-")
            raise SetupError(f"No default {name.replace('_', ' ')} is set. Set {flag}.")
    asyncio.run(_run(settings, listening))


async def _run(settings: OperatorSettings, listening: Listening) -> None:
    clock = time.monotonic
    metrics = OperatorMetrics(clock)
    client = await api_server.connect(settings.kubeconfig)
    free = ApiServer(client, lambda: None, metrics.answered)
    me = settings.identity or f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    client.user_agent = f"baton-operator/{me}"  # identifies this operator in audit logs
    leadership = Leadership(
        free, settings.lease_namespace, settings.lease_name, me, clock, settings.namespaces
    )
    queue, scaling, adapters = (WorkQueue(clock, random.Random()) for _ in range(3))
    cache = ObjectCache(settings.namespaces, _waking(queue, scaling, adapters))
    api = ApiServer(client, leadership.guard, metrics.answered, cache)
    reflectors = Reflectors(
        free, cache, clock, random.Random(), settings.watch_silence_s, metrics.watches.seen
    )
    metrics.watch(ProcessMetrics(queue, leadership, reflectors))
    health = HealthServer(leadership, reflectors, metrics.text, clock)
    events = EventPoster(api, time.time)
    prometheus = PrometheusClient(
        settings.prometheus_url, settings.prometheus_token_file, settings.prometheus_ca_file
    )
    workers = AdapterApi(settings.worker_api_key_file)
    reconcilers = _reconcilers(settings, api, cache, metrics, events, prometheus, PodLoads(workers, clock))

    crews = [
        partial(work_queue.run_reconciler, one, reconcilers, metrics.reconciled, clock)
        for one in [queue, scaling, adapters] * settings.concurrency
    ]

    async def work() -> None:
        tasks.extend(map(asyncio.create_task, (leadership.keep(), events.run())))
        await leadership.wait_until_sole()
        await _served(free)
        tasks.extend(reflectors.run())
        health.led = True
        # Before the first list, existing objects would seem to be missing.
        tasks.append(asyncio.create_task(_after(reflectors.synced(), crews)))
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    tasks: list[asyncio.Task[None]] = []
    runner = await health.start(settings.host, settings.port)
    try:
        listening(f"http://{settings.host}:{health.port}")
        await _lead(leadership, work, tasks)
    finally:
        await prometheus.close()
        await workers.close()
        await runner.cleanup()
        await client.close()


def _waking(queue: WorkQueue, scaling: WorkQueue, adapters: WorkQueue) -> Callable[[ObjectChange], None]:
    """Return a listener that queues the keys of a change."""
    own = {work_queue.SCALING: scaling, work_queue.ADAPTERS: adapters}

    def changed(change: ObjectChange) -> None:
        for key, after_s in work_queue.keys_to_reconcile(change):
            own.get(key[0], queue).add(key, after_s)

    return changed


async def _after(ready: Awaitable[None], crews: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Run the tasks once `ready` is done; end when one of them fails."""
    await ready
    await asyncio.gather(*(work() for work in crews))


async def _lead(
    leadership: Leadership, work: Callable[[], Coroutine[Any, Any, None]], tasks: list[asyncio.Task[None]]
) -> None:
    """
    Wait for the Lease and work until a signal; exit the process if any of `tasks` ends.

    Raises SetupError if another operator manages the same services.
    """
    if not await _until_signal(leadership.take()):
        return
    try:
        if await _until_signal(work()):
            for task in tasks:
                if task.done() and (error := task.exception()):
                    log.error("The operator exits: %s: %s", type(error).__name__, error)
            os._exit(LOST)  # without cleanup: nothing may be written any more
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await leadership.release()


def _reconcilers(
    settings: OperatorSettings,
    api: ApiServer,
    cache: ObjectCache,
    metrics: OperatorMetrics,
    events: EventPoster,
    prometheus: PrometheusClient,
    loads: PodLoads,
) -> dict[str, Reconciler]:
    """Return the reconciler of each kind."""

    def tell(about: Manifest, transition: Transition) -> None:
        metrics.happened(about, transition)
        events.post(about, transition)

    issuer = by_issuer(settings.mutual_tls_issuer)
    images = OperatorDefaults(
        settings.worker_image,
        settings.router_image,
        issuer,
        settings.metrics_namespace,
        {"vLLM": settings.vllm_image, "SGLang": settings.sglang_image},
        settings.lease_namespace,
    )
    reader = ClusterReader(cache, RouterHealthSource(rollout_health.read_text, time.monotonic))
    scaling = ScalingSettings(settings.prometheus_url, settings.gpu_budget, settings.scaling_window_s)
    return {
        "InferenceService": InferenceServiceReconciler(
            api,
            reader,
            images,
            tell,
            metrics.services.stands,
            time.time,
            settings.resync_s,
            RouterRollouts(settings.router_rollouts),
        ),
        "BatchJob": BatchJobReconciler(api, cache, settings.router_image, tell, time.time, settings.resync_s),
        work_queue.ADAPTERS: LoraAdapterReconciler(api, cache, loads, tell, time.time),
        work_queue.SCALING: Autoscaler(api, reader, prometheus, scaling, tell, metrics.scaling, time.time),
    }


async def _until_signal(doing: Coroutine[Any, Any, None]) -> bool:
    """Return whether the work ended before SIGINT or SIGTERM, which process 1 of a pod ignores by default."""
    task = asyncio.create_task(doing)
    loop = asyncio.get_running_loop()
    stops = (signal.SIGINT, signal.SIGTERM)
    for stop in stops:
        loop.add_signal_handler(stop, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return False
    finally:
        for stop in stops:
            loop.remove_signal_handler(stop)
    return True


async def _served(api: ApiServer) -> None:
    """Wait until the cluster serves the custom resources."""
    warned = False
    while True:
        try:
            if await api.has(API):
                return
            if not warned:
                log.warning("The cluster does not serve %s. Install the CRDs of Baton (crds/).", API)
            warned = True
        except ApiException as error:
            log.warning("Cannot read which APIs the cluster serves: %s %s", error.status, error.reason)
        await asyncio.sleep(CRDS_S)
