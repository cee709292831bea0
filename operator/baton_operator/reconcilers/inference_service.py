"""
The reconciler of InferenceServices: it reads the state, plans, executes the plan, and writes status.

    reads     the service, its objects, pods and RoleScalers from the cache; during rollouts also its routers
    decides   objects to create, apply and prune: `plan.plan_service`; status: `report.service_status`
    writes    these objects; the status of the service; replicas, selector and the condition Bound of its
              RoleScalers

It keeps no memory between reconciliations, so an interrupted one is planned again from the new state.
Permanent rejections by the API server, such as an invalid pod template, are written to status.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kubernetes.aio.client.exceptions import ApiException

from baton_operator.cluster.api_server import CONFLICT, ApiServer
from baton_operator.cluster.state import ROLE_SCALER, ClusterReader, ClusterState
from baton_operator.kinds.inference_service import InferenceServiceSpec, InferenceServiceStatus
from baton_operator.kinds.service_policies import Autoscaling, Objectives
from baton_operator.manifests import mutual_tls
from baton_operator.manifests.objects import Manifest, ReportTransition, Transition, key, merge_patch
from baton_operator.reconcilers import report
from baton_operator.reconcilers.plan import (
    OperatorDefaults,
    RouterRollouts,
    ServicePlan,
    ServiceState,
    plan_service,
)
from baton_operator.reconcilers.reconciler import is_rejected, write_status

PublishStatus = Callable[[str, str, "report.Status | None", Objectives | None], None]
"""Publishes the status and the objectives of a service as metrics; None removes them."""


@dataclass(frozen=True, slots=True)
class InferenceServiceReconciler:
    """Reconciles InferenceServices."""

    api: ApiServer
    reader: ClusterReader
    defaults: OperatorDefaults
    report_transition: ReportTransition
    publish: PublishStatus
    clock: Callable[[], float]
    """Returns Unix seconds."""
    resync_s: float
    rollouts: RouterRollouts

    async def reconcile(self, namespace: str, name: str) -> float | None:
        service = self.reader.cache.service(namespace, name)
        scalers = list(self.reader.cache.of_service(namespace, name, ROLE_SCALER))
        if service is None:
            self.rollouts.forget(namespace, name)
            self.publish(namespace, name, None, None)
            await self._write_scaler_status(scalers, None, scaled=False)
            return None
        cluster = await self.reader.state_of(service, scalers)
        now = self.clock()
        try:
            plan = plan_service(cluster, self.defaults, now)
        except ValueError as error:
            await self._write_status(cluster, *report.rejected_status(cluster, error, now))
            await self._write_scaler_status(scalers, None, scaled=_is_scaled(service), refused=str(error))
            return self.resync_s
        plan = self.rollouts.admit(plan, cluster)
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
        await self._write_scaler_status(scalers, plan.state, scaled=_is_scaled(service))
        return self.resync_s if plan.again_s is None else min(self.resync_s, plan.again_s)

    async def _apply(self, plan: ServicePlan, cluster: ClusterState) -> str:
        """Execute the plan. Return why the API server rejected a larger claim, or an empty string."""
        rejected_claim = ""
        for manifest in plan.create:
            await self._create(manifest)
        for manifest in plan.apply:
            ours = key(manifest) in cluster.objects
            try:
                await self.api.apply(manifest, ours=ours)
            except ApiException as error:
                if is_rejected(error) and manifest["kind"] == "PersistentVolumeClaim":
                    rejected_claim = str(ObjectRejected(manifest, error))  # the claim keeps its size
                    continue
                if is_rejected(error) or (error.status == CONFLICT and not ours):
                    raise ObjectRejected(manifest, error) from error
                raise
        if plan.ticket_secret:
            # Each operator attempts this again, so one that stops here must have made progress before.
            await self._create(mutual_tls.ticket_secret(cluster.owner, secrets.token_hex(32)))
        for pruned in plan.prune:
            existing = cluster.objects[pruned]
            if "deletionTimestamp" not in existing["metadata"]:
                await self.api.delete(existing)
        return rejected_claim

    async def _create(self, manifest: Manifest) -> None:
        try:
            await self.api.create(manifest)
        except ApiException as error:
            if is_rejected(error):
                raise ObjectRejected(manifest, error) from error
            raise

    async def _write_status(
        self, cluster: ClusterState, status: report.Status, transitions: Sequence[Transition]
    ) -> None:
        patch = merge_patch(cluster.status, status)
        await write_status(self.api, cluster.service, patch, transitions, self.report_transition)
        owner = cluster.owner
        spec = InferenceServiceSpec.of(cluster.service)
        self.publish(owner.namespace, owner.name, status, spec.objectives if spec else None)

    async def _write_scaler_status(
        self, scalers: Sequence[Manifest], state: ServiceState | None, *, scaled: bool, refused: str = ""
    ) -> None:
        now = self.clock()
        for earlier in scalers:
            metadata = earlier["metadata"]
            # Read again: the autoscaler may have written its conditions.
            scaler = self.reader.cache.get(ROLE_SCALER, metadata["namespace"], metadata["name"]) or earlier
            if "deletionTimestamp" in scaler["metadata"]:
                continue
            status = report.scaler_status(scaler, state, now, scaled=scaled, refused=refused)
            if patch := merge_patch(scaler.get("status", {}), status):
                await self.api.write_status(scaler, patch, shared=True)


def _is_scaled(service: Manifest) -> bool:
    """Return whether the autoscaler reports on the RoleScalers, also where the spec is refused."""
    mode: str = service["spec"].get("autoscaling", {}).get("mode", Autoscaling().mode)
    return mode != "Disabled"


class ObjectRejected(ValueError):
    """The API server rejected an object permanently."""

    def __init__(self, manifest: Manifest, answer: ApiException) -> None:
        super().__init__(f"{manifest['kind']} {manifest['metadata']['name']}: {answer.reason}")
        self.answer = answer
