"""Queries follow the metrics contract; dashboards are valid for Grafana; every panel has a description."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard as GrafanaDashboard
from jsonschema import Draft7Validator

from baton_api import metrics
from baton_observing.__main__ import generated, main
from baton_observing.alerts.alert import RUNBOOKS
from baton_observing.dashboards import DASHBOARDS, grafana
from baton_observing.dashboards.panels import SECONDS, Dashboard, Panel
from baton_observing.promql import Scope
from tests.observing.grafana_schema import grafana_schema

ROOT = Path(__file__).parents[2]
NAMES = re.compile(r"\bbaton_[a-z_]+")
COLUMNS = 24

PANELS = [(board, panel) for board in DASHBOARDS for panel in board.panels]
IDS = [f"{board.name}-{panel.title}" for board, panel in PANELS]


def known_names() -> set[str]:
    """Return the names of all series of the contract."""
    parts = {"histogram": ("_bucket", "_count", "_sum"), "counter": ("",), "gauge": ("",)}
    return {metric.name + part for metric in metrics.CONTRACT for part in parts[metric.kind]}


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Draft7Validator:
    return Draft7Validator(grafana_schema(tmp_path_factory.mktemp("grafana")))


def board_json(board: Dashboard) -> dict[str, Any]:
    as_json: dict[str, Any] = json.loads(grafana.to_json(board))
    return as_json


def panels_of(board: Dashboard) -> list[dict[str, Any]]:
    return [panel for panel in board_json(board)["panels"] if panel["type"] != "row"]


class TestQueries:
    @pytest.mark.parametrize(
        ("build", "message"),
        [
            (lambda: Scope("5m").rate(metrics.WORKER_RUNNING), "is a gauge, not a counter"),
            (lambda: Scope("5m").gauge(metrics.WORKER_RUNNING, "tenant"), "has no labels ['tenant']"),
            (lambda: Scope("5m").series(metrics.WORKER_BLOCKS, state="lost"), "has no state 'lost'"),
            (lambda: Scope("5m").series(metrics.WORKER_BLOCKS, colour="red"), "has no label colour"),
            (lambda: Scope("5m").quantile(0.5, metrics.ROUTER_REQUESTS), "is a counter, not a histogram"),
            (lambda: Scope("5m").rate_below(metrics.WORKER_STEP, 0.07), "has no bucket 0.07"),
        ],
        ids=["kind", "by", "value", "label", "histogram", "bucket"],
    )
    def test_query_outside_contract_raises(self, build: Any, message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            build()

    def test_runbooks_name_existing_metrics(self) -> None:
        pages = (ROOT / "docs/runbooks").glob("*.md")
        named = {name for page in pages for name in NAMES.findall(page.read_text())}
        assert len(named) > 30
        assert named <= known_names()


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=IDS)
def test_panel_is_described_and_uses_variables(board: Dashboard, panel: Panel) -> None:
    assert len(panel.description) > 25 and panel.description.endswith(".")
    assert panel.unit.name and panel.queries
    assert bool(panel.states) == (panel.kind == "timeline")
    selected = {f"${variable.name}" for variable in board.variables}
    for query in panel.queries:
        assert set(re.findall(r"\$(?!__)\w+", query.expression)) <= selected
        assert "$cluster" in query.expression or "baton:" in query.expression
        assert set(NAMES.findall(query.expression)) <= known_names()
        assert set(re.findall(r"{{(\w+)}}", query.legend)) <= set(re.findall(r"\w+", query.expression))


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=IDS)
def test_panel_legend_names_its_zero(board: Dashboard, panel: Panel) -> None:
    """A zero that stands in for a missing series has every label of the legend."""
    for query in panel.queries:
        if "vector(0)" not in query.expression:
            continue
        assert set(re.findall(r"{{(\w+)}}", query.legend)) <= _labels_of_zero(query.expression)


def _labels_of_zero(expression: str) -> set[str]:
    zero = expression[expression.index("or on() ") :]
    return set(re.findall(r', "(\w+)", "[^"]+", "", ""', zero))


def in_seconds(query: str) -> bool:
    """Return whether a query returns seconds: a gauge or a quantile, but not a rate."""
    units = {metric.name: metric.unit for metric in metrics.CONTRACT}
    (name, *_) = NAMES.findall(query) or [""]
    base = re.sub(r"_(bucket|sum|count)$", "", name) if name not in units else name
    return units.get(base) == "seconds" and (base == name or "histogram_quantile" in query)


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=IDS)
def test_panel_shows_seconds_or_counts(board: Dashboard, panel: Panel) -> None:
    assert {in_seconds(query.expression) for query in panel.queries} == {panel.unit is SECONDS}


def test_conditions_and_reasons_are_timelines() -> None:
    discrete = {metrics.OPERATOR_CONDITION, metrics.AUTOSCALER_DECIDED_BY, metrics.AUTOSCALER_HELD,
                metrics.AUTOSCALER_UNKNOWN}  # fmt: skip
    shown = {
        metric: {
            panel.kind
            for _, panel in PANELS
            if any(
                f"{metric.name}{{" in one.expression and "count" not in one.expression
                for one in panel.queries
            )
        }
        for metric in discrete
    }
    assert all(kinds == {"timeline"} for kinds in shown.values()), shown


def test_service_dashboards_mark_rollouts() -> None:
    for board in DASHBOARDS:
        names = [variable.name for variable in board.variables]
        assert names[0] == "cluster"
        assert bool(board.annotations) == ("service" in names)
        for annotation in board.annotations:
            assert set(NAMES.findall(annotation.expression)) <= known_names()
            assert set(re.findall(r"\$\w+", annotation.expression)) <= {f"${name}" for name in names}


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.name)
class TestJson:
    def test_sdk_round_trip_is_lossless(self, board: Dashboard) -> None:
        register_default_plugins()
        read = json.loads(JSONEncoder().encode(GrafanaDashboard.from_json(board_json(board))))
        for variable in read["templating"]["list"]:
            for name in ("auto", "auto_min", "auto_count"):  # the SDK adds them to every kind of variable
                del variable[name]
        written = board_json(board)
        for annotation in written.get("annotations", {}).get("list", ()):
            for name in ("titleFormat", "textFormat"):  # fields of the data source, which the SDK lacks
                del annotation[name]
        assert read == written

    @pytest.mark.slow
    def test_json_matches_grafana_schema(self, board: Dashboard, schema: Draft7Validator) -> None:
        assert not [error.message for error in schema.iter_errors(board_json(board))]

    @pytest.mark.slow
    def test_schema_rejects_unknown_panel_field(self, board: Dashboard, schema: Draft7Validator) -> None:
        wrong = copy.deepcopy(board_json(board))
        wrong["panels"][1]["fieldConfig"]["defaults"]["colour"] = "red"
        assert not schema.is_valid(wrong)

    def test_panels_fill_rows_without_overlap(self, board: Dashboard) -> None:
        for row in board.rows:
            assert sum(panel.width for panel in row.panels) % COLUMNS == 0
        taken: set[tuple[int, int]] = set()
        for panel in board_json(board)["panels"]:
            place = panel["gridPos"]
            cells = {
                (place["x"] + right, place["y"] + down)
                for right in range(place["w"])
                for down in range(place["h"])
            }
            assert not cells & taken, panel["title"]
            taken |= cells

    def test_descriptions_end_with_unit(self, board: Dashboard) -> None:
        for panel, document in zip(board.panels, panels_of(board), strict=True):
            assert f"Unit: {panel.unit.name}." in document["description"]

    def test_uid_and_panel_ids_are_unique(self, board: Dashboard) -> None:
        dashboard_json = board_json(board)
        assert dashboard_json["uid"] == f"baton-{board.name}"
        ids = [panel["id"] for panel in dashboard_json["panels"]]
        assert len(ids) == len(set(ids))


def test_runbooks_option_sets_absolute_url(tmp_path: Path) -> None:
    main(["--folder", str(tmp_path), "--runbooks", "https://wiki.example/baton"])
    written = "".join(path.read_text() for path in tmp_path.glob("*/*"))
    assert "https://wiki.example/baton/BatonNoWorker.md" in written and RUNBOOKS not in written
    assert all(text.count(f"{RUNBOOKS}/Baton") == text.count(RUNBOOKS) for text in generated().values())


def test_check_names_stale_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--folder", str(tmp_path)])
    (tmp_path / "dashboards/service.json").write_text("{}")
    (tmp_path / "rules/old.yaml").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["--check", "--folder", str(tmp_path)])
    assert ended.value.code == 1
    assert capsys.readouterr().err.count("make fix") == 2
    main(["--folder", str(tmp_path)])
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")} == set(generated())
