"""
The handlers of kopf: everything that happens to the operator comes in here.

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

import kopf

from baton_api.errors import SetupError
from baton_operator.crd import GROUP, VERSION
from baton_operator.operator import Operator


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
