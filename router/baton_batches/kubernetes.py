"""
Batches as BatchJobs in Kubernetes: the router creates one for each batch and writes the batch's progress to
its status.

The operator runs a BatchJob. The router only needs to create BatchJobs and to patch their status; it reads
nothing. The BatchJob has the name of its batch, so that several routers create one only. A deleted BatchJob
is found by the 404 of the next status update.

All routers of a service report, and a late update of one may overwrite the final status of another. So each
router writes the final status again after a delay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec

from baton_api import batch_jobs, labels
from baton_api.errors import BatonError
from baton_batches.storage import Storage
from baton_batches.values import BatchRecord
from baton_http.kubernetes import ApiServerError, KubernetesAccess
from baton_http.upstream import Reply, fetch

REQUEST_TIMEOUT_S = 15.0

REPLY_LIMIT = 1024 * 1024

BATCH_JOBS_PATH = "/apis/baton.dev/v1alpha1/namespaces/{}/batchjobs"
KEYS_PATH = "/openid/v1/jwks"
"""The keys with which the API server signs the tokens of accounts; every account may read them."""


class BatchJobApi:
    """One API server. Each call raises OSError if there is no answer."""

    def __init__(self, access: KubernetesAccess) -> None:
        self._access = access

    def namespace(self) -> str:
        """The router's own. Raises OSError."""
        try:
            return self._access.where()
        except ApiServerError as error:
            raise OSError(str(error)) from error

    async def create(self, manifest: object) -> int:
        """Create a BatchJob. Returns the status of the reply."""
        return (await self._request("POST", self._jobs(), "application/json", manifest)).status

    async def patch_status(self, name: str, status: object) -> int:
        """Merge into the status of a BatchJob. Returns the status of the reply."""
        path = f"{self._jobs()}/{quote(name, safe='')}/status"
        return (await self._request("PATCH", path, "application/merge-patch+json", {"status": status})).status

    async def keys(self) -> bytes:
        """The public keys (JWKS) of ServiceAccount tokens."""
        reply = await self._request("GET", KEYS_PATH)
        if reply.status != 200:
            raise OSError(f"The API server rejected the request for its keys: status {reply.status}.")
        return reply.body

    def _jobs(self) -> str:
        return BATCH_JOBS_PATH.format(quote(self.namespace(), safe=""))

    async def _request(self, method: str, path: str, content_type: str = "", body: object = None) -> Reply:
        content = msgspec.json.encode(body) if content_type else b""
        try:
            connection = self._access.open()
            try:
                headers = connection.headers + ([("content-type", content_type)] if content_type else [])
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    return await fetch(connection.upstream, method, path, headers, content, limit=REPLY_LIMIT)
            finally:
                connection.upstream.close()
        except (ApiServerError, BatonError) as error:  # TimeoutError is an OSError
            raise OSError(f"The request to the API server failed: {error}") from error


log = logging.getLogger(__name__)

UPDATE_S = 2.0
"""Seconds between two words about one batch, unless its phase has changed."""

RETRY_LIMIT_S = 30.0

FINAL_UPDATE_S = 120.0
"""Seconds after which the final status of a batch is written a second and last time. By then, every router
with an older state has written the final status too."""

CREATED, CONFLICT, NOT_FOUND = 201, 409, 404


def batch_job_manifest(batch: BatchRecord, service: str, uid: str, pods: int = 1) -> dict[str, Any]:
    """Return the BatchJob for a batch with so many pods, owned by the service with this `uid`."""
    metadata: dict[str, Any] = {
        "name": batch_jobs.name_of(batch.id),
        "labels": {labels.MANAGED_BY: batch_jobs.ROUTER, labels.SERVICE: service},
    }
    if uid:
        owner = {"apiVersion": "baton.dev/v1alpha1", "kind": "InferenceService", "name": service, "uid": uid}
        metadata["ownerReferences"] = [owner]
    return {
        "apiVersion": "baton.dev/v1alpha1",
        "kind": "BatchJob",
        "metadata": metadata,
        "spec": {
            "serviceName": service,
            "batchId": batch.id,
            **({"parallelism": pods} if pods > 1 else {}),
        },
    }


