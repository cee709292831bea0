"""Rules and alerts by Prometheus' own tools: each alert fires once and stays silent once."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton_api import metrics
from baton_observing import rules
from baton_observing.alerts import ALERTS
from baton_observing.alerts.alert import runbook
from baton_observing.annotations import ROLLOUTS
from baton_observing.boards import BOARDS
from baton_observing.promql import Scope
from tests.observing.alert_cases import CASES
from tests.observing.told_series import OF, Series, level, rise

ROOT = Path(__file__).parents[2]
RUNBOOKS = ROOT / "docs" / "runbooks"
HEADINGS = ["What it means", "Who notices", "How to see it", "What to do"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the rules' files in it."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (on Debian: apt install prometheus)")
    made = tmp_path_factory.mktemp("rules")
    for name, text in rules.files().items():
        (made / name).write_text(text)
    return made


def promtool(*arguments: str, folder: Path) -> str:
    """What it says; fails if it finds something wrong."""
    done = subprocess.run(["promtool", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def firing(name: str, severity: str) -> str:
    """How many there are."""
    return f'count(ALERTS{{alertname="{name}", severity="{severity}", alertstate="firing"}}) or vector(0)'


def scene(name: str, severity: str, series: Series, at: int, count: int) -> Mapping[str, Any]:
    """One test of promtool's: of these series, so many alerts at that minute."""
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


def test_prometheus_finds_nothing_wrong(folder: Path) -> None:
    said = promtool("check", "rules", *rules.files(), folder=folder)
    found = sum(int(number) for number in re.findall(r"(\d+) rules found", said))
    records = sum(text.count("record:") for text in rules.files().values())
    assert found == len(ALERTS) + records


def test_prometheus_understands_each_panels_query(folder: Path) -> None:
    queries = [query.expression for board in BOARDS for panel in board.panels for query in panel.queries]
    expressions = [query.replace("$__rate_interval", "1m") for query in queries]
    recorded = [{"record": f"panel:{number}", "expr": one} for number, one in enumerate(expressions)]
    (folder / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", "panels.yaml", folder=folder)


def test_rollouts_are_marked_while_a_revision_is_new(folder: Path) -> None:
    """Of a service that had another one before: its first revision is no rollout."""
    expression = re.sub(r"\$\w+", ".*", ROLLOUTS.expression)
    marked = [{"labels": '{namespace="models", service="chat", revision="b"}', "value": 20}]
    test = {
        "interval": "1m",
        "input_series": [
            {"series": Scope("").series(metrics.OPERATOR_WEIGHT, revision=revision, **OF), "values": values}
            for revision, values in (("a", "100+0x60"), ("b", "_x30 20+0x60"))
        ],
        "promql_expr_test": [
            {"expr": expression, "eval_time": at, "exp_samples": samples}
            for at, samples in (("3m", []), ("29m", []), ("32m", marked), ("40m", []))
        ],
    }
    (folder / "rollouts.yaml").write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [test]}))
    assert "SUCCESS" in promtool("test", "rules", "rollouts.yaml", folder=folder)


def alone(name: str, severity: str) -> dict[str, Any]:
    """The alert and what it is made of: promtool takes its time for each rule at each minute."""
    groups = [group for text in rules.files().values() for group in yaml.safe_load(text)["groups"]]
    found = [rule for group in groups for rule in group["rules"]]
    (alert,) = (one for one in found if one.get("alert") == name and one["labels"]["severity"] == severity)
    records = [one for one in found if "record" in one]
    needed, before = alert["expr"], ""
    while needed != before:
        before = needed
        needed = " ".join([alert["expr"], *(one["expr"] for one in records if one["record"] in needed)])
    made_of = [one for one in records if one["record"] in needed]
    return {"groups": [{"name": "alone", "rules": [*made_of, alert]}]}


def test_each_alert_fires_once_and_stays_silent_once(folder: Path) -> None:
    files, scenes = [], 0
    for number, case in enumerate(CASES):
        (folder / f"{number}.rules.yaml").write_text(yaml.safe_dump(alone(case.name, case.severity)))
        tests = [
            scene(case.name, case.severity, case.fires, case.at, 1),
            scene(case.name, case.severity, case.silent, case.at, 0),
        ]
        text = {"rule_files": [f"{number}.rules.yaml"], "evaluation_interval": "1m", "tests": tests}
        (folder / f"{number}.yaml").write_text(yaml.safe_dump(text))
        files.append(f"{number}.yaml")
        scenes += len(tests)
    assert {(case.name, case.severity) for case in CASES} == {(one.name, one.severity) for one in ALERTS}
    assert scenes == 2 * len(CASES)
    assert promtool("test", "rules", *files, folder=folder).count("SUCCESS") == len(CASES)


