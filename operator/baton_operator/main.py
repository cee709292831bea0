"""
The operator's process: health first, then the Lease, then the work.

Whoever loses the Lease ends at once, without cleaning up: somebody else may already be at it, and everything
that was begun is begun again from what there is.
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
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import kopf
from kubernetes.aio.client.exceptions import ApiException

from baton_api.errors import SetupError
from baton_operator import connection, crew, handlers, tries
from baton_operator.adapters import AdapterReconciler
from baton_operator.api_resources import API, OPTIONAL_APIS
from baton_operator.api_server import ApiServer
from baton_operator.batch_reconciler import BatchReconciler
from baton_operator.conditions import Transition
from baton_operator.events import Events
from baton_operator.figures import Figures, Process
from baton_operator.health import Health
from baton_operator.heartbeat import Heartbeat
from baton_operator.leadership import Leadership
from baton_operator.manifests.mutual_tls import by_issuer
from baton_operator.manifests.objects import Manifest
from baton_operator.observer import Observer
from baton_operator.plan import Images
from baton_operator.reconciler import Reconciler, ServiceReconciler
from baton_operator.router_rollouts import RouterRollouts
from baton_operator.scaling.autoscaler import Autoscaler
from baton_operator.scaling.prometheus import Prometheus
from baton_operator.scaling.settings import ScalingSettings
from baton_operator.settings import OperatorSettings
from baton_operator.tries import RouterTries
from baton_operator.work_queue import WorkQueue

log = logging.getLogger(__name__)

LOST = 1
"""Exit status of an operator that lost the Lease or its watches."""

CRDS_S = 5.0
"""Seconds between two looks for the custom resources."""

Listening = Callable[[str], None]


def run(settings: OperatorSettings, listening: Listening) -> None:
    """Operate until a signal says to stop; `listening` is told where it answers. Raises SetupError."""
    for name in ("worker_image", "router_image"):
        if not getattr(settings, name):
            flag = "--" + name.replace("_", "-")
            raise SetupError(f"Which image have pods that name none? Give it by {flag}.")
    handlers.quiet()
    asyncio.run(_run(settings, listening))


async def _run(settings: OperatorSettings, listening: Listening) -> None:
    clock = time.monotonic
    figures = Figures(clock)
    client = await connection.client(settings.kubeconfig)
    free = ApiServer(client, lambda: None, figures.answered)
    me = settings.identity or f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    client.user_agent = f"baton-operator/{me}"  # audit logs tell one operator from another
    leadership = Leadership(free, settings.lease_namespace, settings.lease_name, me, clock)
    api = ApiServer(client, leadership.guard, figures.answered)
    # It has to lie where watches look.
    where = settings.namespaces[0] if settings.namespaces else settings.lease_namespace
    heartbeat = Heartbeat(api, where, settings.lease_name, clock)
    queue, scaling = (WorkQueue(clock, random.Random()) for _ in range(2))
    figures.watch(Process(queue, leadership, heartbeat))
    health = Health(leadership, heartbeat, figures.text, clock)
    runner = await health.start(settings.host, settings.port)
    try:
        listening(f"http://{settings.host}:{health.port}")
        if not await _until_signal(leadership.take()):
            return
        events = Events(api, time.time)
        prometheus = Prometheus(
            settings.prometheus_url, settings.prometheus_token_file, settings.prometheus_ca_file
        )
        reconcilers = _reconcilers(settings, api, figures, events, prometheus)
        work = [
            leadership.keep(),
            heartbeat.run(),
            events.run(),
            *(
                crew.work(one, reconcilers, figures.reconciled, clock)
                for one in (queue, scaling)
                for _ in range(settings.concurrency)
            ),
        ]
        # kopf ends whatever was begun after it, so all of this is begun before.
        tasks = [asyncio.create_task(one) for one in work]
        if not await _until_signal(_served(free)):
            await leadership.release()
            return
        heartbeat.restart()
        health.led = True
        login = partial(connection.for_kopf, settings.kubeconfig)
        registry = handlers.registry(
            login, queue, scaling, heartbeat, figures.watches.seen, await _optional(free)
        )
        watching = asyncio.create_task(
            kopf.operator(
                registry=registry,
                settings=handlers.settings(settings.watch_silence_s),
                clusterwide=not settings.namespaces,
                namespaces=settings.namespaces,
            )
        )
        await asyncio.wait([watching, *tasks], return_when=asyncio.FIRST_COMPLETED)
        _end_if_broken(watching, tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await prometheus.close()
        await leadership.release()
    finally:
        await runner.cleanup()
        await client.close()


def _reconcilers(
    settings: OperatorSettings, api: ApiServer, figures: Figures, events: Events, prometheus: Prometheus
) -> dict[str, Reconciler]:
    """Who looks after each kind."""

    def tell(about: Manifest, transition: Transition) -> None:
        figures.happened(about, transition)
        events.tell(about, transition)

    issuer = by_issuer(settings.mutual_tls_issuer)
    images = Images(settings.worker_image, settings.router_image, issuer, settings.metrics_namespace)
    observer = Observer(api, time.monotonic, RouterTries(tries.read, time.monotonic))
    scaling = ScalingSettings(settings.prometheus_url, settings.gpu_budget, settings.scaling_window_s)
    return {
        "InferenceService": ServiceReconciler(
            api,
            observer,
            images,
            tell,
            figures.services.stands,
            time.time,
            settings.resync_s,
            RouterRollouts(settings.router_rollouts),
        ),
        "BatchJob": BatchReconciler(api, settings.router_image, tell, time.time, settings.resync_s),
        "LoraAdapter": AdapterReconciler(api, time.time, settings.resync_s),
        "Scaling": Autoscaler(api, observer, prometheus, scaling, tell, figures.scaling, time.time),
    }


async def _until_signal(doing: Coroutine[Any, Any, None]) -> bool:
    """Whether it was done before somebody said to stop: a pod's first process hears no signal by itself."""
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
    """Wait for the custom resources: kopf looks for them only once."""
    said = False
    while True:
        try:
            if await api.has(API):
                return
            if not said:
                log.warning("The cluster does not know %s: install Baton's CRDs (crds/).", API)
            said = True
        except ApiException as error:
            log.warning("The API server does not say what it serves: %s %s", error.status, error.reason)
        await asyncio.sleep(CRDS_S)


async def _optional(api: ApiServer) -> list[str]:
    """Which optional APIs the cluster has now; those that come later are heard of at the next start."""
    names = sorted(OPTIONAL_APIS)
    try:
        return [name for name in names if await api.has(name)]
    except ApiException as error:
        log.warning("The API server does not say what it serves: %s %s", error.status, error.reason)
        return []


def _end_if_broken(watching: asyncio.Task[None], tasks: list[asyncio.Task[None]]) -> None:
    """The Lease, a watch or a worker is gone: nothing that could still be written should be."""
    broken = [task for task in tasks if task.done()]
    if watching.done() and watching.exception():
        broken.append(watching)
    for task in broken:
        if error := task.exception():
            log.error("The operator ends: %s: %s", type(error).__name__, error)
    if broken:
        os._exit(LOST)
