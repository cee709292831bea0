"""
The reconciler of BatchJobs: it creates and updates the Job of each, and writes conditions.

    reads     the BatchJob, with the progress that routers write into its status, its Job and its service
    decides   conditions, and operations on the Job: `decide`, a pure function
    writes    the Job; observedGeneration and conditions of the BatchJob; deletes old BatchJobs of routers

A Job that ended is never created again: to retry, delete the BatchJob.
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
from baton_operator.manifests.objects import (
    Fact,
    Manifest,
    ReportTransition,
    by_type,
    merge_patch,
    seconds,
    written,
)
from baton_operator.reconcilers.reconciler import is_rejected, write_status

FINAL_PHASES = {
    "completed": ("Completed", "Every request has a response or an error."),
    "failed": ("InvalidInput", "The input file is invalid. The errors of the batch name the lines."),
    "expired": ("Expired", "The completion window ended. Results until then are available."),
    "cancelled": ("Cancelled", "A client cancelled the batch. Results until then are available."),
}
"""Final phases of a batch, each with reason and message."""

JOB_GRACE_S = 30.0
"""Seconds from the end of a batch until the operator deletes a Job that still runs."""

SERVICE_S = 30.0
"""Seconds until the next check whether the service runs batches by Jobs."""

HINTS = {
    "PodFailurePolicy": "See the log of its pod: kubectl logs job/{name}. ",
    "FailedIndexes": "Its pod failed {failures} times: kubectl logs job/{name}. ",
    "DeadlineExceeded": (
        "The completion window ended, but no router ended the batch: kubectl describe job/{name}. "
    ),
}
"""Hints by the reason of a failed Job."""


PROGRESS_DELAY_S = 30.0
"""Delay in seconds after a router updated only the progress of a BatchJob."""


def needs_attention(batch_job: Mapping[str, Any]) -> bool:
    """Return whether to reconcile without delay: the spec changed, or the batch ended."""
    status = batch_job.get("status", {})
    is_current = status.get("observedGeneration") == batch_job["metadata"].get("generation")
    return not is_current or status.get("phase") in FINAL_PHASES


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """Conditions of a BatchJob, and the operations on its Job."""

    facts: Sequence[Fact]
    create: Manifest | None = None
    patch: Manifest | None = None
    """Patch of the Job."""
    delete_job: bool = False
    forget: bool = False
    """Whether to delete the BatchJob itself."""
    again_s: float | None = None
    """Seconds after which to decide again without a change."""


def decide(
    batch_job: Manifest, job: Manifest | None, service: Manifest | None, image: str, now: float
) -> BatchDecision:
    """Return the decision for a BatchJob. Raises ValueError if its spec is invalid. `job`: the Job with its
    name, whatever created it. `service`: its InferenceService. `now`: Unix seconds.
    """
    status = batch_job.get("status", {})
    before = by_type(batch_job)
    ours = job is None or _is_of(job, batch_job)
    if status.get("phase") in FINAL_PHASES:
        return _ended(batch_job, job if ours else None, before, now)
    if not ours:
        return BatchDecision(
            _facts(
                "NameTaken", "A Job with this name exists and does not belong to this BatchJob.", failed=True
            )
        )
    if job is None:
        return _begin(batch_job, before, service, image)
    return _going_on(batch_job, job)


def _begin(
    batch_job: Manifest, before: Mapping[str, Any], service: Manifest | None, image: str
) -> BatchDecision:
    spec = BatchJobSpec.model_validate(batch_job["spec"])
    failed = before.get("Failed")
    if failed is not None and failed["status"] == "True" and failed["reason"] != "NameTaken":
        # The failed Job was deleted.
        return BatchDecision(_facts(failed["reason"], failed.get("message", ""), failed=True))
    name = spec.service_name
    if service is None:
        message = f"The InferenceService {name} does not exist."
        return BatchDecision(_facts("NoService", message), again_s=SERVICE_S)
    if problem := InferenceServiceSpec.problem(service):
        return BatchDecision(_facts("ServiceInvalid", problem), again_s=SERVICE_S)
    serving = InferenceServiceSpec.model_validate(service["spec"])
    if serving.router.batches.execution != "Jobs":
        message = f"{name} does not run batches by Jobs. Set its spec.router.batches.execution to Jobs."
        return BatchDecision(_facts("NotByJobs", message), again_s=SERVICE_S)
    job_ = manifests.job(batch_job, serving, image)
    facts = _facts("Suspended" if job_["spec"]["suspend"] else "Waiting")
    return BatchDecision([*facts, _currency(job_, spec)], create=job_)


def _going_on(batch_job: Manifest, job: Manifest) -> BatchDecision:
    spec = BatchJobSpec.model_validate(batch_job["spec"])
    state = job.get("status", {})
    ended = {type: one for type, one in by_type(job).items() if one["status"] == "True"}
    if "Failed" in ended:
        why = ended["Failed"].get("reason") or "Failed"
        failures = spec.max_retries + 1
        hint = HINTS.get(why, "").format(name=job["metadata"]["name"], failures=failures)
        return BatchDecision(_facts(why, hint + ended["Failed"].get("message", ""), failed=True))
    if "Complete" in ended:
        return BatchDecision(_facts("Finishing", "All requests are done; the router is writing the files."))
    changes = merge_patch(
        {name: job["spec"].get(name) for name in manifests.changeable(spec)}, manifests.changeable(spec)
    )
    rests = changes.get("suspend", job["spec"].get("suspend", False))
    reason = "Suspended" if rests else "Running" if state.get("active") else "Waiting"
    facts = [*_facts(reason), _currency(job, spec)]
    return BatchDecision(facts, patch={"spec": changes} if changes else None)


def _currency(job: Manifest, spec: BatchJobSpec) -> Fact:
    """Return whether the Job has the current pod template."""
    made_by = job["metadata"].get("annotations", {}).get(manifests.TEMPLATE)
    if made_by in (None, manifests.template_hash(spec)):
        return Fact("UpToDate", True, "AsMade")
    name = job["metadata"]["name"]
    message = (
        "spec.podTemplate changed, but the template of a Job is immutable. To apply the change, run "
        f"kubectl delete job/{name}; the batch resumes after the last recorded request."
    )
    return Fact("UpToDate", False, "TemplateChanged", message)


def _ended(batch_job: Manifest, job: Manifest | None, before: Mapping[str, Any], now: float) -> BatchDecision:
    phase = batch_job["status"]["phase"]
    good = phase == "completed"
    facts = _facts(*FINAL_PHASES[phase], complete=good, failed=not good)
    condition = before.get("Complete" if good else "Failed")
    is_recorded = condition is not None and condition["status"] == "True"
    since = seconds(condition["lastTransitionTime"]) if condition is not None and is_recorded else now
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
        again_s=min((wait for wait in waits if wait > 0), default=None),
    )


def _facts(reason: str, message: str = "", *, complete: bool = False, failed: bool = False) -> list[Fact]:
    """Return the conditions of a BatchJob, which is open unless it is complete or failed."""
    return [
        Fact("Complete", complete, reason, message),
        Fact("Failed", failed, reason, message if failed else ""),
        Fact("Suspended", reason == "Suspended", reason),
    ]


def _is_of(job: Manifest, batch_job: Manifest) -> bool:
    uid = batch_job["metadata"]["uid"]
    return any(owner["uid"] == uid for owner in job["metadata"].get("ownerReferences", ()))


def _is_finished(job: Manifest) -> bool:
    ended = by_type(job)
    return any(ended.get(type, {}).get("status") == "True" for type in ("Complete", "Failed"))


KIND = "BatchJob"
JOB = ("batch/v1", "Job")


@dataclass(frozen=True, slots=True)
class BatchJobReconciler:
    """Reconciles BatchJobs."""

    api: ApiServer
    cache: ObjectCache
    image: str
    """Default image of routers."""
    report: ReportTransition
    clock: Callable[[], float]
    """Returns Unix seconds."""
    resync_s: float

    async def reconcile(self, namespace: str, name: str) -> float | None:
        batch_job = self.cache.get(KIND, namespace, name)
        if batch_job is None or "deletionTimestamp" in batch_job["metadata"]:
            return None
        job = self.cache.get("Job", namespace, name)
        decision = self._decide(batch_job, job)
        try:
            if decision.create is not None and not await self.api.create(decision.create):
                # The existing Job may have another creator: the cache holds only the operator's Jobs.
                jobs = await self.api.list(*JOB, namespace, field=f"metadata.name={name}")
                job = jobs[0] if jobs else None
                decision = replace(self._decide(batch_job, job), create=None)
            await self._apply(decision, batch_job, job)
        except ApiException as error:
            if is_rejected(error):
                why = f"Job {name}: {error.reason}"
                facts = [Fact("Complete", False, "Refused", why), Fact("Failed", False, "Refused", why)]
                await self._write_status(batch_job, facts)
            raise
        if decision.forget:
            return None
        await self._write_status(batch_job, decision.facts)
        return self.resync_s if decision.again_s is None else min(self.resync_s, decision.again_s)

    def _decide(self, batch_job: Manifest, job: Manifest | None) -> BatchDecision:
        service = self.cache.service(batch_job["metadata"]["namespace"], batch_job["spec"]["serviceName"])
        try:
            return decide(batch_job, job, service, self.image, self.clock())
        except ValueError as error:
            return BatchDecision(
                [Fact("Complete", False, "Invalid", str(error)), Fact("Failed", True, "Invalid")]
            )

    async def _apply(self, decision: BatchDecision, batch_job: Manifest, job: Manifest | None) -> None:
        metadata = batch_job["metadata"]
        if decision.patch is not None:
            await self.api.merge(*JOB, metadata["namespace"], metadata["name"], decision.patch)
        if decision.delete_job and job is not None and "deletionTimestamp" not in job["metadata"]:
            await self.api.delete(job)
        if decision.forget:
            await self.api.delete(batch_job)

    async def _write_status(self, batch_job: Manifest, facts: Sequence[Fact]) -> None:
        """Write the fields of the status that belong to the operator. Routers write the others."""
        before = batch_job.get("status", {})
        generation = int(batch_job["metadata"].get("generation", 0))
        conditions, transitions = written(facts, before.get("conditions", ()), generation, self.clock())
        ours = {name: before[name] for name in ("observedGeneration", "conditions") if name in before}
        patch = merge_patch(ours, {"observedGeneration": generation, "conditions": conditions})
        await write_status(self.api, batch_job, patch, transitions, self.report)
