"""Rules and alerts, checked by promtool: every alert fires in one case and stays silent in another."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton_api import metrics
from baton_observing import rules
from baton_observing.alerts import ALERTS, workers
from baton_observing.alerts.alert import runbook
from baton_observing.dashboards import DASHBOARDS
from baton_observing.dashboards.panels import ROLLOUTS
from baton_observing.promql import Scope
from tests.observing.alert_cases import CASES
from tests.observing.alert_series import SERVICE, Series, constant, counter

ROOT = Path(__file__).parents[2]
RUNBOOKS = ROOT / "docs" / "runbooks"
HEADINGS = ["Meaning", "Impact", "Expected duration", "Diagnosis", "Mitigation"]
GPU_HEADING = "GPU checks"
ABOUT_WORKERS = {alert.name for alert in workers.ALERTS} | {
    "BatonInterTokenLatencyBurn",
    "BatonNoReadyReplicas",
    "BatonNoWorker",
    "BatonTimeToFirstTokenBurn",
    "BatonWorkersDown",
}
"""Alerts whose cause may be a GPU."""
PAGES, TICKETS = 12, 26
"""Limits, so that alerts that interrupt people stay few."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the rule files. Tests add files in JSON, which is YAML that is written sooner."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (on Debian: apt install prometheus)")
    path = tmp_path_factory.mktemp("rules")
    for name, text in rules.files().items():
        (path / name).write_text(text)
    return path


