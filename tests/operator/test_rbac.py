"""The operator's rights, as far as they can be read; what is used of them a real API server's log tells."""

from __future__ import annotations

from baton_operator.cluster.api_resources import OWNED, PRUNED, WATCHED, plural
from baton_operator.crd import RESOURCES
from baton_operator.rbac import CLUSTER, SERVICES, own, rules

EVERYTHING = [*SERVICES, *CLUSTER, *own("baton-operator")]


def granted() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for rule in EVERYTHING:
        for resource in rule.resources:
            found.setdefault(resource, set()).update(rule.verbs)
    return found


def test_what_may_be_pruned_may_be_listed_and_deleted() -> None:
    for kind in PRUNED:
        assert {"list", "delete"} <= granted()[plural(kind)], kind


def test_nothing_is_granted_that_leads_to_more() -> None:
    assert granted()["secrets"] == {"create"}
    for resource in ("pods/exec", "pods/attach", "nodes", "clusterroles", "clusterrolebindings"):
        assert resource not in granted()
    verbs = set.union(*granted().values())
    assert not verbs & {"*", "escalate", "bind", "impersonate", "deletecollection"}
    assert not any("*" in (rule.group, *rule.resources) for rule in EVERYTHING)


def test_no_right_is_granted_twice() -> None:
    single = [
        (rule.group, resource, verb, rule.names)
        for rule in EVERYTHING
        for resource in rule.resources
        for verb in rule.verbs
    ]
    assert len(single) == len(set(single))


def test_a_rule_stands_in_a_role_as_kubernetes_wants_it() -> None:
    assert rules(own("baton-operator")) == [
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]},
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "verbs": ["get", "update"],
            "resourceNames": ["baton-operator"],
        },
    ]


def test_kinds_table_matches_crds_and_grants_reading() -> None:
    """The one table of kinds has all custom resources, with their own plurals, and each may be read."""
    custom = {one.kind: one.plural for one in WATCHED if one.custom}
    assert custom == {one.kind: one.plural for one in RESOURCES}
    assert {one.kind for one in WATCHED} == {*custom, *(one.kind for one in OWNED), "Gateway"}
    assert all({"list", "watch"} <= granted()[one.plural] for one in WATCHED)