def test_each_service_is_held_to_its_own_objectives(folder: Path) -> None:
    """Of the same streams, most of which take more than half a second, one service alone has to complain."""
    streams: Series = {}
    for service in ("hasty", "calm", "patient", "untold"):
        of: dict[str, Any] = {"namespace": "models", "service": service}
        labels: dict[str, Any] = {**of, "class_": "default"}
        for bound, well in (("0.5", 2), ("1.0", 5), ("2.5", 8), ("10.0", 10)):
            streams |= rise(metrics.ROUTER_FIRST_BYTE, well, "_bucket", le=bound, **labels)
        streams |= rise(metrics.ROUTER_FIRST_BYTE, 10, "_count", **labels)
        streams |= rise(metrics.ROUTER_REQUESTS, 60, code="200", class_="default", **of)
    told = (
        *objective("hasty", seconds=0.5, bound="0.5", share=0.95),
        *objective("calm", seconds=8.0, bound="10.0", share=0.95),
        *objective("patient", seconds=0.5, bound="0.5", share=0.5),  # half of them may be late
    )
    firing = 'sum by (service) (ALERTS{alertname="BatonFirstByteBurn", alertstate="firing"})'
    name = "BatonFirstByteBurn"
    test = {
        "interval": "1m",
        "input_series": [
            {"series": one, "values": values} for one, values in {**streams, **dict(told)}.items()
        ],
        "promql_expr_test": [
            {
                "expr": firing,
                "eval_time": "65m",
                "exp_samples": [{"labels": '{service="hasty"}', "value": 1}],
            },
            {
                "expr": "round(100 * baton:first_byte_late:ratio_rate5m)",
                "eval_time": "65m",
                "exp_samples": [
                    {"labels": f'{{namespace="models", service="{one}"}}', "value": late}
                    for one, late in (("calm", 0), ("hasty", 80), ("patient", 80), ("untold", 20))
                ],
            },
        ],
    }
    (folder / "own.rules.yaml").write_text(yaml.safe_dump(alone(name, "page")))
    text = {"rule_files": ["own.rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (folder / "own.yaml").write_text(yaml.safe_dump(text))
    assert "SUCCESS" in promtool("test", "rules", "own.yaml", folder=folder)


def objective(service: str, seconds: float, bound: str, share: float) -> Iterable[tuple[str, str]]:
    """What the operator tells of a service."""
    of = {"namespace": "models", "service": service}
    yield from level(metrics.OPERATOR_OBJECTIVE_FIRST_TOKEN, seconds, bound=bound, **of).items()
    yield from level(metrics.OPERATOR_OBJECTIVE_SHARE, share, **of).items()


class TestRunbooks:
    def test_each_alert_has_a_page_and_no_page_is_of_none(self) -> None:
        pages = {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"}
        assert pages == {alert.name for alert in ALERTS}

    @pytest.mark.parametrize("name", sorted({alert.name for alert in ALERTS}))
    def test_each_page_says_what_one_has_to_know(self, name: str) -> None:
        text = (RUNBOOKS / f"{name}.md").read_text()
        assert text.startswith(f"# {name}\n")
        assert re.findall(r"^## (.*)$", text, re.M) == HEADINGS
        for part in re.split(r"^## .*$", text, flags=re.M)[1:]:
            assert part.strip()

    def test_the_contents_name_each_page(self) -> None:
        named = re.findall(r"\]\((\w+)\.md\)", (RUNBOOKS / "README.md").read_text())
        assert sorted(named) == sorted({alert.name for alert in ALERTS})

    def test_panels_link_to_pages_that_there_are(self) -> None:
        linked = {panel.runbook for board in BOARDS for panel in board.panels if panel.runbook}
        assert linked <= {alert.name for alert in ALERTS}

    def test_each_alert_links_to_its_page(self) -> None:
        assert all(alert.runbook == runbook(alert.name) for alert in ALERTS)
