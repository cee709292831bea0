"""
The semantics of Kubernetes' NetworkPolicies as an executable definition.

https://kubernetes.io/docs/concepts/services-networking/network-policies. Policies see a connection after
Services have replaced its address: `target` is the pod and its own port. Connections that
policies cannot stop (kubelet probes, a pod that reaches itself, pods in the node's network) are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

Manifest = dict[str, Any]
Labels = Mapping[str, str]

NAME = "kubernetes.io/metadata.name"
"""On each namespace: its name."""


@dataclass(frozen=True)
class Peer:
    """A pod, or an address outside of the cluster, which has no namespace."""

    namespace: str = ""
    labels: Labels = field(default_factory=dict)
    address: str = "192.0.2.1"
    named: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Protocol and number of its containers' ports, by name."""

    @classmethod
    def of(cls, template: Manifest, namespace: str, address: str = "10.0.0.1") -> Peer:
        """A pod of this template."""
        ports = [port for one in template["spec"]["containers"] for port in one.get("ports", ())]
        named = {
            port["name"]: (port.get("protocol", "TCP"), port["containerPort"])
            for port in ports
            if "name" in port
        }
        return cls(namespace, template["metadata"]["labels"], address, named)


def allows(
    policies: Sequence[Manifest],
    namespaces: Mapping[str, Labels],
    source: Peer,
    target: Peer,
    port: int,
    protocol: str = "TCP",
) -> bool:
    """Whether a connection may be opened: the source's egress and the target's ingress must both allow it."""

    def passes(isolated: Peer, other: Peer, direction: str, rules: str, peers: str) -> bool:
        selecting = [one for one in policies if _isolates(one, isolated, direction)]
        return not selecting or any(
            _ports(rule, target, port, protocol)
            and _peers(rule.get(peers), other, one["metadata"]["namespace"], namespaces)
            for one in selecting
            for rule in one["spec"].get(rules) or ()
        )

    return passes(source, target, "Egress", "egress", "to") and passes(
        target, source, "Ingress", "ingress", "from"
    )


def _isolates(policy: Manifest, pod: Peer, direction: str) -> bool:
    spec = policy["spec"]
    # Without policyTypes, a policy is for ingress, and for egress if it has rules for it.
    types = spec.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in spec else [])]
    here = bool(pod.namespace) and pod.namespace == policy["metadata"]["namespace"]
    return here and direction in types and selects(spec.get("podSelector", {}), pod.labels)


def _peers(
    peers: Sequence[Manifest] | None, other: Peer, home: str, namespaces: Mapping[str, Labels]
) -> bool:
    """No list, or an empty one, matches all peers."""
    return not peers or any(_peer(one, other, home, namespaces) for one in peers)


def _peer(peer: Manifest, other: Peer, home: str, namespaces: Mapping[str, Labels]) -> bool:
    if (block := peer.get("ipBlock")) is not None:
        address = ip_address(other.address)
        within = address in ip_network(block["cidr"])
        return within and not any(address in ip_network(one) for one in block.get("except", ()))
    if not other.namespace:
        return False
    # An empty namespaceSelector is all namespaces; none at all is the policy's own.
    if "namespaceSelector" in peer:
        selected = selects(peer["namespaceSelector"], namespaces[other.namespace])
    else:
        selected = other.namespace == home
    return selected and selects(peer.get("podSelector", {}), other.labels)


def _ports(rule: Manifest, target: Peer, port: int, protocol: str) -> bool:
    """No list, or an empty one, is every port of every protocol."""
    wanted = rule.get("ports")
    return not wanted or any(_port(one, target, port, protocol) for one in wanted)


def _port(wanted: Manifest, target: Peer, port: int, protocol: str) -> bool:
    if wanted.get("protocol", "TCP") != protocol:
        return False
    if "port" not in wanted:
        return True
    first: int | str = wanted["port"]
    if isinstance(first, str):  # of the pod that is reached, in either direction
        return target.named.get(first) == (protocol, port)
    return first <= port <= int(wanted.get("endPort", first))


def selects(selector: Manifest, labels: Labels) -> bool:
    """Whether a label selector matches; an empty one matches everything."""
    exact = selector.get("matchLabels") or {}
    return all(labels.get(key) == value for key, value in exact.items()) and all(
        _expression(one, labels) for one in selector.get("matchExpressions") or ()
    )


def _expression(expression: Manifest, labels: Labels) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values", ())
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":  # also without the label
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    raise ValueError(f"unknown operator {expression['operator']!r}")


def of(manifests: Iterable[Manifest]) -> list[Manifest]:
    """The NetworkPolicies among them."""
    return [one for one in manifests if one["kind"] == "NetworkPolicy"]
