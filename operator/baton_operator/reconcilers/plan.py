"""
The plan for one InferenceService: a pure function of its state in the cluster.

Equal states give equal plans, an executed plan leads to an empty one, and no plan prunes objects that
serve. The reconciler executes plans and may be interrupted anywhere: the next plan starts from the new
state.

**Upgrades of the operator** replace routers, a few services at a time. A new operator has other defaults and
flags, so the routers of every service get another template. Each Deployment replaces its routers one by one;
this bounds how many Deployments do so at once. A change by a user does not wait. Routers that never become
ready keep their service's turn: a bad upgrade stops there, and the old routers serve on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from baton_api import labels
from baton_operator import names
from baton_operator.cluster.api_resources import PRUNED
from baton_operator.cluster.state import ClusterState
from baton_operator.kinds.engine import EngineType
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.part import amount
from baton_operator.kinds.service_policies import MutualTls
from baton_operator.kinds.worker_role import WorkerRole
from baton_operator.manifests import (
    batches,
    exposure,
    inference_pool,
    mutual_tls,
    network,
    pods,
    routers,
    workers,
)
from baton_operator.manifests.engines import checks
from baton_operator.manifests.exposure import CERTIFICATE_API, GATEWAY_API
from baton_operator.manifests.inference_pool import POOL_API
from baton_operator.manifests.model_files import ModelFiles
from baton_operator.manifests.objects import (
    Key,
    Manifest,
    ObjectName,
    contains,
    is_current,
    keep_template,
    key,
    owned,
    with_hash,
)
from baton_operator.manifests.revision import Revision
from baton_operator.manifests.routers import SPEC_GENERATION
from baton_operator.manifests.workers import GROUP_API, GROUP_KIND
from baton_operator.rollout import revision_history
from baton_operator.rollout.decision import (
    RevisionPlan,
    RevisionState,
    RoleName,
    RoleState,
    RolloutBounds,
    RolloutTarget,
    decide,
    seconds_until_change,
)
from baton_operator.rollout.model_fetch import ModelFetch, model_fetches
from baton_operator.scaling import roles
from baton_operator.scaling.roles import worker_roles

log = logging.getLogger(__name__)

LIMIT = 4
"""Services at a time, unless the settings say otherwise."""

WAIT_S = 30.0
"""Seconds after which a service that waits for its turn is planned again."""


class RouterRollouts:
    """Limits how many services replace their routers at once after an upgrade of the operator."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._rolling: set[ObjectName] = set()
        self._waiting: set[ObjectName] = set()

    def admit(self, plan: ServicePlan, cluster: ClusterState) -> ServicePlan:
        """Return the plan, without the Deployment of routers if it has to wait for other services."""
        owner = cluster.owner
        service: ObjectName = (owner.namespace, owner.name)
        routers: Key = ("apps/v1", "Deployment", names.router(owner.name))
        existing = cluster.objects.get(routers)
        desired = next((manifest for manifest in plan.apply if key(manifest) == routers), None)
        if not is_upgrade(existing, desired):
            self._waiting.discard(service)
            if is_settled(existing):
                self._rolling.discard(service)
            return plan
        if service in self._rolling or len(self._rolling) < self._limit:
            self._rolling.add(service)
            return plan
        if service not in self._waiting:
            self._waiting.add(service)
            log.info("The routers keep their template while %d other services replace theirs.", self._limit)
        rest = [manifest for manifest in plan.apply if key(manifest) != routers]
        return replace(plan, apply=rest, again_s=min(plan.again_s or WAIT_S, WAIT_S))

    def forget(self, namespace: str, name: str) -> None:
        """Forget a deleted service."""
        self._rolling.discard((namespace, name))
        self._waiting.discard((namespace, name))


def is_upgrade(existing: Manifest | None, desired: Manifest | None) -> bool:
    """Return whether routers would be replaced without a change of the spec."""
    if existing is None or desired is None or not existing["spec"].get("replicas", 1):
        return False
    old_generation, new_generation = (
        one["metadata"].get("annotations", {}).get(SPEC_GENERATION) for one in (existing, desired)
    )
    # Version 0.1.0 did not record the generation of the spec.
    same = old_generation in (None, new_generation)
    return same and not contains(existing["spec"]["template"], desired["spec"]["template"])


def is_settled(deployment: Manifest | None) -> bool:
    """Return whether all routers have the newest template and are ready, or no status exists."""
    status = (deployment or {}).get("status", {})
    if deployment is None or "observedGeneration" not in status:
        return True
    replicas = deployment["spec"].get("replicas", 1)
    return status["observedGeneration"] >= deployment["metadata"].get("generation", 0) and all(
        status.get(count, 0) == replicas for count in ("replicas", "updatedReplicas", "availableReplicas")
    )


