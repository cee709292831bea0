"""
The InferencePool of a service: its decode workers, and its routers as their endpoint picker.

https://gateway-api-inference-extension.sigs.k8s.io. A gateway sends requests to the worker that a router
chooses, so it must reach workers, which check no API keys.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton_api.workers import Role
from baton_operator import names
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.router_spec import InferencePool
from baton_operator.manifests.objects import Manifest, Owner, owned
from baton_operator.manifests.pods import ports
from baton_operator.manifests.revision import Revision
from baton_operator.manifests.workers import LEADER, WORKER_INDEX, is_group

POOL_API, POOL_KIND = "inference.networking.k8s.io/v1", "InferencePool"

PORTS_LIMIT = 8
"""Maximum number of ports of a pool."""


def pool(owner: Owner, wanted: InferencePool, target: Revision, existing: Iterable[Revision]) -> Manifest:
    """
    Return the InferencePool.

    `existing`: revisions with workers. In the node's network each has its own port; the newest ones count.
    """
    role = Role.DECODE if Role.DECODE in target.blueprint.roles else Role.BOTH
    selector = names.selecting(owner.name, role)
    if is_group(target.blueprint.roles[role]):
        selector[WORKER_INDEX] = LEADER
    newest = sorted(existing, key=lambda revision: revision.created, reverse=True)
    with_role = [target, *(revision for revision in newest if role in revision.blueprint.roles)]
    numbers = dict.fromkeys(ports(owner, revision, role).http for revision in with_role)
    body = {
        "selector": {"matchLabels": selector},
        "targetPorts": [{"number": number} for number in list(numbers)[:PORTS_LIMIT]],
        "endpointPickerRef": {
            "name": owner.name,
            "port": {"number": names.PICKER_PORT},
            "failureMode": wanted.failure_mode,
        },
    }
    return owned(owner, POOL_API, POOL_KIND, owner.name, {"spec": body})


def check(spec: InferenceServiceSpec) -> None:
    """Raise ValueError if a gateway could not reach the workers of the spec, or everyone could."""
    security = spec.security
    if spec.exposure.inference_pool is None:
        return
    if security.mutual_tls is not None:
        raise ValueError(
            "spec.exposure.inferencePool excludes security.mutualTls: gateways have no certificate that "
            "workers accept. Remove one of them."
        )
    if security.network_policy and not security.ingress_namespace_labels:
        raise ValueError(
            "spec.exposure.inferencePool needs security.ingressNamespaceLabels: gateways reach workers, "
            "which check no API keys. Set the labels of the gateways' namespaces, or "
            "security.networkPolicy: false."
        )
