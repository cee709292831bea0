"""The routers of a service, their Service, and their permissions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton_api import labels
from baton_operator import names
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.router_spec import Authentication
from baton_operator.kinds.worker_role import TopologySpreadConstraint
from baton_operator.manifests import batches, mutual_tls
from baton_operator.manifests.mutual_tls import Shown
from baton_operator.manifests.objects import Manifest, Owner, merged, owned
from baton_operator.manifests.pods import (
    all_of_secret,
    container_security,
    environment,
    field,
    identity,
    placed,
    probe,
    resources,
    scratch,
)

WEIGHTS_FOLDER, WEIGHTS_FILE = "/etc/baton/weights", "weights"
KEYS_FOLDER, KEYS_FILE = "/etc/baton/keys", "keys"
TENANTS_FOLDER, TENANTS_FILE = "/etc/baton/tenants", "tenants.yaml"
STATE_FOLDER = "/var/lib/baton"
STATE_SIZE, STATE_LIMIT = "10Gi", "9Gi"
"""Size limit of the volume with the state, beyond which Kubernetes evicts the pod, and the router's own."""

END_S = 15
"""Seconds after the drain timeout until Kubernetes kills the pod."""

SPEC_GENERATION = "baton.dev/spec-generation"
"""Annotation of the Deployment: metadata.generation of its InferenceService."""

SPREAD = [
    TopologySpreadConstraint(topology_key=key)
    for key in ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
]
"""Default spread of routers."""

PICKER = "grpc-ext-proc"
"""Name of the port of the endpoint picker."""

REVISION = "pod-template-hash"
"""Label with which Kubernetes distinguishes the pods of a Deployment's revisions."""


def router(
    owner: Owner, spec: InferenceServiceSpec, image: str, replicas: int, shown: Shown, generation: int
) -> Manifest:
    """Return the Deployment. `shown`: their certificate; `generation`: metadata.generation of the service."""
    wanted = spec.router
    pod_labels = names.of_role(owner.name, names.ROUTER)
    template = {"metadata": {"labels": pod_labels}, "spec": _pod(owner, spec, image, shown)}
    body = {
        "replicas": replicas,
        "revisionHistoryLimit": 2,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "selector": {"matchLabels": names.selecting(owner.name, names.ROUTER)},
        "template": merged(template, wanted.pod_template),
    }
    annotations = {SPEC_GENERATION: str(generation)}
    name = names.router(owner.name)
    return owned(owner, "apps/v1", "Deployment", name, {"spec": body}, pod_labels, annotations)


def service(owner: Owner, *, picks: bool = False) -> Manifest:
    """Return the Service through which clients reach the routers; `picks`: gateways as well."""
    ports: list[Manifest] = [{"name": "http", "port": 80, "targetPort": "http"}]
    if picks:
        ports.append(
            {"name": PICKER, "port": names.PICKER_PORT, "targetPort": PICKER, "appProtocol": "http2"}
        )
    body = {"selector": names.selecting(owner.name, names.ROUTER), "ports": ports}
    return owned(owner, "v1", "Service", owner.name, {"spec": body}, names.of_role(owner.name, names.ROUTER))


def weights(owner: Owner, by_revision: Mapping[str, int]) -> Manifest:
    """Return the ConfigMap with the percentage of requests for each revision."""
    lines = "".join(f"{revision}={weight}\n" for revision, weight in sorted(by_revision.items()))
    return owned(owner, "v1", "ConfigMap", names.router(owner.name), {"data": {WEIGHTS_FILE: lines}})


def account(owner: Owner, spec: InferenceServiceSpec) -> list[Manifest]:
    """
    Return the ServiceAccount of routers and its Role.

    Routers list and watch EndpointSlices in their namespace. Where Jobs run batches, they also create
    BatchJobs and update their status.
    """
    name = names.router(owner.name)
    rule = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    group = "rbac.authorization.k8s.io"
    role = {"apiGroup": group, "kind": "Role", "name": name}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": owner.namespace}
    more = batches.RULES if batches.by_jobs(spec.router.batches) else []
    return [
        owned(owner, "v1", "ServiceAccount", name, {"automountServiceAccountToken": False}),
        owned(owner, f"{group}/v1", "Role", name, {"rules": [rule, *more]}),
        owned(owner, f"{group}/v1", "RoleBinding", name, {"roleRef": role, "subjects": [subject]}),
    ]


