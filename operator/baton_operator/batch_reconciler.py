"""One BatchJob brought to what it should be: read, decide, carry out, say so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kubernetes.aio.client.exceptions import ApiException

from baton_operator.api_server import ApiServer
from baton_operator.batches import Verdict, decide
from baton_operator.cache import Cache
from baton_operator.conditions import Fact, written
from baton_operator.manifests.objects import Manifest
from baton_operator.merge_patch import difference
from baton_operator.reconciler import REFUSED, Tell

KIND = "BatchJob"
JOB = ("batch/v1", "Job")


class BatchReconciler:
    """For all BatchJobs. `image` is the routers'; `clock` gives Unix seconds."""

    def __init__(
        self,
        api: ApiServer,
        cache: Cache,
        image: str,
        tell: Tell,
        clock: Callable[[], float],
        resync_s: float,
    ) -> None:
        self._api = api
        self._cache = cache
        self._image = image
        self._tell = tell
        self._clock = clock
        self._resync_s = resync_s

    async def reconcile(self, namespace: str, name: str) -> float | None:
        there = self._cache.get(KIND, namespace, name)
        if there is None or "deletionTimestamp" in there["metadata"]:
            return None
        job = self._cache.get("Job", namespace, name)
        verdict = self._decide(there, job)
        try:
            if verdict.create is not None and not await self._api.create(verdict.create):
                # A Job of that name is there, which may be anybody's: the cache has only the operator's.
                found = await self._api.list(*JOB, namespace, field=f"metadata.name={name}")
                job = found[0] if found else None
                verdict = replace(self._decide(there, job), create=None)
            await self._carry_out(verdict, there, job)
        except ApiException as error:
            if error.status in REFUSED:
                why = f"Job {name}: {error.reason}"
                facts = [Fact("Complete", False, "Refused", why), Fact("Failed", False, "Refused", why)]
                await self._say(there, Verdict(facts))
            raise
        if verdict.forget:
            return None
        await self._say(there, verdict)
        return min(self._resync_s, verdict.again_s if verdict.again_s is not None else self._resync_s)

    def _decide(self, there: Manifest, job: Manifest | None) -> Verdict:
        namespace = there["metadata"]["namespace"]
        service = self._cache.get("InferenceService", namespace, there["spec"]["serviceName"])
        if service is not None and "deletionTimestamp" in service["metadata"]:
            service = None
        try:
            return decide(there, job, service, self._image, self._clock())
        except ValueError as error:
            return Verdict([Fact("Complete", False, "Invalid", str(error)), Fact("Failed", True, "Invalid")])

    async def _carry_out(self, verdict: Verdict, there: Manifest, job: Manifest | None) -> None:
        metadata = there["metadata"]
        if verdict.patch is not None:
            await self._api.merge(*JOB, metadata["namespace"], metadata["name"], verdict.patch)
        if verdict.delete_job and job is not None and "deletionTimestamp" not in job["metadata"]:
            await self._api.delete(job)
        if verdict.forget:
            await self._api.delete(there)

    async def _say(self, there: Manifest, verdict: Verdict) -> None:
        """What is the operator's to say; the rest of the status is a router's."""
        before = there.get("status", {})
        generation = int(there["metadata"].get("generation", 0))
        conditions, transitions = written(
            verdict.facts, before.get("conditions", ()), generation, self._clock()
        )
        ours = {name: before[name] for name in ("observedGeneration", "conditions") if name in before}
        if patch := difference(ours, {"observedGeneration": generation, "conditions": conditions}):
            await self._api.write_status(there, patch)
        for transition in transitions:
            self._tell(there, transition)
