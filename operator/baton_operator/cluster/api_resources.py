"""
The kinds of objects that the operator works with, in one table.

Paths, watches, reads, pruning and permissions follow from this table. The operator watches each kind in it
and, if the kind is `pruned`, deletes objects that the spec no longer asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from baton_operator.crd import GROUP, VERSION
from baton_operator.manifests.exposure import CERTIFICATE_API, GATEWAY_API
from baton_operator.manifests.inference_pool import POOL_API, POOL_KIND
from baton_operator.manifests.objects import Manifest
from baton_operator.manifests.workers import GROUP_API, GROUP_KIND

API = f"{GROUP}/{VERSION}"
RBAC_API = "rbac.authorization.k8s.io/v1"
NETWORKING_API = "networking.k8s.io/v1"

READ = ("list", "watch")
ALL_VERBS = (*READ, "create", "patch", "delete")
"""Verbs for server-side apply, pruning, and watching changes by others."""


@dataclass(frozen=True, slots=True)
class ApiResource:
    """One kind, and the operator's permissions for it."""

    api: str
    """Group and version, such as apps/v1."""
    kind: str
    plural: str
    verbs: tuple[str, ...]
    why: str
    """Reason for the permissions, as in the chart and the documentation."""
    pruned: bool = False
    """Whether the operator deletes objects that the spec no longer asks for."""
    optional: bool = False
    """Whether the kind may be missing in a cluster."""
    foreign: bool = False
    """Whether others create its objects, which then lack the operator's label."""

    @property
    def group(self) -> str:
        """API group; empty for the core group."""
        return self.api.rpartition("/")[0]

    @property
    def custom(self) -> bool:
        """Whether the kind is one of Baton's custom resources."""
        return self.group == GROUP

    @property
    def owned(self) -> bool:
        """Whether its objects carry the operator's label: the operator or Kubernetes created them."""
        return not self.custom and not self.foreign


def _made(api: str, kind: str, plural: str, why: str, *, optional: bool = False) -> ApiResource:
    """A kind of which the operator makes and prunes objects."""
    return ApiResource(api, kind, plural, ALL_VERBS, why, pruned=True, optional=optional)


WATCHED = (
    ApiResource(API, "InferenceService", "inferenceservices", READ, "Custom resources that users write."),
    ApiResource(
        *(API, "LoraAdapter", "loraadapters", (*READ, "patch")),
        "Custom resources that users write. The operator adds a finalizer, so that pods unload an adapter "
        "before its object disappears.",
    ),
    ApiResource(
        *(API, "BatchJob", "batchjobs", (*READ, "create", "delete")),
        "Routers may create BatchJobs, so the operator needs that permission to grant it. It deletes "
        "BatchJobs of routers some time after they end.",
    ),
    _made(
        *(API, "RoleScaler", "rolescalers"),
        "Created once per scaled role. An autoscaler writes their replicas.",
    ),
    _made("apps/v1", "Deployment", "deployments", "Workers and routers."),
    ApiResource(
        *("batch/v1", "Job", "jobs", ALL_VERBS),
        "Fetch models and run batches. The operator suspends, resumes and deletes Jobs of batches.",
    ),
    _made(NETWORKING_API, "Ingress", "ingresses", "Expose services by an Ingress."),
    _made(NETWORKING_API, "NetworkPolicy", "networkpolicies", "Limit which pods reach workers and routers."),
    _made(
        *("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
        "Limit how many pods an eviction may take at once.",
    ),
    _made(RBAC_API, "Role", "roles", "Let routers list their workers and create BatchJobs."),
    _made(RBAC_API, "RoleBinding", "rolebindings", "Bind the Roles of routers."),
    _made("v1", "ConfigMap", "configmaps", "Store revisions and weights of services."),
    ApiResource(
        *("v1", "PersistentVolumeClaim", "persistentvolumeclaims", (*READ, "create", "patch")),
        "Hold model files. The operator never deletes a claim; it grows a claim to the size in the spec.",
    ),
    ApiResource(
        *("v1", "Pod", "pods", (*READ, "patch")),
        "State of workers and routers. The operator sets a deletion cost before a role shrinks.",
    ),
    _made("v1", "Service", "services", "Addresses of routers and workers."),
    _made("v1", "ServiceAccount", "serviceaccounts", "Accounts of workers, routers and batch runners."),
    _made(GATEWAY_API, "HTTPRoute", "httproutes", "Expose services by the Gateway API.", optional=True),
    _made(POOL_API, POOL_KIND, "inferencepools", "Let gateways ask routers for workers.", optional=True),
    _made(GROUP_API, GROUP_KIND, "leaderworkersets", "Workers of several nodes.", optional=True),
    _made(
        CERTIFICATE_API, "Certificate", "certificates", "Request certificates from an issuer.", optional=True
    ),
    ApiResource(
        *(GATEWAY_API, "Gateway", "gateways", READ),
        "The URL of a service with an HTTPRoute follows the Gateway's listener.",
        optional=True,
        foreign=True,
    ),
)
"""All kinds that the operator reads."""

OWNED = tuple(resource for resource in WATCHED if resource.owned)

PRUNED = frozenset(resource.kind for resource in WATCHED if resource.pruned)
"""Kinds that the operator prunes. Claims stay, because their files are slow to fetch again; Kubernetes
deletes Jobs after their time to live."""

_PLURALS = {resource.kind: resource.plural for resource in WATCHED}


def plural(kind: str) -> str:
    """
    Return the name of a kind in paths.

    >>> plural("NetworkPolicy"), plural("Lease")
    ('networkpolicies', 'leases')
    """
    return _PLURALS.get(kind, f"{kind.lower()}s")


def path(api: str, kind: str, namespace: str = "", name: str = "") -> str:
    """
    Return the path of objects.

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