@dataclass(frozen=True, slots=True)
class OperatorDefaults:
    """Defaults from OperatorSettings."""

    worker: str
    router: str
    mutual_tls: MutualTls | None = None
    """Default of spec.security.mutualTls."""
    metrics_namespace: str = ""
    """Default of spec.security.metricsNamespace; empty: none."""
    engines: Mapping[EngineType, str] = field(default_factory=dict)
    """Default images of workers with other engines than Baton."""
    namespace: str = "baton-system"
    """Namespace of the operator's pods."""

    def worker_image(self, engine: EngineType) -> str:
        """Return the default image of workers with this engine; empty: none."""
        return self.worker if engine == "Baton" else self.engines.get(engine, "")


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """The operations for one service, in order: create, apply, prune."""

    apply: Sequence[Manifest]
    """Objects to apply."""
    create: Sequence[Manifest] = ()
    """Objects to create once; existing ones stay unchanged."""
    prune: Sequence[Key] = ()
    ticket_secret: bool = False
    """Whether to create the Secret for tickets, after `apply`, unless it exists."""
    again_s: float | None = None
    """Seconds after which to plan again without a change; None: not needed."""
    state: ServiceState | None = field(default=None, repr=False)
    """Decisions that the status is derived from."""


@dataclass(frozen=True, slots=True)
class ServiceState:
    """Decisions about a service and its revisions."""

    spec: InferenceServiceSpec
    target: Revision
    targets: Mapping[RoleName, int]
    seen: Sequence[RevisionState]
    revision_plans: Mapping[str, RevisionPlan]
    revisions: Mapping[str, Revision]
    models: Mapping[str, ModelFetch]
    """Progress of fetching the model, by revision."""
    unsupported: Sequence[str]
    """Optional APIs that the spec needs and the cluster lacks."""

    @property
    def model(self) -> ModelFetch:
        """Progress of the target revision."""
        return self.models[self.target.name]

    def of_role(self, name: RoleName) -> list[RoleState]:
        """Return the workers of a role, by revision."""
        return [found.roles[name] for found in self.seen if name in found.roles]


def plan_service(cluster: ClusterState, images: OperatorDefaults, now: float) -> ServicePlan:
    """Return the plan. `now`: Unix seconds. Raises ValueError if the spec is invalid."""
    spec = _with_defaults(InferenceServiceSpec.model_validate(cluster.service["spec"]), images)
    checks.check(cluster.owner.name, spec, images.worker_image(spec.engine.type))
    inference_pool.check(spec)
    state, again_s = _plan_revisions(cluster, spec, images, now)
    wanted = (
        *_service_objects(cluster, state, images),
        *_revision_objects(cluster, state, images),
        *_grown_claim(cluster, state),
    )
    desired = [with_hash(one) for one in wanted]
    create = _objects_to_create(cluster, state)
    apply = [manifest for manifest in desired if not is_current(cluster.objects.get(key(manifest)), manifest)]
    return ServicePlan(
        apply=apply,
        create=[one for one in create if key(one) not in cluster.objects],
        prune=_objects_to_prune(cluster, state, [*desired, *create]),
        ticket_secret=mutual_tls.missing_ticket_secret(
            cluster.owner.name, cluster.objects, apply, [pod.trouble for pod in cluster.pods]
        ),
        again_s=again_s,
        state=state,
    )


def _plan_revisions(
    cluster: ClusterState, spec: InferenceServiceSpec, images: OperatorDefaults, now: float
) -> tuple[ServiceState, float | None]:
    """Return the decisions, and the seconds until they may change without another event."""
    stored = revision_history.known_revisions(cluster)
    image = images.worker_image(spec.engine.type)
    revision = revision_history.wanted_revision(cluster, spec, stored, image, images.router, now)
    revisions = {**stored, revision.name: revision}
    seen = [revision_history.revision_state(cluster, one, now) for one in revisions.values()]
    targets = roles.targets(cluster, spec)
    models = model_fetches(cluster, revisions)
    missing = _missing_apis(cluster, spec, revision)
    want = RolloutTarget(
        revision=revision.name,
        targets=targets,
        bounds=_bounds(spec),
        policy=spec.rollout,
        suspended=spec.suspend,
        held=not models[revision.name].present or GROUP_API in missing,
    )
    revision_plans = decide(want, seen, now)
    kept = _retained_revisions(
        spec.rollout.revision_history_limit, revisions, seen, revision_plans, revision.name
    )
    state = ServiceState(spec, revision, targets, seen, revision_plans, kept, models, missing)
    return state, seconds_until_change(want, seen, now)


