"""
What is to be done for one InferenceService, decided from what is there: a pure function.

The same observation gives the same plan, a plan that was carried out gives an empty one, and nothing that
serves is ever pruned. Carrying it out is somebody else's work, who may be interrupted anywhere: the next
plan is made from what there is then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton_api import labels
from baton_operator import names
from baton_operator.cluster.api_resources import PRUNED
from baton_operator.cluster.state import ClusterState
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.service_policies import MutualTls
from baton_operator.manifests import batches, exposure, mutual_tls, network, pods, routers, tickets, workers
from baton_operator.manifests.drift import amount, is_current, keep_template, with_hash
from baton_operator.manifests.exposure import CERTIFICATE_API, GATEWAY_API
from baton_operator.manifests.model_files import ModelFiles
from baton_operator.manifests.objects import Key, Manifest, key, made
from baton_operator.manifests.revision import Revision
from baton_operator.rollout import revision_history
from baton_operator.rollout.decision import (
    RevisionPlan,
    RevisionState,
    RoleName,
    RolloutBounds,
    RolloutTarget,
    decide,
    seconds_until_change,
)
from baton_operator.rollout.model_fetch import ModelFetch, model_fetches
from baton_operator.scaling import role_scalers


@dataclass(frozen=True, slots=True)
class OperatorDefaults:
    """The operator's defaults."""

    worker: str
    router: str
    mutual_tls: MutualTls | None = None
    """Of services that say nothing of it."""
    metrics_namespace: str = ""
    """Likewise: whose pods may read metrics; nobody's if it is empty."""


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """What is to be done."""

    apply: Sequence[Manifest]
    """To be as they stand here, after what is to be created."""
    create: Sequence[Manifest] = ()
    """To be made if they are not there, and left alone otherwise."""
    prune: Sequence[Key] = ()
    ticket_secret: bool = False
    """Whether to create the Secret for tickets, before all else, unless it exists."""
    again_s: float | None = None
    """Seconds after which to plan again although nothing has changed."""
    state: ServiceState | None = field(default=None, repr=False)
    """What status is written from."""


@dataclass(frozen=True, slots=True)
class ServiceState:
    """Where the service stands."""

    spec: InferenceServiceSpec
    wanted: Revision
    targets: Mapping[RoleName, int]
    seen: Sequence[RevisionState]
    fates: Mapping[str, RevisionPlan]
    generations: Mapping[str, Revision]
    models: Mapping[str, ModelFetch]
    """Where the files of each revision's model stand."""
    unsupported: Sequence[str]
    """Optional APIs that the spec needs and the cluster has not."""

    @property
    def model(self) -> ModelFetch:
        """Of the wanted revision."""
        return self.models[self.wanted.revision]


def plan_service(cluster: ClusterState, images: OperatorDefaults, now: float) -> ServicePlan:
    """`now`: Unix seconds. Raises ValueError if the spec cannot be carried out."""
    spec = _with_defaults(InferenceServiceSpec.model_validate(cluster.service["spec"]), images)
    state, again_s = _decided(cluster, spec, images, now)
    wanted = (*_shared(cluster, state, images), *_workers(cluster, state), *_grown_claim(cluster, state))
    wished = [with_hash(one) for one in wanted]
    create = _created(cluster, state)
    apply = [one for one in wished if not is_current(cluster.objects.get(key(one)), one)]
    return ServicePlan(
        apply=apply,
        create=[one for one in create if key(one) not in cluster.objects],
        prune=_pruned(cluster, state, [*wished, *create]),
        ticket_secret=tickets.missing(
            cluster.owner.name, cluster.objects, apply, [pod.trouble for pod in cluster.pods]
        ),
        again_s=again_s,
        state=state,
    )


def _decided(
    cluster: ClusterState, spec: InferenceServiceSpec, images: OperatorDefaults, now: float
) -> tuple[ServiceState, float | None]:
    """What is to become of each revision, and seconds until that may be decided otherwise."""
    remembered = revision_history.known_revisions(cluster)
    revision = _wanted(cluster, spec, remembered, images, now)
    known = {**remembered, revision.revision: revision}
    weights = {one["name"]: one.get("weight", 0) for one in cluster.status.get("revisions", ())}
    seen = [
        revision_history.revision_state(cluster, one, weights.get(name, 0), now)
        for name, one in known.items()
    ]
    targets = role_scalers.targets(cluster, spec)
    models = model_fetches(cluster, known)
    want = RolloutTarget(
        revision=revision.revision,
        targets=targets,
        bounds=_bounds(spec),
        policy=spec.rollout,
        suspended=spec.suspend,
        held=not models[revision.revision].present,
    )
    fates = decide(want, seen, now)
    kept = _kept(spec, known, seen, fates, revision.revision)
    state = ServiceState(spec, revision, targets, seen, fates, kept, models, _unsupported(cluster, spec))
    return state, seconds_until_change(want, seen, now)


