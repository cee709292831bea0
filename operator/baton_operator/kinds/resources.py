"""Compute resources and devices of a container, as Kubernetes has them in a pod."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from baton_operator.kinds.part import Label, LabelKey, Part, Quantity, Rule, amount, rules

ACCELERATOR = (
    r"([^h]|[^s]h|[^.]sh)/([psv]?gpu(\.shared)?|npu|tpu|gaudi|v?xpu|v?gcu)$"
    r"|/(v?mlu[0-9]*(\.share|\.mim-.*)?|dcu(num|-(share|mig)-.*)?)$"
    r"|/(mig-.*|[cdqst]px_nps[0-9]|neuron(core|device)?|Ascend[^-]*(-[0-9].*)?|v?gpu-number|.*-vgpu)$"
    r"|^gpu\.intel\.com/(i915|xe)$"
)
"""
Names of resources that are accelerators: nvidia.com/gpu, nvidia.com/mig-1g.10gb, google.com/tpu.

Amounts of the memory or of the cores of an accelerator (nvidia.com/gpumem, huawei.com/Ascend910-memory) are
others. So is koordinator.sh/gpu, in hundredths: schedulers with a domain in .sh have such names.
"""

RDMA = "rdma|[/_.-]roce|infiniband|/hca|/efa$"
"""Names of resources that are RDMA devices: rdma/hca, vpc.amazonaws.com/efa, openshift.io/roce."""

NATIVE = "^(cpu|memory|ephemeral-storage|hugepages-.+|.+/.+)$"

Quantities = Annotated[dict[LabelKey, Quantity], Field(max_length=32)]


class ResourceClaim(Part):
    """Claim of the pod that a container uses."""

    name: Label
    """Name of the claim within the pod."""

    request: Label | None = None
    """Request of the claim whose devices the container gets. Default: those of all requests."""


def _named(field: str) -> Rule:
    return Rule(
        f"!has(self.{field}) || self.{field}.all(name, name.matches('{NATIVE}'))",
        "names are cpu, memory, ephemeral-storage, hugepages-SIZE, or a device's, such as nvidia.com/gpu",
        f".{field}",
    )


_DIVIDED = "self.limits.filter(name, name.contains('/') && !quantity(string(self.limits[name])).isInteger())"
"""Devices of which a part is requested."""


@rules(
    _named("requests"),
    _named("limits"),
    Rule(
        "!has(self.requests) || !has(self.limits) || self.requests.all(name, !(name in self.limits) || "
        "quantity(string(self.requests[name])).compareTo(quantity(string(self.limits[name]))) <= 0)",
        "a request must not exceed the limit",
        ".requests",
    ),
    Rule(
        "!has(self.requests) || self.requests.all(name, !name.contains('/') || "
        "(has(self.limits) && name in self.limits && "
        "quantity(string(self.requests[name])).compareTo(quantity(string(self.limits[name]))) == 0))",
        "devices cannot be overcommitted: write them in limits",
        ".requests",
    ),
    Rule(
        f"!has(self.limits) || {_DIVIDED}.size() == 0",
        "devices are whole numbers",
        ".limits",
        f"{_DIVIDED}[0] + ' is ' + string(self.limits[{_DIVIDED}[0]])",
    ),
    Rule(
        "!has(self.limits) || !self.limits.exists(name, name.startsWith('hugepages-')) || "
        "'cpu' in self.limits || 'memory' in self.limits || "
        "(has(self.requests) && ('cpu' in self.requests || 'memory' in self.requests))",
        "huge pages need cpu or memory beside them",
        ".limits",
    ),
)
class ResourceRequirements(Part):
    """Compute resources and devices of a container, as in a pod."""

    requests: Quantities = {}
    """Minimum amounts, by name: cpu, memory, ephemeral-storage. Default: the limits."""

    limits: Quantities = {}
    """Maximum amounts, by name, and devices, such as {memory: 64Gi, nvidia.com/gpu: 1, rdma/hca: 1,
    hugepages-2Mi: 5Gi}."""

    claims: Annotated[list[ResourceClaim], Field(max_length=8)] = []
    """Claims of the pod that the container uses. Default: all resourceClaims of a worker (Kubernetes' own
    default is none)."""

    @property
    def accelerators(self) -> int:
        """Accelerators of one pod, by the names of their resources."""
        return sum(int(amount(count)) for name, count in self.limits.items() if re.search(ACCELERATOR, name))
