"""The operator's rights as declared; a test with a real API server's log checks which are used."""

from __future__ import annotations

from baton_operator.chart import CLUSTER, SERVICES, own, rules
from baton_operator.cluster.api_resources import OWNED, PRUNED, WATCHED, plural
from baton_operator.crd import RESOURCES

EVERYTHING = [*SERVICES, *CLUSTER, *own("baton-operator")]


def granted() -> dict[str, set[str]]:
    verbs_by_resource: dict[str, set[str]] = {}
    for rule in EVERYTHING:
        for resource in rule.resources:
            verbs_by_resource.setdefault(resource, set()).update(rule.verbs)
    return verbs_by_resource


def test_rbac_pruned_kinds_may_be_listed_and_deleted() -> None:
    for kind in PRUNED:
        assert {"list", "delete"} <= granted()[plural(kind)], kind


def test_rbac_grants_no_privilege_escalation() -> None:
    assert granted()["secrets"] == {"create"}
    for resource in ("pods/exec", "pods/attach", "nodes", "clusterroles", "clusterrolebindings"):
        assert resource not in granted()
    verbs = set.union(*granted().values())
    assert not verbs & {"*", "escalate", "bind", "impersonate", "deletecollection"}
    assert not any("*" in (rule.group, *rule.resources) for rule in EVERYTHING)


def test_rbac_rights_are_granted_once() -> None:
    single = [
        (rule.group, resource, verb, rule.names)
        for rule in EVERYTHING
        for resource in rule.resources
        for verb in rule.verbs
    ]
    assert len(single) == len(set(single))


def test_rbac_rules_have_kubernetes_form() -> None:
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
