"""
The workers of one revision: a Deployment for each role, and a Service through which routers discover them.

A worker of several nodes is a group of pods: its role is a LeaderWorkerSet in place of a Deployment. The
first pod of a group serves the API; the others run its ranks. Engines differ in their containers only
(`baton_operator.manifests.engines`).

The API of LeaderWorkerSets: https://lws.sigs.k8s.io
"""

from __future__ import annotations

from baton_api import labels
from baton_api.workers import Role
from baton_operator import names
from baton_operator.kinds.engine import Variable
from baton_operator.kinds.part import amount
from baton_operator.kinds.worker_role import WorkerRole
from baton_operator.manifests import engines, mutual_tls
from baton_operator.manifests.engines.container import EngineContainer, WorkerPod
from baton_operator.manifests.model_files import ModelFiles
from baton_operator.manifests.objects import Key, Manifest, Owner, given, merged, owned
from baton_operator.manifests.pods import (
    container_security,
    environment,
    field,
    identity,
    in_node_network,
    placed,
    ports,
    resources,
    scratch,
)
from baton_operator.manifests.revision import Revision

GROUP_API, GROUP_KIND = "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"

INSTALLATION = "https://lws.sigs.k8s.io/docs/installation"

WORKER_INDEX, LEADER = "leaderworkerset.sigs.k8s.io/worker-index", "0"
"""Label of the pods of a group, and its value on the leader."""


END_S = 15
"""Seconds after the drain timeout until Kubernetes kills the pod."""


def files(owner: Owner, revision: Revision) -> ModelFiles:
    """Return the model files of a revision."""
    blueprint = revision.blueprint
    image = blueprint.engine.image or revision.image
    if blueprint.engine.type != "Baton":
        image = revision.fetch_image  # `baton fetch` is not in images of other engines
    return ModelFiles(owner.name, blueprint.model, image, names.model_pin(owner.name, revision.name))


def workload_key(owner: Owner, revision: Revision, role: Role) -> Key:
    """Return API, kind and name of the object that creates the pods of a role."""
    if is_group(revision.blueprint.roles[role]):
        return GROUP_API, GROUP_KIND, names.group(owner.name, role, revision.name)
    return "apps/v1", "Deployment", names.worker(owner.name, role, revision.name)


def is_group(role: WorkerRole) -> bool:
    """Whether a worker of the role has several pods."""
    return role.parallelism.nodes > 1


def workload(owner: Owner, revision: Revision, role: Role, replicas: int) -> Manifest:
    """
    Return the Deployment or LeaderWorkerSet of a role.

    Only `replicas` changes: another template is another revision.
    """
    blueprint = revision.blueprint
    labels_ = names.of_role(owner.name, role, revision.name)
    if is_group(blueprint.roles[role]):
        body = _groups(owner, revision, role, replicas)
    else:
        container = engines.container(_worker(owner, revision, role))
        body = {
            "replicas": replicas,
            "revisionHistoryLimit": 0,  # ConfigMaps hold the history of revisions
            "progressDeadlineSeconds": container.startup_s + 60,
            "selector": {"matchLabels": names.selecting(owner.name, role, revision.name)},
            "template": _template(owner, revision, role, container),
        }
    return owned(owner, *workload_key(owner, revision, role), {"spec": body}, labels_)


def _groups(owner: Owner, revision: Revision, role: Role, replicas: int) -> Manifest:
    """Return the spec of a LeaderWorkerSet: each of its groups is one worker."""
    leader = engines.container(_worker(owner, revision, role))
    follower = engines.container(_worker(owner, revision, role, follower=True))
    return {
        "replicas": replicas,
        # The first node is ready only with the others.
        "startupPolicy": "LeaderCreated",
        "leaderWorkerTemplate": {
            "size": revision.blueprint.roles[role].parallelism.nodes,
            # The processes of a worker cannot continue without one of them.
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": _template(owner, revision, role, leader),
            "workerTemplate": _template(owner, revision, role, follower),
        },
    }


def _worker(owner: Owner, revision: Revision, role: Role, *, follower: bool = False) -> WorkerPod:
    tls = mutual_tls.shown(owner, revision.blueprint.mutual_tls).flags
    listening, model = ports(owner, revision, role), files(owner, revision).path
    return WorkerPod(owner, revision, role, listening, model, tls, follower)


def _template(owner: Owner, revision: Revision, role: Role, container: EngineContainer) -> Manifest:
    """Return the pod template of a role."""
    spec = revision.blueprint.roles[role]
    pod_labels = names.of_role(owner.name, role, revision.name)
    template = {
        "metadata": {
            "labels": {**spec.pod_labels, **pod_labels},
            **given(annotations=dict(spec.pod_annotations)),
        },
        "spec": _pod(owner, revision, role, container),
    }
    return merged(template, spec.pod_template)


