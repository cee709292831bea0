"""
The reconciler of InferenceServices: it reads the state, plans, executes the plan, and writes status.

It keeps no memory between reconciliations, so an interrupted one is planned again from the new state.
Permanent rejections by the API server, such as an invalid pod template, are written to status.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from kubernetes.aio.client.exceptions import ApiException
from pydantic import ValidationError

from baton_operator.cluster.api_server import CONFLICT, ApiServer
from baton_operator.cluster.state import ClusterReader, ClusterState
from baton_operator.kinds.inference_service import InferenceServiceSpec, InferenceServiceStatus
from baton_operator.kinds.service_policies import Objectives
from baton_operator.manifests import tickets
from baton_operator.manifests.conditions import Transition
from baton_operator.manifests.drift import merge_patch
from baton_operator.manifests.objects import Manifest, key
from baton_operator.reconcilers import report
from baton_operator.reconcilers.plan import OperatorDefaults, ServicePlan, ServiceState, plan_service
from baton_operator.reconcilers.reconciler import REJECTED_STATUSES, ReportTransition
from baton_operator.reconcilers.router_rollouts import RouterRollouts

PublishStatus = Callable[[str, str, "report.Status | None", Objectives | None], None]
"""Publishes the status and the objectives of a service as metrics; None removes them."""


class InferenceServiceReconciler:
    """Reconciles InferenceServices. `clock` returns Unix seconds."""

    def __init__(
        self,
        api: ApiServer,
        reader: ClusterReader,
        images: OperatorDefaults,
        tell: ReportTransition,
        stands: PublishStatus,
        clock: Callable[[], float],
        resync_s: float,
        rollouts: RouterRollouts,
    ) -> None:
        self._api = api
        self._reader = reader
        self._images = images
        self._report_transition = tell
        self._publish_status = stands
        self._clock = clock
        self._resync_s = resync_s
        self._rollouts = rollouts

    async def reconcile(self, namespace: str, name: str) -> float | None:
        service = self._reader.service(namespace, name)
        scalers = self._reader.scalers(namespace, name)
        if service is None:
            self._rollouts.forget(namespace, name)
            self._publish_status(namespace, name, None, None)
            await self._write_scaler_status(scalers, None)
            return None
        cluster = await self._reader.state_of(service, scalers)
        now = self._clock()
        try:
            plan = plan_service(cluster, self._images, now)
        except ValueError as error:
            await self._write_status(cluster, *report.rejected_status(cluster, error, now))
            await self._write_scaler_status(scalers, None)
            return self._resync_s
        plan = self._rollouts.admit(plan, cluster)
        assert plan.state is not None
        try:
            rejected_claim = await self._apply(plan, cluster)
        except ObjectRejected as rejection:
            await self._write_status(cluster, *report.rejected_status(cluster, rejection, now))
            raise rejection.answer from rejection
        status, transitions = report.service_status(cluster, plan.state, now, rejected_claim)
        # The API server adds defaults; without them the status would always differ.
        whole = InferenceServiceStatus.model_validate(status)
        await self._write_status(
            cluster, whole.model_dump(mode="json", by_alias=True, exclude_none=True), transitions
        )
        await self._write_scaler_status(scalers, plan.state)
        return min(self._resync_s, plan.again_s if plan.again_s is not None else self._resync_s)

    async def _apply(self, plan: ServicePlan, cluster: ClusterState) -> str:
        """Execute the plan. Return why the API server rejected a larger claim, or an empty string."""
        rejected_claim = ""
        for manifest in plan.create:
            await self._create(manifest)
        for manifest in plan.apply:
            ours = key(manifest) in cluster.objects
            try:
                await self._api.apply(manifest, ours=ours)
            except ApiException as error:
                if error.status in REJECTED_STATUSES and manifest["kind"] == "PersistentVolumeClaim":
                    rejected_claim = str(ObjectRejected(manifest, error))  # the claim keeps its size
                    continue
                if error.status in REJECTED_STATUSES or (error.status == CONFLICT and not ours):
                    raise ObjectRejected(manifest, error) from error
                raise
        if plan.ticket_secret:
            # Each operator attempts this again, so one that stops here must have made progress before.
            await self._create(tickets.secret(cluster.owner, secrets.token_hex(32)))
        for pruned in plan.prune:
            existing = cluster.objects[pruned]
            if "deletionTimestamp" not in existing["metadata"]:
                await self._api.delete(existing)
        return rejected_claim

    async def _create(self, manifest: Manifest) -> None:
        try:
            await self._api.create(manifest)
        except ApiException as error:
            if error.status in REJECTED_STATUSES:
                raise ObjectRejected(manifest, error) from error
            raise

    async def _write_status(
        self, cluster: ClusterState, status: report.Status, transitions: Sequence[Transition]
    ) -> None:
        if patch := merge_patch(cluster.status, status):
            await self._api.write_status(cluster.service, patch)
        # Only after the write: an interrupted reconciliation reports it next time, so it is reported once.
        for transition in transitions:
            self._report_transition(cluster.service, transition)
        owner = cluster.owner
        self._publish_status(owner.namespace, owner.name, status, _objectives(cluster.service))

    async def _write_scaler_status(self, scalers: Sequence[Manifest], state: ServiceState | None) -> None:
        now = self._clock()
        for scaler in scalers:
            if "deletionTimestamp" in scaler["metadata"]:
                continue
            if patch := merge_patch(scaler.get("status", {}), report.scaler_status(scaler, state, now)):
                await self._api.write_status(scaler, patch)


def _objectives(service: Manifest) -> Objectives | None:
    try:
        return InferenceServiceSpec.model_validate(service["spec"]).objectives
    except ValidationError:
        return None


class ObjectRejected(ValueError):
    """The API server rejected an object permanently."""

    def __init__(self, manifest: Manifest, answer: ApiException) -> None:
        super().__init__(f"{manifest['kind']} {manifest['metadata']['name']}: {answer.reason}")
        self.answer = answer