def _wanted(
    cluster: ClusterState,
    spec: InferenceServiceSpec,
    remembered: Mapping[str, Revision],
    images: OperatorDefaults,
    now: float,
) -> Revision:
    try:
        return revision_history.wanted_revision(cluster, spec, remembered, images.worker, now)
    except KeyError as error:
        there = ", ".join(sorted(remembered)) or "none"
        raise ValueError(
            f"spec.rollout.rollbackTo names the revision {error.args[0]}, which is not remembered "
            f"(those that are: {there})."
        ) from error


def _with_defaults(spec: InferenceServiceSpec, images: OperatorDefaults) -> InferenceServiceSpec:
    known = {"mutual_tls": images.mutual_tls, "metrics_namespace": images.metrics_namespace}
    missing = {name: value for name, value in known.items() if getattr(spec.security, name) is None}
    return spec.model_copy(update={"security": spec.security.model_copy(update=missing)})


def _bounds(spec: InferenceServiceSpec) -> dict[RoleName, RolloutBounds]:
    """Of both roles: an old revision may have a role that the spec does not have any more."""
    prefill, decode = ((one or spec.decode).update_strategy for one in (spec.prefill, spec.decode))
    return {
        "prefill": RolloutBounds(prefill.max_surge, prefill.max_unavailable),
        "decode": RolloutBounds(decode.max_surge, decode.max_unavailable),
    }


def _kept(
    spec: InferenceServiceSpec,
    known: Mapping[str, Revision],
    seen: Sequence[RevisionState],
    fates: Mapping[str, RevisionPlan],
    wanted: str,
) -> dict[str, Revision]:
    """The revisions that are remembered: all that are there or wanted, and the newest of the others."""
    there = {one.revision for one in seen if one.exists or one.weight or fates[one.revision].weight}
    there |= {wanted} | {name for name, fate in fates.items() if any(fate.replicas.values())}
    past = sorted(known.keys() - there, key=lambda name: known[name].created, reverse=True)
    chosen = there | set(past[: spec.rollout.revision_history_limit])
    return {name: one for name, one in known.items() if name in chosen}


def _unsupported(cluster: ClusterState, spec: InferenceServiceSpec) -> list[str]:
    needed = []
    if spec.exposure.type == "HTTPRoute":
        needed.append(GATEWAY_API)
    of_hosts = spec.exposure.tls if spec.exposure.type == "Ingress" else None
    if any(one is not None and one.issuer_ref is not None for one in (of_hosts, spec.security.mutual_tls)):
        needed.append(CERTIFICATE_API)
    return [api for api in needed if api not in cluster.apis]


def _shared(cluster: ClusterState, state: ServiceState, images: OperatorDefaults) -> list[Manifest]:
    """What a service has once, whatever revisions there are."""
    owner, spec = cluster.owner, state.spec
    replicas = 0 if spec.suspend else spec.router.replicas
    weights = {name: fate.weight for name, fate in state.fates.items() if fate.weight}
    shown = _mutual_tls(state)
    wished = [
        *routers.account(owner, spec),
        routers.weights(owner, weights),
        routers.service(owner),
        routers.router(
            owner, spec, images.router, replicas, mutual_tls.shown(owner, shown), cluster.generation
        ),
    ]
    if not spec.security.service_account_name:
        body = {"automountServiceAccountToken": False}
        wished.append(made(owner, "v1", "ServiceAccount", names.workers_account(owner.name), body))
    if batches.by_jobs(spec.router.batches):
        wished += batches.of_runners(owner, spec.security.network_policy)
    if replicas > 1:
        wished.append(pods.disruption_budget(owner, names.ROUTER, 1))
    for name, role in role_scalers.roles(spec).items():
        if role.pod_disruption_budget.enabled:
            label = "both" if name == "decode" and spec.prefill is None else name
            wished.append(pods.disruption_budget(owner, label, role.pod_disruption_budget.max_unavailable))
    if spec.security.network_policy:
        wished.append(network.routers(owner, spec))
    optional = [*exposure.exposed(owner, spec.exposure), *mutual_tls.certificate(owner, shown)]
    wished += [one for one in optional if one["apiVersion"] not in state.unsupported]
    return wished