def batch_job_status(batch: BatchRecord) -> dict[str, Any]:
    """Return the part of a BatchJob's status that describes its batch; the operator writes the rest."""
    return {
        "batchId": batch.id,
        "phase": str(batch.status),
        "total": batch.total,
        "completed": batch.completed,
        "failed": batch.failed,
        "outputFileId": batch.output_file or "",
        "errorFileId": batch.error_file or "",
    }


class BatchJobRejected(Exception):
    """The API server answered, and refused one BatchJob or its status."""


class BatchJobReporter:
    """One router's. `clock` is monotonic."""

    def __init__(
        self, storage: Storage, api: BatchJobApi, service: str, uid: str, clock: Callable[[], float]
    ) -> None:
        self._storage = storage
        self._api = api
        self._service = service
        self._uid = uid
        self._clock = clock
        self._reported: dict[str, tuple[dict[str, Any], float]] = {}
        """By batch: the status last reported, and when."""
        self._refused: dict[str, tuple[float, float]] = {}
        """By batch: when to try its BatchJob again, and the pause in seconds before that."""

    async def run(self) -> None:
        """Until cancelled. While the cluster or the database is away, batches wait."""
        failed_s = 0.0
        while True:
            try:
                if self._storage.in_use:
                    await self.round()
                failed_s = 0.0
            except (OSError, BatonError) as error:
                failed_s = min(RETRY_LIMIT_S, max(1.0, 2 * failed_s))
                log.warning("Cannot create or update BatchJobs: %s Next attempt in %g s.", error, failed_s)
            await asyncio.sleep(failed_s or self._storage.settings.batch_poll_s)

    async def round(self) -> None:
        """
        Create missing BatchJobs and write the status of changed ones.

        A BatchJob that the API server refuses is tried again later and does not delay the others. Raises
        OSError if the API server does not answer, and BatonError if the database does not.
        """
        jobs = self._storage.jobs
        missing = await self._storage.run(jobs.missing)
        await self._each(missing, self._create)
        assigned = await self._storage.run(jobs.assigned)
        await self._each(assigned, self._report)
        for id in self._reported.keys() - {batch.id for batch in assigned}:
            del self._reported[id]
        for id in self._refused.keys() - {batch.id for batch in (*missing, *assigned)}:
            del self._refused[id]

    async def _each(
        self, batches: Sequence[BatchRecord], announce: Callable[[BatchRecord], Awaitable[None]]
    ) -> None:
        for batch in batches:
            due, pause_s = self._refused.get(batch.id, (0.0, 0.0))
            if pause_s and self._clock() < due:
                continue
            try:
                await announce(batch)
            except BatchJobRejected as refused:
                pause_s = min(RETRY_LIMIT_S, max(1.0, 2 * pause_s))
                log.warning("%s Next attempt in %g s.", refused, pause_s)
                self._refused[batch.id] = self._clock() + pause_s, pause_s
            else:
                self._refused.pop(batch.id, None)

    async def _create(self, batch: BatchRecord) -> None:
        manifest = batch_job_manifest(batch, self._service, self._uid, self._storage.settings.batch_runners)
        name = manifest["metadata"]["name"]
        status = await self._api.create(manifest)
        if status not in (CREATED, CONFLICT):
            raise BatchJobRejected(f"The API server refused to create the BatchJob {name}: status {status}.")
        await self._storage.run(partial(self._storage.jobs.claim, batch.id, name))
        if status == CREATED:
            log.info("%s is run by the BatchJob %s.", batch.id, name)

    async def _report(self, batch: BatchRecord) -> None:
        desired, now = batch_job_status(batch), self._clock()
        reported, when = self._reported.get(batch.id, ({}, 0.0))
        changed = desired != reported and (
            now - when >= UPDATE_S or desired["phase"] != reported.get("phase")
        )
        final = batch.status.ended and desired == reported and now - when >= FINAL_UPDATE_S
        if changed or final:
            status = await self._api.patch_status(batch.job, desired)
            if status == NOT_FOUND:
                log.info("The BatchJob %s of %s is gone.", batch.job, batch.id)
                await self._storage.run(partial(self._storage.jobs.disown, batch.id, batch.job))
                return
            if status != 200:
                raise BatchJobRejected(
                    f"The API server refused the status of the BatchJob {batch.job}: status {status}."
                )
            self._reported[batch.id] = desired, now
        if final:
            await self._storage.run(partial(self._storage.jobs.disown, batch.id, batch.job))