def service(owner: Owner, revision: Revision, role: Role) -> Manifest:
    """Return the headless Service whose EndpointSlices list the workers and their readiness."""
    blueprint = revision.blueprint
    selector = names.selecting(owner.name, role, revision.name)
    if is_group(blueprint.roles[role]):
        selector[WORKER_INDEX] = LEADER
    body = {
        "clusterIP": "None",
        "selector": selector,
        "ports": [
            {"name": "https", "port": names.HTTP_PORT, "targetPort": "https", "appProtocol": "https"}
            if blueprint.mutual_tls
            else {"name": "http", "port": names.HTTP_PORT, "targetPort": "http"}
        ],
    }
    name = names.worker(owner.name, role, revision.name)
    labels_ = names.of_role(owner.name, role, revision.name)
    if blueprint.engine.type != "Baton":
        labels_[labels.ENGINE] = engines.ENGINES[blueprint.engine.type].kind
    return owned(owner, "v1", "Service", name, {"spec": body}, labels_)


def _pod(owner: Owner, revision: Revision, role: Role, container: EngineContainer) -> Manifest:
    blueprint = revision.blueprint
    spec = blueprint.roles[role]
    model = files(owner, revision)
    volumes, mounts = scratch("/tmp", "/cache")
    shown = mutual_tls.shown(owner, blueprint.mutual_tls)
    size = spec.shared_memory_size
    if container.shared_memory:
        size = str(int(amount(size)) + container.shared_memory)
    memory = {"medium": "Memory", "sizeLimit": size}
    placement = placed(spec.placement, names.selecting(owner.name, role))
    return {
        **placement,
        **given(affinity=merged(_domain_affinity(owner, revision), placement.get("affinity"))),
        **identity(
            blueprint.service_account_name or names.workers_account(owner.name), blueprint.image_pull_secrets
        ),
        # In the node's network, cluster names are otherwise unknown.
        **({"dnsPolicy": "ClusterFirstWithHostNet"} if in_node_network(spec) else {}),
        "terminationGracePeriodSeconds": container.pre_stop_s + container.stop_s + END_S,
        **given(
            initContainers=model.init_containers,
            resourceClaims=[
                {"name": claim.name, "resourceClaimTemplateName": claim.resource_claim_template_name}
                for claim in spec.resource_claims
            ],
        ),
        "containers": [
            _main(revision, role, container, [*mounts, *model.mounts, *shown.mounts, *container.mounts])
        ],
        "volumes": [
            {"name": "shm", "emptyDir": memory},
            *volumes,
            *model.volumes,
            *shown.volumes,
            *container.volumes,
        ],
    }


def _main(revision: Revision, role: Role, container: EngineContainer, mounts: list[Manifest]) -> Manifest:
    """Return the main container of a worker. `mounts`: volumes besides /dev/shm."""
    blueprint = revision.blueprint
    spec = blueprint.roles[role]
    return {
        "name": names.MAIN,
        "image": spec.image or blueprint.engine.image or revision.image,
        **given(command=list(container.command)),
        "args": container.args,
        "env": [
            field("POD_IP", "status.podIP"),
            field("POD_NAME", "metadata.name"),
            {"name": "XDG_CACHE_HOME", "value": "/cache"},
            {"name": "HOME", "value": "/tmp"},
            *environment(
                container.env,
                _network(revision),
                blueprint.engine.env,
                blueprint.transfer.env,
                spec.env,
            ),
        ],
        "resources": resources(spec.resources, [claim.name for claim in spec.resource_claims]),
        "securityContext": container_security(),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, *mounts],
        **container.served,
    }


def _network(revision: Revision) -> list[Variable]:
    """Return the transports that UCX may use. Default: all, and UCX chooses the fastest."""
    tcp = revision.blueprint.transfer.backend == "TCP"
    return [Variable(name="UCX_TLS", value="tcp,self")] if tcp else []


def _domain_affinity(owner: Owner, revision: Revision) -> Manifest:
    """Return the affinity of the workers of one revision to one network domain."""
    topology = revision.blueprint.transfer.topology
    if topology.key is None:
        return {}
    wanted = {labels.SERVICE: owner.name, labels.REVISION: revision.name}
    term = {"topologyKey": topology.key, "labelSelector": {"matchLabels": wanted}}
    if topology.policy == "Required":
        return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    weighted = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": weighted}}
