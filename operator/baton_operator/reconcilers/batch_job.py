"""
The reconciler of BatchJobs: it creates and updates the Job of each, and writes conditions.

`decide` is a pure function of the existing objects. Routers write the progress of a batch into the status
of its BatchJob; the Job reports its pods. A Job that ended is never created again: to retry, delete the
BatchJob.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kubernetes.aio.client.exceptions import ApiException

from baton_api import batch_jobs, labels
from baton_operator.cluster.api_server import ApiServer
from baton_operator.cluster.cache import ObjectCache
from baton_operator.kinds.batch_job import BatchJobSpec
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.manifests import batches as manifests
from baton_operator.manifests.conditions import Fact, written
from baton_operator.manifests.drift import merge_patch
from baton_operator.manifests.objects import Manifest, seconds
from baton_operator.reconcilers.reconciler import REJECTED_STATUSES, ReportTransition

FINAL_PHASES = {
    "completed": ("Completed", "Every request has its answer or its error."),
    "failed": ("InvalidInput", "The file is no batch; the batch's errors name the lines."),
    "expired": ("Expired", "The batch's time was over. What was answered before can be fetched."),
    "cancelled": ("Cancelled", "It was cancelled by the API. What was answered before can be fetched."),
}
"""Phases after which nothing is run any more, with their reason."""

JOB_GRACE_S = 30.0
"""Seconds from the end of a batch until a Job that has not noticed is deleted."""

SERVICE_S = 30.0
"""Seconds until it is looked again whether the service can have it run."""

HINTS = {
    "PodFailurePolicy": "The log of its pod says why: kubectl logs job/{name}. ",
    "FailedIndexes": "Its pod failed {failures} times: kubectl logs job/{name}. ",
    "DeadlineExceeded": "Its batch's time is over, and no router has ended it: kubectl describe job/{name}. ",
}
"""What to look at, by the reason for which a Job has failed."""


PROGRESS_DELAY_S = 30.0
"""Seconds for which a BatchJob is left alone of which a router has only said how far it is."""


def needs_attention(batch_job: Mapping[str, Any]) -> bool:
    """Whether something may be to be done at once: its spec has changed, or its batch has ended."""
    status = batch_job.get("status", {})
    observed = status.get("observedGeneration") == batch_job["metadata"].get("generation")
    return not observed or status.get("phase") in FINAL_PHASES


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """What is to be done, and what is so."""

    facts: Sequence[Fact]
    create: Manifest | None = None
    patch: Manifest | None = None
    """To be merged into the Job."""
    delete_job: bool = False
    forget: bool = False
    """Delete the BatchJob itself."""
    again_s: float | None = None
    """Seconds after which to decide again although nothing has changed."""


def decide(
    batch_job: Manifest, job: Manifest | None, service: Manifest | None, image: str, now: float
) -> BatchDecision:
    """
    `job`: what there is of the BatchJob's name, whoever has made it. `service`: its InferenceService.
    `now`: Unix seconds. Raises ValueError if the spec cannot be carried out.
    """
    status = batch_job.get("status", {})
    before = {one["type"]: one for one in status.get("conditions", ())}
    ours = job is None or _is_of(job, batch_job)
    if status.get("phase") in FINAL_PHASES:
        return _ended(batch_job, job if ours else None, before, now)
    if not ours:
        return BatchDecision(_failed("NameTaken", "There is a Job of that name that is not this BatchJob's."))
    if job is None:
        return _begin(batch_job, before, service, image)
    return _going_on(batch_job, job)


def _begin(
    batch_job: Manifest, before: Mapping[str, Any], service: Manifest | None, image: str
) -> BatchDecision:
    spec = BatchJobSpec.model_validate(batch_job["spec"])
    failed = before.get("Failed")
    if failed is not None and failed["status"] == "True" and failed["reason"] != "NameTaken":
        # Its Job was, and is deleted.
        return BatchDecision(_failed(failed["reason"], failed.get("message", "")))
    name = spec.service_name
    if service is None:
        message = f"There is no InferenceService {name}."
        return BatchDecision(_open("NoService", message), again_s=SERVICE_S)
    serving = InferenceServiceSpec.model_validate(service["spec"])
    if serving.router.batches.execution != "Jobs":
        message = f"Routers of {name} run batches themselves: its spec.router.batches.execution is not Jobs."
        return BatchDecision(_open("NotByJobs", message), again_s=SERVICE_S)
    made = manifests.job(batch_job, serving, image)
    facts = _open("Suspended" if made["spec"]["suspend"] else "Waiting")
    return BatchDecision([*facts, _currency(made, spec)], create=made)


def _going_on(batch_job: Manifest, job: Manifest) -> BatchDecision:
    spec = BatchJobSpec.model_validate(batch_job["spec"])
    state = job.get("status", {})
    ended = {one["type"]: one for one in state.get("conditions", ()) if one["status"] == "True"}
    if "Failed" in ended:
        why = ended["Failed"].get("reason") or "Failed"
        failures = spec.max_retries + 1
        hint = HINTS.get(why, "").format(name=job["metadata"]["name"], failures=failures)
        return BatchDecision(_failed(why, hint + ended["Failed"].get("message", "")))
    if "Complete" in ended:
        return BatchDecision(_open("Finishing", "All requests are through, and the files are being written."))
    changes = merge_patch(
        {name: job["spec"].get(name) for name in manifests.changeable(spec)}, manifests.changeable(spec)
    )
    rests = changes.get("suspend", job["spec"].get("suspend", False))
    reason = "Suspended" if rests else "Running" if state.get("active") else "Waiting"
    facts = [*_open(reason), _currency(job, spec)]
    return BatchDecision(facts, patch={"spec": changes} if changes else None)


def _currency(job: Manifest, spec: BatchJobSpec) -> Fact:
    """Whether the Job is by the template that is asked for now."""
    made_by = job["metadata"].get("annotations", {}).get(manifests.TEMPLATE)
    if made_by in (None, manifests.template_hash(spec)):
        return Fact("UpToDate", True, "AsMade")
    name = job["metadata"]["name"]
    message = (
        "spec.podTemplate has changed, and the template of a Job cannot: it goes on as it was made. To have "
        f"it made anew: kubectl delete job/{name}; the batch goes on after the last recorded request."
    )
    return Fact("UpToDate", False, "TemplateChanged", message)


def _ended(batch_job: Manifest, job: Manifest | None, before: Mapping[str, Any], now: float) -> BatchDecision:
    phase = batch_job["status"]["phase"]
    reason, message = FINAL_PHASES[phase]
    good = phase == "completed"
    facts = [
        Fact("Complete", good, reason, message),
        Fact("Failed", not good, reason, "" if good else message),
        Fact("Suspended", False, reason),
    ]
    told = before.get("Complete" if good else "Failed")
    known = told is not None and told["status"] == "True"
    since = seconds(told["lastTransitionTime"]) if told is not None and known else now
    waits = []
    unaware = job is not None and not _is_finished(job)
    if unaware:
        waits.append(since + JOB_GRACE_S - now)
    by_router = batch_job["metadata"].get("labels", {}).get(labels.MANAGED_BY) == batch_jobs.ROUTER
    kept_s = BatchJobSpec.model_validate(batch_job["spec"]).ttl_after_finished.seconds
    if by_router:
        waits.append(since + kept_s - now)
    return BatchDecision(
        facts,
        delete_job=unaware and waits[0] <= 0,
        forget=by_router and waits[-1] <= 0,
        again_s=min((one for one in waits if one > 0), default=None),
    )


def _open(reason: str, message: str = "") -> list[Fact]:
    """It is to be run, or would be."""
    return [
        Fact("Complete", False, reason, message),
        Fact("Failed", False, reason),
        Fact("Suspended", reason == "Suspended", reason),
    ]


def _failed(reason: str, message: str) -> list[Fact]:
    return [
        Fact("Complete", False, reason, message),
        Fact("Failed", True, reason, message),
        Fact("Suspended", False, reason),
    ]


def _is_of(job: Manifest, batch_job: Manifest) -> bool:
    uid = batch_job["metadata"]["uid"]
    return any(owner["uid"] == uid for owner in job["metadata"].get("ownerReferences", ()))


def _is_finished(job: Manifest) -> bool:
    ended = job.get("status", {}).get("conditions", ())
    return any(one["type"] in ("Complete", "Failed") and one["status"] == "True" for one in ended)


KIND = "BatchJob"
JOB = ("batch/v1", "Job")


class BatchJobReconciler:
    """For all BatchJobs. `image` is the routers'; `clock` gives Unix seconds."""

    def __init__(
        self,
        api: ApiServer,
        cache: ObjectCache,
        image: str,
        tell: ReportTransition,
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
            if error.status in REJECTED_STATUSES:
                why = f"Job {name}: {error.reason}"
                facts = [Fact("Complete", False, "Refused", why), Fact("Failed", False, "Refused", why)]
                await self._say(there, BatchDecision(facts))
            raise
        if verdict.forget:
            return None
        await self._say(there, verdict)
        return min(self._resync_s, verdict.again_s if verdict.again_s is not None else self._resync_s)

    def _decide(self, there: Manifest, job: Manifest | None) -> BatchDecision:
        namespace = there["metadata"]["namespace"]
        service = self._cache.get("InferenceService", namespace, there["spec"]["serviceName"])
        if service is not None and "deletionTimestamp" in service["metadata"]:
            service = None
        try:
            return decide(there, job, service, self._image, self._clock())
        except ValueError as error:
            return BatchDecision(
                [Fact("Complete", False, "Invalid", str(error)), Fact("Failed", True, "Invalid")]
            )

    async def _carry_out(self, verdict: BatchDecision, there: Manifest, job: Manifest | None) -> None:
        metadata = there["metadata"]
        if verdict.patch is not None:
            await self._api.merge(*JOB, metadata["namespace"], metadata["name"], verdict.patch)
        if verdict.delete_job and job is not None and "deletionTimestamp" not in job["metadata"]:
            await self._api.delete(job)
        if verdict.forget:
            await self._api.delete(there)

    async def _say(self, there: Manifest, verdict: BatchDecision) -> None:
        """What is the operator's to say; the rest of the status is a router's."""
        before = there.get("status", {})
        generation = int(there["metadata"].get("generation", 0))
        conditions, transitions = written(
            verdict.facts, before.get("conditions", ()), generation, self._clock()
        )
        ours = {name: before[name] for name in ("observedGeneration", "conditions") if name in before}
        if patch := merge_patch(ours, {"observedGeneration": generation, "conditions": conditions}):
            await self._api.write_status(there, patch)
        for transition in transitions:
            self._tell(there, transition)
