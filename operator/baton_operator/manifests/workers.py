"""
The workers of one revision: a Deployment for each role, and a Service through which routers discover them.

Ports are fixed in the network of a pod. With `hostNetwork`, all pods of a node share its ports, and
Kubernetes places a pod only where its ports are free. Each role of each revision therefore has its own
ports: prefill and decode workers, old and new revisions, and several services fit on one node. Two workers of
the same role and revision still need two nodes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from baton_api import labels
from baton_api.workers import Role
from baton_operator import names
from baton_operator.kinds.engine import Variable
from baton_operator.kinds.worker_role import WorkerRole
from baton_operator.manifests import mutual_tls, tickets
from baton_operator.manifests.model_files import ModelFiles
from baton_operator.manifests.objects import Manifest, Owner, given, made, merged
from baton_operator.manifests.pods import (
    container_security,
    environment,
    field,
    placed,
    pod_security,
    scratch,
)
from baton_operator.manifests.revision import Revision

STARTUP_PERIOD_S = 10
END_S = 15
"""Seconds after the drain timeout until Kubernetes kills the pod."""

COMMANDS = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.BOTH: "serve"}


def files(owner: Owner, generation: Revision) -> ModelFiles:
    """Return the model files of a revision."""
    blueprint = generation.blueprint
    image = blueprint.engine.image or generation.image
    return ModelFiles(owner.name, blueprint.model, image, names.model_pin(owner.name, generation.revision))


def deployment(owner: Owner, generation: Revision, role: Role, replicas: int) -> Manifest:
    """Return the Deployment of a role. Only `replicas` changes: another template is another revision."""
    blueprint = generation.blueprint
    spec, revision = blueprint.roles[role], generation.revision
    pod_labels = names.of_role(owner.name, role, revision)
    template = {
        "metadata": {
            "labels": {**spec.pod_labels, **pod_labels},
            **given(annotations=dict(spec.pod_annotations)),
        },
        "spec": _pod(owner, generation, role, spec),
    }
    body = {
        "replicas": replicas,
        "revisionHistoryLimit": 0,  # ConfigMaps hold the history of revisions
        "progressDeadlineSeconds": spec.startup_timeout.whole_seconds + 60,
        "selector": {"matchLabels": names.selecting(owner.name, role, revision)},
        "template": merged(template, spec.pod_template),
    }
    name = names.worker(owner.name, role, revision)
    return made(owner, "apps/v1", "Deployment", name, {"spec": body}, pod_labels)


def service(owner: Owner, generation: Revision, role: Role) -> Manifest:
    """Return the headless Service whose EndpointSlices list the workers and their readiness."""
    revision = generation.revision
    body = {
        "clusterIP": "None",
        "selector": names.selecting(owner.name, role, revision),
        "ports": [
            {"name": "https", "port": names.HTTP_PORT, "targetPort": "https", "appProtocol": "https"}
            if generation.blueprint.mutual_tls
            else {"name": "http", "port": names.HTTP_PORT, "targetPort": "http"}
        ],
    }
    name, pod_labels = names.worker(owner.name, role, revision), names.of_role(owner.name, role, revision)
    return made(owner, "v1", "Service", name, {"spec": body}, pod_labels)


def _pod(owner: Owner, generation: Revision, role: Role, spec: WorkerRole) -> Manifest:
    blueprint = generation.blueprint
    model = files(owner, generation)
    volumes, mounts = scratch("/tmp", "/cache")
    shown = mutual_tls.shown(owner, blueprint.mutual_tls)
    listening = ports(owner, generation, role)
    memory = {"medium": "Memory", "sizeLimit": spec.resources.shared_memory}
    placement = placed(spec.placement, names.selecting(owner.name, role))
    return {
        **placement,
        **given(affinity=merged(_domain_affinity(owner, generation), placement.get("affinity"))),
        "serviceAccountName": blueprint.service_account_name or names.workers_account(owner.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # In the node's network, cluster names are otherwise unknown.
        **({"dnsPolicy": "ClusterFirstWithHostNet"} if in_node_network(spec) else {}),
        "securityContext": pod_security(),
        "terminationGracePeriodSeconds": spec.drain.total_s + END_S,
        **given(
            imagePullSecrets=[{"name": name} for name in blueprint.image_pull_secrets],
            initContainers=model.init_containers,
            resourceClaims=[
                {"name": one.name, "resourceClaimTemplateName": one.resource_claim_template_name}
                for one in spec.resource_claims
            ],
        ),
        "containers": [
            {
                "name": names.MAIN,
                "image": spec.image or blueprint.engine.image or generation.image,
                "args": _arguments(generation, role, spec, model.path, shown.flags, listening),
                "env": [
                    field("POD_IP", "status.podIP"),
                    field("POD_NAME", "metadata.name"),
                    {"name": "XDG_CACHE_HOME", "value": "/cache"},
                    {"name": "HOME", "value": "/tmp"},
                    *environment(
                        _tickets(owner, role, spec),
                        _network(generation),
                        blueprint.engine.env,
                        blueprint.transfer.env,
                        spec.env,
                    ),
                ],
                "ports": _ports(generation, role, listening),
                "resources": _resources(spec),
                "securityContext": container_security(),
                "volumeMounts": [
                    {"name": "shm", "mountPath": "/dev/shm"},
                    *mounts,
                    *model.mounts,
                    *shown.mounts,
                ],
                **_probes(spec),
                **_pre_stop(spec),
            }
        ],
        "volumes": [{"name": "shm", "emptyDir": memory}, *volumes, *model.volumes, *shown.volumes],
    }


def _arguments(
    generation: Revision, role: Role, spec: WorkerRole, model: str, tls: list[str], listening: Ports
) -> list[str]:
    blueprint = generation.blueprint
    engine = blueprint.engine
    flags = [
        COMMANDS[role],
        model,
        "--name=$(POD_NAME)",
        "--host=0.0.0.0",
        f"--port={listening.http}",
        f"--dtype={engine.dtype}",
        f"--kv-events=tcp://$(POD_IP):{listening.kv_events}",
        f"--kv-replay=tcp://$(POD_IP):{listening.kv_replay}",
        f"--drain-s={spec.drain.timeout.seconds:g}",
        f"--transfer-deadline-s={blueprint.transfer.timeout.seconds:g}",
        *(f"--served-model-name={name}" for name in blueprint.served_names),
        *tls,
    ]
    if blueprint.mutual_tls:
        # Events are not encrypted; routers do without the tokens in them.
        flags += [f"--health-port={listening.health}", "--no-kv-tokens"]
    if role is Role.PREFILL:
        flags += ["--control-host=$(POD_IP)", f"--control-port={listening.control}"]
    if engine.max_model_len is not None:
        flags.append(f"--max-model-len={engine.max_model_len}")
    if engine.kv_cache_memory is not None:
        flags.append(f"--kv-cache-memory={engine.kv_cache_memory}")
    return [*flags, *engine.args, *spec.args]


def _tickets(owner: Owner, role: Role, spec: WorkerRole) -> list[Variable]:
    """Return the key that verifies tickets. Workers of both roles do not use tickets."""
    if role is Role.BOTH:
        return []
    return tickets.variable(tickets.WORKER_VARIABLE, owner.name, spec.pod_template)


def _network(generation: Revision) -> list[Variable]:
    """Return the transports that UCX may use. Default: all, and UCX chooses the fastest."""
    tcp = generation.blueprint.transfer.backend == "TCP"
    return [Variable(name="UCX_TLS", value="tcp,self")] if tcp else []


def _ports(generation: Revision, role: Role, listening: Ports) -> list[Manifest]:
    named = [
        *_http_ports(generation, listening),
        {"name": "kv-events", "containerPort": listening.kv_events},
        {"name": "kv-replay", "containerPort": listening.kv_replay},
    ]
    if role is Role.PREFILL:
        named.append({"name": "control", "containerPort": listening.control})
    return named


def _http_ports(generation: Revision, listening: Ports) -> list[Manifest]:
    """Return the ports of API and health. Probes and Prometheus use `http`, which needs no certificate."""
    if generation.blueprint.mutual_tls is None:
        return [{"name": "http", "containerPort": listening.http}]
    return [
        {"name": "https", "containerPort": listening.http},
        {"name": "http", "containerPort": listening.health},
    ]


def _resources(role: WorkerRole) -> Manifest:
    wanted, devices = role.resources, {}
    if wanted.gpu is not None and wanted.gpu.count:
        devices[wanted.gpu.resource_name] = str(wanted.gpu.count)
    if wanted.rdma is not None:
        devices[wanted.rdma.resource_name] = str(wanted.rdma.count)
    devices |= {name: str(count) for name, count in wanted.extended.items()}
    devices |= {f"hugepages-{size}": amount for size, amount in wanted.hugepages.items()}
    return given(
        requests=given(cpu=wanted.cpu, memory=wanted.memory, **devices),
        limits=given(memory=wanted.memory, **devices),
        claims=[{"name": one.name} for one in role.resource_claims],
    )


def _probes(spec: WorkerRole) -> Manifest:
    """Return the probes. Liveness has a long timeout: a slow step must not restart a worker."""
    return {
        "startupProbe": {
            "httpGet": {"path": "/ready", "port": "http"},
            "periodSeconds": STARTUP_PERIOD_S,
            "timeoutSeconds": 5,
            "failureThreshold": max(1, spec.startup_timeout.whole_seconds // STARTUP_PERIOD_S),
        },
        "readinessProbe": {
            "httpGet": {"path": "/ready", "port": "http"},
            "periodSeconds": 5,
            "timeoutSeconds": 5,
            "failureThreshold": 2,
        },
        "livenessProbe": {
            "httpGet": {"path": "/health", "port": "http"},
            "periodSeconds": 20,
            "timeoutSeconds": 15,
            "failureThreshold": 6,
        },
    }


def _pre_stop(spec: WorkerRole) -> Manifest:
    """Return the preStop hook: the worker serves until all routers know of its deletion."""
    seconds = spec.drain.pre_stop_delay.whole_seconds
    return {"lifecycle": {"preStop": {"sleep": {"seconds": seconds}}}} if seconds else {}


def _domain_affinity(owner: Owner, generation: Revision) -> Manifest:
    """Return the affinity of the workers of one revision to one network domain."""
    topology = generation.blueprint.transfer.topology
    if topology.key is None:
        return {}
    wanted = {labels.SERVICE: owner.name, labels.REVISION: generation.revision}
    term = {"topologyKey": topology.key, "labelSelector": {"matchLabels": wanted}}
    if topology.policy == "Required":
        return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    weighted = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": weighted}}


FIRST_PORT, LAST_PORT = 20_000, 29_999
"""Ports for `hostNetwork`: below NodePorts and the ephemeral ports of Linux."""

PORTS_OF_ROLE = 5
PORTS_OF_REVISION = 2 * PORTS_OF_ROLE


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports on which one worker listens."""

    http: int
    health: int
    kv_events: int
    kv_replay: int
    control: int


def ports(owner: Owner, generation: Revision, role: Role) -> Ports:
    """Return the ports of the workers of a role and revision."""
    control = generation.blueprint.transfer.control_port
    if not in_node_network(generation.blueprint.roles[role]):
        return Ports(names.HTTP_PORT, names.HEALTH_PORT, names.KV_EVENTS_PORT, names.KV_REPLAY_PORT, control)
    name = f"{owner.namespace}/{owner.name}/{generation.revision}"
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
    blocks = (LAST_PORT + 1 - FIRST_PORT) // PORTS_OF_REVISION
    first = FIRST_PORT + number % blocks * PORTS_OF_REVISION + (0 if role is Role.PREFILL else PORTS_OF_ROLE)
    return Ports(*range(first, first + PORTS_OF_ROLE))


def in_node_network(role: WorkerRole) -> bool:
    """Whether the role's podTemplate sets `hostNetwork`."""
    return ((role.pod_template or {}).get("spec") or {}).get("hostNetwork") is True
