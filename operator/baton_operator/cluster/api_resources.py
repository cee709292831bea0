"""
The kinds of objects that the operator works with: one table, from which all other lists of kinds follow.

Paths, watches, reads, pruning and rights are read off this table. A kind that is added here is watched,
observed with its service and, if `pruned`, deleted once the spec no longer asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from baton_operator.crd import GROUP, VERSION
from baton_operator.manifests.exposure import CERTIFICATE_API, GATEWAY_API
from baton_operator.manifests.objects import Manifest

API = f"{GROUP}/{VERSION}"
RBAC_API = "rbac.authorization.k8s.io/v1"
NETWORKING_API = "networking.k8s.io/v1"

READ = ("list", "watch")
ALL_VERBS = (*READ, "create", "patch", "delete")
"""Server-side apply, pruning, and watching for changes by others."""


@dataclass(frozen=True, slots=True)
class ApiResource:
    """One kind, and the operator's rights to it."""

    api: str
    """Group and version, such as apps/v1."""
    kind: str
    plural: str
    verbs: tuple[str, ...]
    why: str
    """Reason for the rights, as it stands in the chart and the documentation."""
    pruned: bool = False
    """Whether objects that the spec no longer asks for are deleted."""
    optional: bool = False
    """Whether a cluster may lack it."""
    foreign: bool = False
    """Whether its objects are made by others, for others: they carry no label of the operator's."""

    @property
    def group(self) -> str:
        """API group; empty for the core group."""
        return self.api.rpartition("/")[0]

    @property
    def custom(self) -> bool:
        """Whether the kind is one of Baton's own, which users write."""
        return self.group == GROUP

    @property
    def owned(self) -> bool:
        """Whether its objects carry the operator's label: it made them, or Kubernetes did for it."""
        return not self.custom and not self.foreign


WATCHED = (
    ApiResource(API, "InferenceService", "inferenceservices", READ, "What users ask for."),
    ApiResource(API, "LoraAdapter", "loraadapters", READ, "What users ask for."),
    ApiResource(
        API,
        "BatchJob",
        "batchjobs",
        (*READ, "create", "delete"),
        "Routers may create BatchJobs, so the operator must hold that right to grant it. It deletes those "
        "that a router created some time after they end.",
    ),
    ApiResource(
        API,
        "RoleScaler",
        "rolescalers",
        ALL_VERBS,
        "Created once. An autoscaler writes the numbers: the operator's own, or another.",
        pruned=True,
    ),
    ApiResource("apps/v1", "Deployment", "deployments", ALL_VERBS, "Workers and routers.", pruned=True),
    ApiResource(
        "batch/v1",
        "Job",
        "jobs",
        ALL_VERBS,
        "Fetching models, running batches. Jobs of batches are suspended, resumed and deleted.",
    ),
    ApiResource(NETWORKING_API, "Ingress", "ingresses", ALL_VERBS, "Exposure by an Ingress.", pruned=True),
    ApiResource(
        NETWORKING_API,
        "NetworkPolicy",
        "networkpolicies",
        ALL_VERBS,
        "Which pods reach workers and routers.",
        pruned=True,
    ),
    ApiResource(
        "policy/v1",
        "PodDisruptionBudget",
        "poddisruptionbudgets",
        ALL_VERBS,
        "How many pods may be missing at once.",
        pruned=True,
    ),
    ApiResource(
        RBAC_API,
        "Role",
        "roles",
        ALL_VERBS,
        "A router's rights to see its workers and to create BatchJobs.",
        pruned=True,
    ),
    ApiResource(RBAC_API, "RoleBinding", "rolebindings", ALL_VERBS, "Binds a router's Role.", pruned=True),
    ApiResource(
        "v1", "ConfigMap", "configmaps", ALL_VERBS, "Generations and weights of services.", pruned=True
    ),
    ApiResource(
        "v1",
        "PersistentVolumeClaim",
        "persistentvolumeclaims",
        (*READ, "create", "patch"),
        "Models' files. A claim is never deleted; it grows with the size that the spec asks for.",
    ),
    ApiResource(
        "v1",
        "Pod",
        "pods",
        (*READ, "patch"),
        "State of workers and routers. A deletion cost is written before a role shrinks.",
    ),
    ApiResource("v1", "Service", "services", ALL_VERBS, "Addresses of routers and workers.", pruned=True),
    ApiResource(
        "v1",
        "ServiceAccount",
        "serviceaccounts",
        ALL_VERBS,
        "Accounts of workers, routers and runners of batches.",
        pruned=True,
    ),
    ApiResource(
        GATEWAY_API,
        "HTTPRoute",
        "httproutes",
        ALL_VERBS,
        "Exposure by the Gateway API.",
        pruned=True,
        optional=True,
    ),
    ApiResource(
        CERTIFICATE_API,
        "Certificate",
        "certificates",
        ALL_VERBS,
        "Certificates of an issuer.",
        pruned=True,
        optional=True,
    ),
    ApiResource(
        GATEWAY_API,
        "Gateway",
        "gateways",
        READ,
        "The URL of a service with an HTTPRoute follows the Gateway's listener.",
        optional=True,
        foreign=True,
    ),
)
"""All kinds of which the operator reads objects."""

OWNED = tuple(one for one in WATCHED if one.owned)

PRUNED = frozenset(one.kind for one in WATCHED if one.pruned)
"""Kinds of which objects are deleted once the spec no longer asks for them. Claims hold files that are slow
to fetch again, and Jobs are removed by their own time to live."""

_PLURALS = {one.kind: one.plural for one in WATCHED}


def plural(kind: str) -> str:
    """
    The name of a kind in paths.

    >>> plural("NetworkPolicy"), plural("Lease")
    ('networkpolicies', 'leases')
    """
    return _PLURALS.get(kind, f"{kind.lower()}s")


def path(api: str, kind: str, namespace: str = "", name: str = "") -> str:
    """
    Where objects are.

    >>> path("apps/v1", "Deployment", "models", "chat-router")
    '/apis/apps/v1/namespaces/models/deployments/chat-router'
    >>> path("v1", "Pod")
    '/api/v1/pods'
    """
    parts = ["/apis" if "/" in api else "/api", api]
    if namespace:
        parts += ["namespaces", quote(namespace)]
    parts.append(plural(kind))
    if name:
        parts.append(quote(name))
    return "/".join(parts)


def path_of(manifest: Manifest) -> str:
    metadata = manifest["metadata"]
    return path(manifest["apiVersion"], manifest["kind"], metadata.get("namespace", ""), metadata["name"])