def _mutual_tls(state: ServiceState) -> MutualTls | None:
    """What routers show: the spec's certificate, or that of a revision which still wants one."""
    there = {one.revision for one in state.seen if one.exists}
    old = [one.blueprint.mutual_tls for name, one in state.generations.items() if name in there]
    return next((one for one in (state.spec.security.mutual_tls, *old) if one is not None), None)


def _workers(cluster: ClusterState, state: ServiceState) -> list[Manifest]:
    """What the revisions have: those that are there, and what is remembered of the others."""
    owner = cluster.owner
    there = {one.revision: one.exists for one in state.seen}
    wished = []
    for name, revision in state.generations.items():
        wished.append(revision_history.revision_config_map(cluster, revision, state.models[name].proof))
        if commit := state.models[name].pin:
            wished.append(revision_history.model_pin(owner, revision, commit))
        fate = state.fates[name]
        if not there[name] and not any(fate.replicas.values()):
            continue
        if state.spec.security.network_policy:
            wished.append(network.workers(owner, revision, state.spec.security.metrics_namespace or ""))
        for part, role in revision_history.role_names(revision).items():
            wished.append(workers.service(owner, revision, role))
            deployment = workers.deployment(owner, revision, role, fate.replicas[part])
            wished.append(keep_template(cluster.find(*key(deployment)), deployment))
    return wished


def _created(cluster: ClusterState, state: ServiceState) -> list[Manifest]:
    """What is made once and not changed any more."""
    owner, spec = cluster.owner, state.spec
    files = workers.files(owner, state.wanted)
    wished = []
    claim = ModelFiles(owner.name, spec.model, "").persistent_volume_claim(owner)
    if claim is not None:
        wished.append(claim)
    there = cluster.find("v1", "PersistentVolumeClaim", files.claim)
    if files.job_needed and not state.model.present and (there or not files.makes_claim):
        uid = there["metadata"].get("uid", "") if there else ""
        blueprint = state.wanted.blueprint
        job = files.job(
            owner,
            pull_secrets=list(spec.security.image_pull_secrets),
            claim_uid=uid,
            account=blueprint.service_account_name or names.workers_account(owner.name),
            placement=blueprint.decode.placement,
        )
        wished.append(job)
    for name, role in role_scalers.roles(spec).items():
        if role.scaling is not None:
            wished.append(role_scalers.scaler(cluster, name, _current(state, name, state.targets[name])))
    return wished


def _grown_claim(cluster: ClusterState, state: ServiceState) -> list[Manifest]:
    """The model's claim, if it is to be larger than it is. Its storage class may refuse that."""
    owner = cluster.owner
    wished = ModelFiles(owner.name, state.spec.model, "").persistent_volume_claim(owner)
    there = cluster.find(*key(wished)) if wished is not None else None
    if wished is None or there is None or there.get("status", {}).get("phase") != "Bound":
        return []  # Kubernetes lets no claim grow before it is bound
    sizes = [one["spec"]["resources"]["requests"]["storage"] for one in (there, wished)]
    if amount(sizes[1]) <= amount(sizes[0]):
        return []
    return [{**wished, "spec": {"resources": {"requests": {"storage": sizes[1]}}}}]


def _current(state: ServiceState, name: RoleName, otherwise: int) -> int:
    """How many workers a role has now."""
    there = sum(one.roles[name].replicas for one in state.seen if name in one.roles)
    role = role_scalers.roles(state.spec)[name]
    return role_scalers.scaled(role, there or otherwise)


def _pruned(cluster: ClusterState, state: ServiceState, wished: Sequence[Manifest]) -> list[Key]:
    """What was made and is not wanted any more, but nothing of a revision that has pods."""
    wanted = {key(one) for one in wished}
    alive = {pod.revision for pod in cluster.pods if not pod.finished}
    gone = [
        there
        for there, manifest in sorted(cluster.objects.items())
        if there not in wanted
        and there[1] in PRUNED
        and manifest["metadata"].get("labels", {}).get(labels.REVISION) not in alive
    ]
    job = ("batch/v1", "Job", workers.files(cluster.owner, state.wanted).job_name)
    return [*gone, job] if state.model.outdated_job else gone
