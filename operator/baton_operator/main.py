"""
The operator's process: kopf runs the handlers, and everything that happens to the operator comes in by them.

    startup   take the Lease, list what exists, start the reconcilers
    login     the credentials with which kopf watches
    event     a custom resource was listed, created, changed or deleted
    cleanup   stop the reconcilers, release the Lease

Events of custom resources go into the store of watched objects, which queues the keys to reconcile. Children
come into the same store by reflectors (`baton_operator.cluster.reflector`). A handler writes nothing and asks
kopf for nothing that does: an InferenceService has no finalizer and no annotation of kopf, so it can be
deleted while no operator runs.
"""

from __future__ import annotations

import asyncio
import logging

import kopf

from baton_api.errors import SetupError
from baton_operator.cluster import api_server
from baton_operator.crd import GROUP, VERSION
from baton_operator.operator import Listening, Operator
from baton_operator.settings import OperatorSettings


@kopf.on.startup(errors=kopf.ErrorsMode.PERMANENT)
async def start(memo: Operator, **_: object) -> None:
    """Wait until this operator is the leader. Kopf watches nothing before."""
    try:
        await memo.start()
    except SetupError as error:
        raise kopf.PermanentError(error.message) from error


@kopf.on.login()
async def login(memo: Operator, **_: object) -> kopf.ConnectionInfo:
    """Called again by kopf when the API server no longer accepts the token."""
    return await memo.connection_info()


@kopf.on.event(GROUP, VERSION, "inferenceservices")
async def inference_service(event: kopf.RawEvent, memo: Operator, **_: object) -> None:
    """Reconciled by `InferenceServiceReconciler`, `Autoscaler` and `LoraAdapterReconciler`."""
    memo.happened("InferenceService", event)


@kopf.on.event(GROUP, VERSION, "rolescalers")
async def role_scaler(event: kopf.RawEvent, memo: Operator, **_: object) -> None:
    """Reconciled with its service, whose workers it counts."""
    memo.happened("RoleScaler", event)


@kopf.on.event(GROUP, VERSION, "batchjobs")
async def batch_job(event: kopf.RawEvent, memo: Operator, **_: object) -> None:
    """Reconciled by `BatchJobReconciler`."""
    memo.happened("BatchJob", event)


@kopf.on.event(GROUP, VERSION, "loraadapters")
async def lora_adapter(event: kopf.RawEvent, memo: Operator, **_: object) -> None:
    """Reconciled by `LoraAdapterReconciler`, with all adapters of its service."""
    memo.happened("LoraAdapter", event)


@kopf.on.cleanup()
async def stop(memo: Operator, **_: object) -> None:
    """Called by kopf after SIGINT or SIGTERM, and when one of its watches has failed."""
    await memo.stop()


def run(settings: OperatorSettings, listening: Listening) -> None:
    """Run until SIGINT or SIGTERM; `listening` receives the URL of the server. Raises SetupError."""
    for name in ("worker_image", "router_image"):
        if not getattr(settings, name):
            flag = "--" + name.replace("_", "-")
            raise SetupError(f"No default {name.replace('_', ' ')} is set. Set {flag}.")
    asyncio.run(_run(settings, listening))


async def _run(settings: OperatorSettings, listening: Listening) -> None:
    logging.getLogger("kopf").setLevel(logging.WARNING)  # it logs each event
    client = await api_server.connect(settings.kubeconfig)
    if name := client.configuration.tls_server_name:
        await client.close()
        raise SetupError(
            f"{settings.kubeconfig} sets tls-server-name {name}, which kopf.ConnectionInfo does not have. "
            "Remove it, and set `server` to a name in the certificate of the API server."
        )
    operator = Operator(settings, client, listening)
    try:
        await kopf.operator(
            settings=kopf_settings(settings),
            memo=operator,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            standalone=True,  # the Lease leads: peering is advisory
        )
    except Exception:
        if operator.failure is not None:
            raise operator.failure from None
        raise


def kopf_settings(settings: OperatorSettings) -> kopf.OperatorSettings:
    """Return the settings of kopf."""
    wanted = kopf.OperatorSettings()
    wanted.posting.enabled = False  # `baton_operator.cluster.events` posts transitions of conditions
    wanted.scanning.disabled = True  # no rights on CRDs and namespaces; the handlers name what they watch
    wanted.watching.inactivity_timeout = settings.watch_silence_s
    wanted.watching.chunk_size = api_server.PAGE
    # Without a limit each object has a task and a queue of its own: four times the memory.
    wanted.queueing.worker_limit = 64
    wanted.queueing.idle_timeout = 0.05
    return wanted
