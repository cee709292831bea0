"""The chart's objects for Prometheus and Grafana."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from baton_api import labels
from baton_observing.alerts.alert import RUNBOOKS, with_runbook_url
from baton_operator import names
from tests.charts.helm import CHART, NAMESPACE, VALUES, Manifest, of_kind, render

API = "monitoring.coreos.com/v1"
KINDS = tuple(f"--api-versions={API}/{kind}" for kind in ("PodMonitor", "PrometheusRule", "ServiceMonitor"))
BOARDS = sorted((CHART / "dashboards").glob("*.json"))
RULES = sorted((CHART / "rules").glob("*.yaml"))


def dashboards(manifests: list[Manifest]) -> list[Manifest]:
    return [
        one for one in of_kind(manifests, "ConfigMap") if "grafana_dashboard" in one["metadata"]["labels"]
    ]


def relabelled(endpoint: dict[str, Any], pod: dict[str, str]) -> dict[str, str]:
    """Return the labels that Prometheus gives a pod; empty if it drops the pod."""
    target_labels = {}
    for step in endpoint["relabelings"]:
        value = ";".join(pod.get(name, "") for name in step["sourceLabels"])
        matched = re.fullmatch(step.get("regex", "(.*)"), value)
        action = step.get("action", "replace")
        if action in ("drop", "keep"):
            if bool(matched) == (action == "drop"):
                return {}
        elif matched:
            target_labels[step["targetLabel"]] = matched.expand(
                step.get("replacement", "$1").replace("$", "\\")
            )
    return {name: value for name, value in target_labels.items() if value}


def test_chart_default_has_no_dashboards_and_no_missing_apis() -> None:
    manifests = render({})
    assert not dashboards(manifests)
    assert not [one for one in manifests if one["apiVersion"] == API]


def test_chart_dashboards_equal_the_files_with_sidecar_label() -> None:
    boards = dashboards(render({"observing": {"dashboards": {"enabled": True}}}))
    assert len(boards) == len(BOARDS) == 6
    for one, path in zip(boards, BOARDS, strict=True):
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert one["metadata"]["namespace"] == NAMESPACE
        ((name, text),) = one["data"].items()
        assert name == f"baton-{path.name}"
        assert json.loads(text) == json.loads(path.read_text())


@pytest.mark.parametrize("values", [VALUES["none"], VALUES["everything"]], ids=["none", "everything"])
def test_rules_are_the_files_and_link_only_to_an_absolute_url(values: dict[str, Any]) -> None:
    """Alertmanager cannot make a link from a path."""
    where = values.get("observing", {}).get("runbooks", RUNBOOKS)
    rules = of_kind(render(values, *KINDS), "PrometheusRule")
    assert len(rules) == len(RULES) == 3
    for one, path in zip(rules, RULES, strict=True):
        assert one["spec"] == yaml.safe_load(with_runbook_url(path.read_text(), where))
        alerts = [rule for group in one["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
        links = [
            rule["annotations"]["runbook_url"] for rule in alerts if "runbook_url" in rule["annotations"]
        ]
        assert len(links) == (0 if where == RUNBOOKS else len(alerts))
        assert all(link.startswith("https://wiki.example/baton/Baton") for link in links)


@pytest.mark.parametrize("role", ["decode", "router"])
def test_pods_are_scraped_under_the_names_that_dashboards_go_by(role: str) -> None:
    (monitor,) = of_kind(render({}, *KINDS), "PodMonitor")
    assert monitor["spec"]["namespaceSelector"] == {"any": True}
    assert monitor["spec"]["selector"]["matchLabels"] == {labels.MANAGED_BY: labels.OPERATOR}
    pod = {
        "__meta_kubernetes_pod_name": "chat-1",
        "__meta_kubernetes_pod_label_baton_dev_service": "chat",
        "__meta_kubernetes_pod_label_baton_dev_role": role,
        "__meta_kubernetes_pod_label_baton_dev_revision": "1a" if role == "decode" else "",
    }
    own = {"worker": "chat-1", "revision": "1a"} if role == "decode" else {}
    endpoints = monitor["spec"]["podMetricsEndpoints"]
    assert all(endpoint["honorLabels"] is True for endpoint in endpoints)
    (endpoint,) = (one for one in endpoints if relabelled(one, pod))
    assert endpoint["port"] == (names.METRICS if role == "router" else "http")
    assert relabelled(endpoint, pod) == {"service": "chat", "role": role, **own}
    for index, is_scraped in (("0", True), ("1", False), ("12", False)):
        of_group = pod | {"__meta_kubernetes_pod_label_leaderworkerset_sigs_k8s_io_worker_index": index}
        assert bool(relabelled(endpoint, of_group)) == (is_scraped or role == "router")


def test_chart_pod_monitor_scrapes_only_watched_namespaces() -> None:
    (monitor,) = of_kind(render(VALUES["two namespaces"], *KINDS), "PodMonitor")
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["models", "more-models"]}


def test_chart_alerts_have_the_severities_of_the_cluster() -> None:
    """Also where one of them has the name of another one of Baton's, or is no text unless it has quotes."""
    own = {"page": "1", "ticket": "info", "info": "true"}
    before, after = (
        [
            rule["labels"]["severity"]
            for manifest in of_kind(render(values, *KINDS), "PrometheusRule")
            for group in manifest["spec"]["groups"]
            for rule in group["rules"]
            if "alert" in rule
        ]
        for values in ({}, {"observing": {"rules": {"severities": own}}})
    )
    assert set(before) == set(own)
    assert after == [own[severity] for severity in before]
