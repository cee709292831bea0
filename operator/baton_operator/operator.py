"""
The operator behind the handlers: its parts, and when each of them runs.

Kopf passes it to each handler as `memo`. `start` waits for the Lease. An operator that loses the Lease, or
one of its tasks, exits immediately without cleanup, because another one may work already. The next leader
derives all work from the cluster.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
import uuid
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import kopf
from aiohttp import web
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.exceptions import ApiException

from baton_api.errors import SetupError
from baton_operator import answers, work_queue
from baton_operator.adapters.worker_api import AdapterApi, PodLoads
from baton_operator.cluster import api_server
from baton_operator.cluster.api_resources import API
from baton_operator.cluster.api_server import ApiServer
from baton_operator.cluster.cache import ObjectCache, ObjectChange
from baton_operator.cluster.events import EventPoster
from baton_operator.cluster.leadership import Leadership
from baton_operator.cluster.reflector import Reflectors
from baton_operator.cluster.rollout_health import RouterHealthSource
from baton_operator.cluster.state import ClusterReader
from baton_operator.health import HealthServer
from baton_operator.kinds.engine import EngineType
from baton_operator.manifests.engines import ENGINES
from baton_operator.manifests.mutual_tls import by_issuer
from baton_operator.manifests.objects import Manifest, Transition
from baton_operator.metrics import OperatorMetrics, ProcessMetrics
from baton_operator.reconcilers.batch_job import BatchJobReconciler
from baton_operator.reconcilers.inference_service import InferenceServiceReconciler
from baton_operator.reconcilers.lora_adapters import LoraAdapterReconciler
from baton_operator.reconcilers.plan import OperatorDefaults, RouterRollouts
from baton_operator.reconcilers.reconciler import Reconciler
from baton_operator.scaling.autoscaler import Autoscaler
from baton_operator.scaling.prometheus import PrometheusClient
from baton_operator.scaling.roles import ScalingSettings
from baton_operator.settings import OperatorSettings
from baton_operator.work_queue import WorkQueue

log = logging.getLogger(__name__)

LOST = 1
"""Exit status of an operator that lost the Lease or one of its tasks."""

CRDS_S = 5.0
"""Seconds between two checks for the custom resources."""

Listening = Callable[[str], None]
"""Receives the URL of the server for health and metrics."""


class Operator:
    """One operator. Create it in the event loop in which it runs."""

    def __init__(self, settings: OperatorSettings, client: ApiClient, listening: Listening) -> None:
        """`client`: closed by `stop`."""
        clock = time.monotonic
        me = settings.identity or f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"
        client.user_agent = f"baton-operator/{me}"  # identifies this operator in audit logs
        self.failure: SetupError | None = None
        """Why it could not start."""
        self._settings = settings
        self._client = client
        self._listening = listening
        metrics = OperatorMetrics(clock)
        self._free = ApiServer(client, lambda: None, metrics.answered)
        self._leadership = Leadership(
            self._free, settings.lease_namespace, settings.lease_name, me, clock, settings.namespaces
        )
        queue, scaling, adapters = (WorkQueue(clock, random.Random()) for _ in range(3))
        self._queues = {work_queue.SCALING: scaling, work_queue.ADAPTERS: adapters}
        self._queue = queue
        self._cache = ObjectCache(settings.namespaces, self._changed)
        self._reflectors = Reflectors(
            self._free, self._cache, clock, random.Random(), settings.watch_silence_s, metrics.watches.seen
        )
        self._seen = metrics.watches.seen
        metrics.watch(ProcessMetrics(queue, self._leadership, self._reflectors))
        self._health = HealthServer(self._leadership, self._reflectors, metrics.text, clock)
        self._server: web.AppRunner | None = None
        api = ApiServer(client, self._leadership.guard, metrics.answered, self._cache)
        self._events = EventPoster(api, time.time)
        self._prometheus = PrometheusClient(
            settings.prometheus_url, settings.prometheus_token_file, settings.prometheus_ca_file
        )
        self._workers = AdapterApi(settings.worker_api_key_file)
        self._reconcilers = self._all_reconcilers(api, metrics, PodLoads(self._workers, clock))
        self._record = metrics.reconciled
        self._tasks: list[asyncio.Task[None]] = []
        self._leads = False
        self._listed: set[str] = set()
        """UIDs of the custom resources that kopf knows."""

    def __copy__(self) -> Operator:
        """Kopf gives each object a copy of the memo. All share this one."""
        return self

    async def start(self) -> None:
        """Serve health, wait for the Lease, and start to work. Raises SetupError if another operator manages
        the same services.
        """
        try:
            self._server = await self._health.start(self._settings.host, self._settings.port)
            self._listening(f"http://{self._settings.host}:{self._health.port}")
            await self._leadership.take()
            self._leads = True
            self._begin(self._leadership.keep(), self._events.run())
            await self._leadership.wait_until_sole()
            await self._served()
        except BaseException as error:
            # Kopf cleans up only after a start that succeeded.
            self.failure = error if isinstance(error, SetupError) else None
            await self.stop()
            raise
        self._begin(*self._reflectors.run(), self._work())
        self._health.led = True

    async def stop(self) -> None:
        """Stop all work, and let the next operator begin at once."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._leads:
            await self._leadership.release()
        await self._prometheus.close()
        await self._workers.close()
        if self._server is not None:
            await self._server.cleanup()
        await self._client.close()

    async def connection_info(self) -> kopf.ConnectionInfo:
        return await api_server.connection_info(self._client)

    def happened(self, kind: str, event: kopf.RawEvent) -> None:
        """Put an event of a custom resource into the store."""
        manifest: Manifest = dict(event["object"])
        store = self._cache.store(kind, manifest["metadata"]["namespace"])
        if store is None:
            return
        uid = manifest["metadata"]["uid"]
        if event["type"] is None and uid in self._listed:
            # Kopf lists again, and does not compare.
            self._reflectors.doubt(kind)
        if event["type"] == "DELETED":
            self._listed.discard(uid)
        else:
            self._listed.add(uid)
        self._seen(store.resource.plural)
        store.happened(event["type"] or "ADDED", manifest)

    def _changed(self, change: ObjectChange) -> None:
        """Queue the keys of a change in the store."""
        service = change.namespace, change.service
        if change.by_others and change.resource.pruned and self._cache.get("InferenceService", *service):
            # Kubernetes deletes the objects of a service after the service.
            self._reflectors.doubt("InferenceService")
        for key, after_s in work_queue.keys_to_reconcile(change):
            self._queues.get(key[0], self._queue).add(key, after_s)

    def _begin(self, *work: Coroutine[Any, Any, None] | asyncio.Task[None]) -> None:
        for one in work:
            task = asyncio.ensure_future(one)
            self._tasks.append(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Exit the process: each task runs as long as the operator works."""
        if task not in self._tasks:
            return
        if not task.cancelled() and (error := task.exception()):
            log.error("The operator exits: %s: %s", type(error).__name__, error)
        os._exit(LOST)  # without cleanup: nothing may be written any more

    async def _work(self) -> None:
        """Reconcile due keys. Before the first list, existing objects would seem to be missing."""
        await self._reflectors.synced()
        queues = [self._queue, *self._queues.values()] * self._settings.concurrency
        reconcile = partial(work_queue.run_reconciler, record=self._record, clock=time.monotonic)
        await asyncio.gather(*(reconcile(queue, self._reconcilers) for queue in queues))

    async def _served(self) -> None:
        """Wait until the cluster serves the custom resources."""
        warned = False
        while True:
            try:
                if await self._free.has(API):
                    return
                if not warned:
                    log.warning("The cluster does not serve %s. Install the CRDs of Baton (crds/).", API)
                warned = True
            except ApiException as error:
                log.warning("Cannot read which APIs the cluster serves: %s %s", error.status, error.reason)
            await asyncio.sleep(CRDS_S)

    def _all_reconcilers(
        self, api: ApiServer, metrics: OperatorMetrics, loads: PodLoads
    ) -> dict[str, Reconciler]:
        """Return the reconciler of each kind of key."""
        settings, cache = self._settings, self._cache

        def tell(about: Manifest, transition: Transition) -> None:
            metrics.happened(about, transition)
            self._events.post(about, transition)

        images = OperatorDefaults(
            settings.worker_image,
            settings.router_image,
            by_issuer(settings.mutual_tls_issuer),
            settings.metrics_namespace,
            engine_images(settings),
            settings.lease_namespace,
        )
        reader = ClusterReader(cache, RouterHealthSource(answers.pod_metrics, time.monotonic))
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
            "BatchJob": BatchJobReconciler(
                api, cache, settings.router_image, tell, time.time, settings.resync_s
            ),
            work_queue.ADAPTERS: LoraAdapterReconciler(api, cache, loads, tell, time.time),
            work_queue.SCALING: Autoscaler(
                api, reader, self._prometheus, scaling, tell, metrics.scaling, time.time
            ),
        }


def engine_images(settings: OperatorSettings) -> dict[EngineType, str]:
    """Return the default images of workers with other engines than Baton; empty where none is set."""
    flags = {name: spec.image_flag for name, spec in ENGINES.items() if spec.image_flag}
    return {
        name: getattr(settings, flag.removeprefix("--").replace("-", "_")) for name, flag in flags.items()
    }