def _with_defaults(spec: InferenceServiceSpec, images: OperatorDefaults) -> InferenceServiceSpec:
    # Only Baton's own engine speaks mutual TLS with routers.
    issuer = images.mutual_tls if spec.engine.type == "Baton" else None
    defaults = {"mutual_tls": issuer, "metrics_namespace": images.metrics_namespace}
    missing = {name: value for name, value in defaults.items() if getattr(spec.security, name) is None}
    return spec.model_copy(update={"security": spec.security.model_copy(update=missing)})


def _bounds(spec: InferenceServiceSpec) -> dict[RoleName, RolloutBounds]:
    """Of both roles: an old revision may have a role that the spec does not have any more."""
    roles: dict[RoleName, WorkerRole] = {"prefill": spec.prefill or spec.decode, "decode": spec.decode}
    strategies = {name: role.update_strategy for name, role in roles.items()}
    return {
        name: RolloutBounds(strategy.max_surge, strategy.max_unavailable)
        for name, strategy in strategies.items()
    }


def _retained_revisions(
    limit: int,
    revisions: Mapping[str, Revision],
    seen: Sequence[RevisionState],
    plans: Mapping[str, RevisionPlan],
    wanted: str,
) -> dict[str, Revision]:
    """Return the revisions to keep: existing and target ones, and the newest `limit` of the others."""
    existing = {name for name, plan in plans.items() if plan.weight or any(plan.replicas.values())}
    existing |= {wanted} | {found.revision for found in seen if found.exists or found.weight}
    past = sorted(revisions.keys() - existing, key=lambda name: revisions[name].created, reverse=True)
    chosen = existing | set(past[:limit])
    return {name: revision for name, revision in revisions.items() if name in chosen}


def _missing_apis(cluster: ClusterState, spec: InferenceServiceSpec, revision: Revision) -> list[str]:
    needed = []
    if any(map(workers.is_group, revision.blueprint.roles.values())):
        needed.append(GROUP_API)
    if spec.exposure.type == "HTTPRoute":
        needed.append(GATEWAY_API)
    if spec.exposure.inference_pool is not None:
        needed.append(POOL_API)
    of_hosts = spec.exposure.tls if spec.exposure.type == "Ingress" else None
    if any(one is not None and one.issuer_ref is not None for one in (of_hosts, spec.security.mutual_tls)):
        needed.append(CERTIFICATE_API)
    return [api for api in needed if api not in cluster.apis]


def _service_objects(cluster: ClusterState, state: ServiceState, images: OperatorDefaults) -> list[Manifest]:
    """Return the objects that a service has once."""
    owner, spec = cluster.owner, state.spec
    replicas = 0 if spec.suspend else spec.router.replicas
    weights = {name: plan.weight for name, plan in state.revision_plans.items() if plan.weight}
    shown = _mutual_tls(state)
    desired = [
        *routers.account(owner, spec),
        routers.weights(owner, weights),
        routers.service(owner, picks=spec.exposure.inference_pool is not None),
        routers.router(
            owner, spec, images.router, replicas, mutual_tls.shown(owner, shown), cluster.generation
        ),
    ]
    if not spec.security.service_account_name:
        body = {"automountServiceAccountToken": False}
        desired.append(owned(owner, "v1", "ServiceAccount", names.workers_account(owner.name), body))
    if batches.by_jobs(spec.router.batches):
        desired += batches.of_runners(owner, spec.security.network_policy)
    if replicas > 1:
        desired.append(pods.disruption_budget(owner, names.ROUTER, 1))
    for name, role in worker_roles(spec).items():
        if role.pod_disruption_budget.enabled:
            label = "both" if name == "decode" and spec.prefill is None else name
            desired.append(pods.disruption_budget(owner, label, role.pod_disruption_budget.max_unavailable))
    if spec.security.network_policy:
        desired.append(network.routers(owner, spec, images.namespace))
        if spec.exposure.inference_pool is not None:
            desired.append(network.gateways(owner, spec))
    exposing = exposure.exposed(owner, spec.exposure, pool=_inference_pool(cluster, state))
    optional = [*exposing, *mutual_tls.certificate(owner, shown)]
    desired += [manifest for manifest in optional if manifest["apiVersion"] not in state.unsupported]
    return desired


