"""
One InferenceService brought to what it should be: read, plan, carry out, say so.

Nothing is remembered between two times: whatever was interrupted anywhere is planned again from what there
is. What the API server refuses for good, such as a pod template that is none, is said in status.
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
"""Takes the status and the objectives of a service, by its namespace and name; None if there are none."""


class InferenceServiceReconciler:
    """For all InferenceServices. `clock` gives Unix seconds."""

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
        self._tell = tell
        self._stands = stands
        self._clock = clock
        self._resync_s = resync_s
        self._rollouts = rollouts

    async def reconcile(self, namespace: str, name: str) -> float | None:
        service = self._reader.service(namespace, name)
        scalers = self._reader.scalers(namespace, name)
        if service is None:
            self._rollouts.forget(namespace, name)
            self._stands(namespace, name, None, None)
            await self._bind(scalers, None)
            return None
        cluster = await self._reader.state_of(service, scalers)
        now = self._clock()
        try:
            made = plan_service(cluster, self._images, now)
        except ValueError as error:
            await self._say(cluster, *report.rejected_status(cluster, error, now))
            await self._bind(scalers, None)
            return self._resync_s
        made = self._rollouts.admit(made, cluster)
        assert made.state is not None
        try:
            unmet = await self._carry_out(made, cluster)
        except ObjectRejected as refusal:
            await self._say(cluster, *report.rejected_status(cluster, refusal, now))
            raise refusal.answer from refusal
        status, transitions = report.service_status(cluster, made.state, now, unmet)
        # The API server fills in defaults; without them there would always be a difference.
        whole = InferenceServiceStatus.model_validate(status)
        await self._say(cluster, whole.model_dump(mode="json", by_alias=True, exclude_none=True), transitions)
        await self._bind(scalers, made.state)
        return min(self._resync_s, made.again_s if made.again_s is not None else self._resync_s)

    async def _carry_out(self, made: ServicePlan, cluster: ClusterState) -> str:
        """What was refused although the service does well without it; empty if nothing was."""
        unmet = ""
        create = list(made.create)
        if made.ticket_secret:
            create.insert(0, tickets.secret(cluster.owner, secrets.token_hex(32)))
        for manifest in create:
            try:
                await self._api.create(manifest)
            except ApiException as error:
                if error.status in REJECTED_STATUSES:
                    raise ObjectRejected(manifest, error) from error
                raise
        for manifest in made.apply:
            ours = key(manifest) in cluster.objects
            try:
                await self._api.apply(manifest, ours=ours)
            except ApiException as error:
                if error.status in REJECTED_STATUSES and manifest["kind"] == "PersistentVolumeClaim":
                    unmet = str(ObjectRejected(manifest, error))  # it stays as large as it is
                    continue
                if error.status in REJECTED_STATUSES or (error.status == CONFLICT and not ours):
                    raise ObjectRejected(manifest, error) from error
                raise
        for gone in made.prune:
            there = cluster.objects[gone]
            if "deletionTimestamp" not in there["metadata"]:
                await self._api.delete(there)
        return unmet

    async def _say(
        self, cluster: ClusterState, status: report.Status, transitions: Sequence[Transition]
    ) -> None:
        if patch := merge_patch(cluster.status, status):
            await self._api.write_status(cluster.service, patch)
        # Once it is written down: who is interrupted before tells it again, and nobody tells it twice.
        for transition in transitions:
            self._tell(cluster.service, transition)
        owner = cluster.owner
        self._stands(owner.namespace, owner.name, status, _objectives(cluster.service))

    async def _bind(self, scalers: Sequence[Manifest], state: ServiceState | None) -> None:
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
    """The API server does not take an object, and will not the next time."""

    def __init__(self, manifest: Manifest, answer: ApiException) -> None:
        super().__init__(f"{manifest['kind']} {manifest['metadata']['name']}: {answer.reason}")
        self.answer = answer