def promtool(*arguments: str, folder: Path) -> str:
    """Run promtool and return its output. Fails if promtool does."""
    done = subprocess.run(["promtool", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def firing(name: str, severity: str) -> str:
    """Return a query for the number of firing alerts."""
    return f'count(ALERTS{{alertname="{name}", severity="{severity}", alertstate="firing"}}) or vector(0)'


def scene(name: str, severity: str, series: Series, at: int, count: int) -> Mapping[str, Any]:
    """Return a promtool test: the number of alerts that fire at a minute, given these series."""
    return {
        "interval": "1m",
        "input_series": [{"series": one, "values": values.strip()} for one, values in series.items()],
        "promql_expr_test": [
            {
                "expr": firing(name, severity),
                "eval_time": f"{at}m",
                "exp_samples": [{"labels": "{}", "value": count}],
            }
        ],
    }


def test_promtool_accepts_all_rules(folder: Path) -> None:
    output = promtool("check", "rules", *rules.files(), folder=folder)
    count = sum(int(number) for number in re.findall(r"(\d+) rules found", output))
    records = sum(text.count("record:") for text in rules.files().values())
    assert count == len(ALERTS) + records


def test_promtool_accepts_all_panel_queries(folder: Path) -> None:
    queries = [query.expression for board in DASHBOARDS for panel in board.panels for query in panel.queries]
    expressions = [query.replace("$__rate_interval", "1m") for query in queries]
    recorded = [{"record": f"panel:{number}", "expr": one} for number, one in enumerate(expressions)]
    (folder / "panels.yaml").write_text(json.dumps({"groups": [{"name": "panels", "rules": recorded}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", "panels.yaml", folder=folder)


def test_rollouts_mark_first_minutes_of_revision(folder: Path) -> None:
    """The first revision of a service does not count as a rollout."""
    expression = re.sub(r"\$\w+", ".*", ROLLOUTS.expression)
    marked = [{"labels": '{namespace="models", service="chat", revision="b"}', "value": 20}]
    test = {
        "interval": "1m",
        "input_series": [
            {
                "series": Scope("").series(metrics.OPERATOR_WEIGHT, revision=revision, **SERVICE),
                "values": values,
            }
            for revision, values in (("a", "100+0x60"), ("b", "_x30 20+0x60"))
        ],
        "promql_expr_test": [
            {"expr": expression, "eval_time": at, "exp_samples": samples}
            for at, samples in (("3m", []), ("29m", []), ("32m", marked), ("40m", []))
        ],
    }
    (folder / "rollouts.yaml").write_text(json.dumps({"evaluation_interval": "1m", "tests": [test]}))
    assert "SUCCESS" in promtool("test", "rules", "rollouts.yaml", folder=folder)


@functools.cache
def all_rules() -> list[dict[str, Any]]:
    groups = [group for text in rules.files().values() for group in yaml.safe_load(text)["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def isolated(name: str, severity: str) -> dict[str, Any]:
    """Return the alert with the recording rules that it needs. promtool is slow with all of them."""
    alerts = all_rules()
    (alert,) = (one for one in alerts if one.get("alert") == name and one["labels"]["severity"] == severity)
    records = [one for one in alerts if "record" in one]
    needed, before = alert["expr"], ""
    while needed != before:
        before = needed
        needed = " ".join([alert["expr"], *(one["expr"] for one in records if one["record"] in needed)])
    made_of = [one for one in records if one["record"] in needed]
    return {"groups": [{"name": "isolated", "rules": [*made_of, alert]}]}


@pytest.mark.slow
def test_alerts_fire_and_stay_silent(folder: Path) -> None:
    files, scenes = [], 0
    for number, case in enumerate(CASES):
        (folder / f"{number}.rules.yaml").write_text(json.dumps(isolated(case.name, case.severity)))
        tests = [
            scene(case.name, case.severity, case.fires, case.at, 1),
            scene(case.name, case.severity, case.silent, case.at, 0),
        ]
        text = {"rule_files": [f"{number}.rules.yaml"], "evaluation_interval": "1m", "tests": tests}
        (folder / f"{number}.yaml").write_text(json.dumps(text))
        files.append(f"{number}.yaml")
        scenes += len(tests)
    assert {(case.name, case.severity) for case in CASES} == {(one.name, one.severity) for one in ALERTS}
    assert scenes == 2 * len(CASES)
    assert promtool("test", "rules", *files, folder=folder).count("SUCCESS") == len(CASES)


def test_latency_alert_uses_objective_of_service(folder: Path) -> None:
    """Four services have the same streams; only one of them misses its own objective."""
    streams: Series = {}
    for service in ("strict", "relaxed", "tolerant", "default"):
        of: dict[str, Any] = {"namespace": "models", "service": service}
        labels: dict[str, Any] = {**of, "class_": "default"}
        for bound, well in (("0.5", 2), ("1.0", 5), ("2.5", 8), ("10.0", 10)):
            streams |= counter(metrics.ROUTER_FIRST_BYTE, well, "_bucket", le=bound, **labels)
        streams |= counter(metrics.ROUTER_FIRST_BYTE, 10, "_count", **labels)
        streams |= counter(metrics.ROUTER_REQUESTS, 60, code="200", class_="default", **of)
    telemetry = (
        *objective("strict", seconds=0.5, bound="0.5", share=0.95),
        *objective("relaxed", seconds=8.0, bound="10.0", share=0.95),
        *objective("tolerant", seconds=0.5, bound="0.5", share=0.5),  # half of the streams may be late
    )
    firing = 'sum by (service) (ALERTS{alertname="BatonTimeToFirstTokenBurn", alertstate="firing"})'
    name = "BatonTimeToFirstTokenBurn"
    test = {
        "interval": "1m",
        "input_series": [
            {"series": one, "values": values} for one, values in {**streams, **dict(telemetry)}.items()
        ],
        "promql_expr_test": [
            {
                "expr": firing,
                "eval_time": "65m",
                "exp_samples": [{"labels": '{service="strict"}', "value": 1}],
            },
            {
                "expr": "round(100 * baton:first_byte_late:ratio_rate5m)",
                "eval_time": "65m",
                "exp_samples": [
                    {"labels": f'{{namespace="models", service="{one}"}}', "value": late}
                    for one, late in (("default", 20), ("relaxed", 0), ("strict", 80), ("tolerant", 80))
                ],
            },
        ],
    }
    (folder / "own.rules.yaml").write_text(json.dumps(isolated(name, "page")))
    text = {"rule_files": ["own.rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (folder / "own.yaml").write_text(json.dumps(text))
    assert "SUCCESS" in promtool("test", "rules", "own.yaml", folder=folder)


def objective(service: str, seconds: float, bound: str, share: float) -> Iterable[tuple[str, str]]:
    """Return the objective that the operator exports for a service."""
    of = {"namespace": "models", "service": service}
    yield from constant(metrics.OPERATOR_OBJECTIVE_FIRST_TOKEN, seconds, bound=bound, **of).items()
    yield from constant(metrics.OPERATOR_OBJECTIVE_SHARE, share, **of).items()


def test_few_alerts_page_or_open_tickets() -> None:
    severities = Counter(alert.severity for alert in ALERTS)
    assert severities["page"] <= PAGES and severities["ticket"] <= TICKETS


class TestRunbooks:
    def test_alerts_have_one_runbook_each(self) -> None:
        pages = {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"}
        assert pages == {alert.name for alert in ALERTS}

    @pytest.mark.parametrize("name", sorted({alert.name for alert in ALERTS}))
    def test_runbook_has_all_headings(self, name: str) -> None:
        text = (RUNBOOKS / f"{name}.md").read_text()
        assert text.startswith(f"# {name}\n")
        gpu = [GPU_HEADING] if name in ABOUT_WORKERS else []
        assert re.findall(r"^## (.*)$", text, re.M) == [*HEADINGS, *gpu]
        for part in re.split(r"^## .*$", text, flags=re.M)[1:]:
            assert part.strip()

    def test_index_lists_every_runbook(self) -> None:
        named = re.findall(r"\]\((\w+)\.md\)", (RUNBOOKS / "README.md").read_text())
        assert sorted(named) == sorted({alert.name for alert in ALERTS})

    def test_panels_link_to_existing_runbooks(self) -> None:
        linked = {panel.runbook for board in DASHBOARDS for panel in board.panels if panel.runbook}
        assert linked <= {alert.name for alert in ALERTS}

    def test_alert_links_to_its_runbook(self) -> None:
        assert all(alert.runbook == runbook(alert.name) for alert in ALERTS)