def _inference_pool(cluster: ClusterState, state: ServiceState) -> Manifest | None:
    """Return the pool; None if it is not wanted, or the cluster lacks its API."""
    wanted = state.spec.exposure.inference_pool
    if wanted is None or POOL_API in state.unsupported:
        return None
    existing = [state.revisions[found.revision] for found in state.seen if found.exists]
    return inference_pool.pool(cluster.owner, wanted, state.target, existing)


def _mutual_tls(state: ServiceState) -> MutualTls | None:
    """Return the certificate of routers: that of the spec, or of an existing revision."""
    existing = {found.revision for found in state.seen if found.exists}
    old = [revision.blueprint.mutual_tls for name, revision in state.revisions.items() if name in existing]
    return next((one for one in (state.spec.security.mutual_tls, *old) if one is not None), None)


def _revision_objects(cluster: ClusterState, state: ServiceState, images: OperatorDefaults) -> list[Manifest]:
    """Return the objects of existing revisions, and the ConfigMaps of the others."""
    owner = cluster.owner
    existing = {found.revision: found.exists for found in state.seen}
    desired = []
    for name, revision in state.revisions.items():
        desired.append(revision_history.revision_config_map(cluster, revision, state.models[name].proof))
        if commit := state.models[name].pin:
            desired.append(revision_history.model_pin(owner, revision, commit))
        revision_plan = state.revision_plans[name]
        if not existing[name] and not any(revision_plan.replicas.values()):
            continue
        if state.spec.security.network_policy:
            monitoring = state.spec.security.metrics_namespace or ""
            desired.append(network.workers(owner, revision, images.namespace, monitoring))
        for part, role in revision_history.role_names(revision).items():
            desired.append(workers.service(owner, revision, role))
            workload = workers.workload(owner, revision, role, revision_plan.replicas[part])
            if workload["kind"] != GROUP_KIND or GROUP_API in cluster.apis:
                desired.append(keep_template(cluster.find(*key(workload)), workload))
    return desired


def _objects_to_create(cluster: ClusterState, state: ServiceState) -> list[Manifest]:
    """Return the objects that are created once and then left alone."""
    owner, spec = cluster.owner, state.spec
    files = workers.files(owner, state.target)
    desired = []
    claim = ModelFiles(owner.name, spec.model, "").persistent_volume_claim(owner)
    if claim is not None:
        desired.append(claim)
    existing = cluster.find("v1", "PersistentVolumeClaim", files.claim)
    if files.job_needed and not state.model.present and (existing or not files.makes_claim):
        blueprint = state.target.blueprint
        desired.append(
            files.job(
                owner,
                pull_secrets=spec.security.pull_secret_names,
                claim_uid=existing["metadata"].get("uid", "") if existing else "",
                account=blueprint.service_account_name or names.workers_account(owner.name),
                placement=blueprint.decode.placement,
            )
        )
    for name, role in worker_roles(spec).items():
        if role.scaling is not None:
            desired.append(roles.scaler(cluster, name, _current(state, name, state.targets[name])))
    return desired


def _grown_claim(cluster: ClusterState, state: ServiceState) -> list[Manifest]:
    """Return the claim of the model if its size grew. Its storage class may reject that."""
    owner = cluster.owner
    desired = ModelFiles(owner.name, state.spec.model, "").persistent_volume_claim(owner)
    existing = cluster.find(*key(desired)) if desired is not None else None
    if desired is None or existing is None or existing.get("status", {}).get("phase") != "Bound":
        return []  # Kubernetes resizes only bound claims
    sizes = [one["spec"]["resources"]["requests"]["storage"] for one in (existing, desired)]
    if amount(sizes[1]) <= amount(sizes[0]):
        return []
    return [{**desired, "spec": {"resources": {"requests": {"storage": sizes[1]}}}}]


def _current(state: ServiceState, name: RoleName, otherwise: int) -> int:
    """Return the current number of workers of a role."""
    existing = sum(one.replicas for one in state.of_role(name))
    role = worker_roles(state.spec)[name]
    return roles.scaled(role, existing or otherwise)


def _objects_to_prune(cluster: ClusterState, state: ServiceState, desired: Sequence[Manifest]) -> list[Key]:
    """Return objects that are no longer desired, except those of revisions with pods."""
    wanted = {key(wanted_manifest) for wanted_manifest in desired}
    alive = {pod.revision for pod in cluster.pods if not pod.finished}
    gone = [
        existing
        for existing, manifest in sorted(cluster.objects.items())
        if existing not in wanted
        and existing[1] in PRUNED
        and manifest["metadata"].get("labels", {}).get(labels.REVISION) not in alive
    ]
    job = ("batch/v1", "Job", workers.files(cluster.owner, state.target).job_name)
    return [*gone, job] if state.model.outdated_job else gone