def _pod(owner: Owner, spec: InferenceServiceSpec, image: str, shown: Shown) -> Manifest:
    wanted = spec.router
    volumes, mounts = scratch("/tmp", STATE_FOLDER, sizes=("1Gi", STATE_SIZE))
    secrets, secret_mounts = _secrets(spec.exposure.auth)
    spread = wanted.placement.topology_spread_constraints or SPREAD
    placement = wanted.placement.model_copy(update={"topology_spread_constraints": spread})
    return {
        **placed(placement, names.selecting(owner.name, names.ROUTER), REVISION),
        **identity(names.router(owner.name), spec.security.pull_secret_names, token=True),
        "terminationGracePeriodSeconds": wanted.drain.total_s + END_S,
        "containers": [_container(owner, spec, image, shown, [*mounts, *secret_mounts])],
        "volumes": [
            {"name": "weights", "configMap": {"name": names.router(owner.name)}},
            *volumes,
            *secrets,
            *batches.volumes(wanted.batches),
            *shown.volumes,
        ],
    }


def _container(
    owner: Owner, spec: InferenceServiceSpec, image: str, shown: Shown, mounts: Sequence[Manifest]
) -> Manifest:
    wanted = spec.router
    ticket_secret = mutual_tls.ticket_variable(mutual_tls.ROUTER_VARIABLE, owner.name, wanted.pod_template)
    return {
        "name": names.MAIN,
        "image": wanted.image or image,
        "args": _arguments(owner, spec, shown.flags),
        "env": [
            field("POD_NAME", "metadata.name"),
            *batches.environment(wanted.batches),
            *environment(ticket_secret, wanted.env),
        ],
        **all_of_secret(wanted.batches.files.credentials_secret_ref if wanted.batches.files else None),
        "ports": _ports(spec),
        "resources": resources(wanted.resources),
        "securityContext": container_security(),
        "volumeMounts": [
            {"name": "weights", "mountPath": WEIGHTS_FOLDER, "readOnly": True},
            *mounts,
            *batches.mounts(wanted.batches),
            *shown.mounts,
        ],
        "startupProbe": probe("/health", 2, 5, 60),
        "readinessProbe": probe("/ready", 2, 5, 3),  # one slow answer does not remove the router
        "livenessProbe": probe("/health", 10, 5, 6),
    }


def _arguments(owner: Owner, spec: InferenceServiceSpec, tls: list[str]) -> list[str]:
    wanted, auth = spec.router, spec.exposure.auth
    flags = [
        "router",
        "--host=0.0.0.0",
        f"--port={names.ROUTER_PORT}",
        f"--metrics-port={names.ROUTER_METRICS_PORT}",
        f"--processes={wanted.processes}",
        f"--kubernetes-selector={labels.SERVICE}={owner.name}",
        f"--revision-weights-file={WEIGHTS_FOLDER}/{WEIGHTS_FILE}",
        f"--local-prefill-max-tokens={wanted.local_prefill_max_tokens}",
        f"--queue-requests={wanted.queue_limit}",
        f"--state-limit={STATE_LIMIT}",
        f"--drain-notice-s={wanted.drain.pre_stop_delay.seconds:g}",
        f"--drain-s={wanted.drain.timeout.seconds:g}",
        *batches.flags(owner, wanted.batches),
        *tls,
    ]
    if wanted.scale_from_zero_timeout.seconds:
        flags.append(f"--hold-s={wanted.scale_from_zero_timeout.seconds:g}")
        flags.append(f"--hold-models={','.join((spec.model.name or owner.name, *spec.model.aliases))}")
    if spec.exposure.inference_pool is not None:
        flags.append(f"--gateway-port={names.PICKER_PORT}")
    if wanted.dashboard:
        flags.append("--dashboard")
    if auth.api_keys_secret_ref is not None:
        flags.append(f"--api-key-file={KEYS_FOLDER}/{KEYS_FILE}")
    if auth.tenants_secret_ref is not None:
        flags.append(f"--tenants-file={TENANTS_FOLDER}/{TENANTS_FILE}")
    return [*flags, *wanted.args]


def _ports(spec: InferenceServiceSpec) -> list[Manifest]:
    ports: list[Manifest] = [
        {"name": "http", "containerPort": names.ROUTER_PORT},
        {"name": names.METRICS, "containerPort": names.ROUTER_METRICS_PORT},
    ]
    if spec.exposure.inference_pool is not None:
        ports.append({"name": PICKER, "containerPort": names.PICKER_PORT})
    return ports


def _secrets(auth: Authentication) -> tuple[list[Manifest], list[Manifest]]:
    """Return volumes and mounts of the Secrets with keys. The operator does not read them."""
    wanted = [
        ("keys", auth.api_keys_secret_ref, KEYS_FOLDER),
        ("tenants", auth.tenants_secret_ref, TENANTS_FOLDER),
    ]
    mounted = [(name, secret, folder) for name, secret, folder in wanted if secret is not None]
    volumes = [{"name": name, "secret": {"secretName": secret.name}} for name, secret, _ in mounted]
    mounts = [{"name": name, "mountPath": folder, "readOnly": True} for name, _, folder in mounted]
    return volumes, mounts
