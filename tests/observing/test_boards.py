"""Dashboards as code: what Grafana is given is what it knows, and says what it means."""

from __future__ import annotations

import copy
import doctest
import json
import re
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from jsonschema import Draft7Validator

from baton_api import metrics
from baton_observing import grafana, pictures, prometheus, promql
from baton_observing.__main__ import generated, main
from baton_observing.alerts.alert import RUNBOOKS
from baton_observing.boards import BOARDS
from baton_observing.panels import Board, Panel
from baton_observing.promql import Scope
from tests.observing.grafana_schema import grafana_schema

ROOT = Path(__file__).parents[2]
NAMES = re.compile(r"\bbaton_[a-z_]+")
COLUMNS = 24

PANELS = [(board, panel) for board in BOARDS for panel in board.panels]


def known_names() -> set[str]:
    """Of all series that the contract has."""
    parts = {"histogram": ("_bucket", "_count", "_sum"), "counter": ("",), "gauge": ("",)}
    return {metric.name + part for metric in metrics.CONTRACT for part in parts[metric.kind]}


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Draft7Validator:
    return Draft7Validator(grafana_schema(tmp_path_factory.mktemp("grafana")))


def board_json(board: Board) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(grafana.text(board))
    return found


class TestQueries:
    @pytest.mark.parametrize(
        ("made", "said"),
        [
            (lambda: Scope("5m").per_second(metrics.WORKER_RUNNING), "is no counter but a gauge"),
            (lambda: Scope("5m").now(metrics.WORKER_RUNNING, "tenant"), "has no labels ['tenant']"),
            (lambda: Scope("5m").series(metrics.WORKER_BLOCKS, state="lost"), "has no state 'lost'"),
            (lambda: Scope("5m").series(metrics.WORKER_BLOCKS, colour="red"), "has no label colour"),
            (lambda: Scope("5m").quantile(0.5, metrics.ROUTER_REQUESTS), "is no histogram"),
            (lambda: Scope("5m").within(metrics.WORKER_STEP, 0.07), "has no bucket 0.07"),
        ],
        ids=["kind", "by", "value", "label", "histogram", "bucket"],
    )
    def test_what_the_contract_does_not_have_cannot_be_asked_for(self, made: Any, said: str) -> None:
        with pytest.raises(ValueError, match=re.escape(said)):
            made()

    def test_the_examples_are_true(self) -> None:
        for module in (promql, pictures, prometheus):
            assert doctest.testmod(module).failed == 0

    def test_runbooks_ask_for_what_there_is(self) -> None:
        pages = (ROOT / "docs/runbooks").glob("*.md")
        named = {name for page in pages for name in NAMES.findall(page.read_text())}
        assert len(named) > 30
        assert named <= known_names()


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=[f"{b.name}-{p.title}" for b, p in PANELS])
def test_a_panel_says_what_it_means_and_chooses_by_what_is_chosen(board: Board, panel: Panel) -> None:
    assert len(panel.meaning) > 25 and panel.meaning.endswith(".")
    assert panel.unit and panel.queries
    assert bool(panel.states) == (panel.kind == "states")
    chosen = {f"${variable.name}" for variable in board.variables}
    for query in panel.queries:
        assert set(re.findall(r"\$(?!__)\w+", query.expression)) <= chosen
        assert "$cluster" in query.expression or "baton:" in query.expression
        assert set(NAMES.findall(query.expression)) <= known_names()
        assert set(re.findall(r"{{(\w+)}}", query.legend)) <= set(re.findall(r"\w+", query.expression))


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=[f"{b.name}-{p.title}" for b, p in PANELS])
def test_panel_legend_names_its_zero(board: Board, panel: Panel) -> None:
    """Where nothing has happened yet a zero stands in, whose legend would be what is around the labels."""
    for query in panel.queries:
        if "vector(0)" not in query.expression:
            continue
        assert set(re.findall(r"{{(\w+)}}", query.legend)) <= _named_in(query.expression)


def _named_in(expression: str) -> set[str]:
    """Labels that a zero is given."""
    zero = expression[expression.index("or on() ") :]
    return set(re.findall(r', "(\w+)", "[^"]+", "", ""', zero))


def in_seconds(query: str) -> bool:
    """Whether a query gives seconds: of a gauge of them, a quantile or a mean, but not of how often."""
    units = {metric.name: metric.unit for metric in metrics.CONTRACT}
    (name, *_) = NAMES.findall(query) or [""]
    base = re.sub(r"_(bucket|sum|count)$", "", name) if name not in units else name
    return units.get(base) == "seconds" and (base == name or "histogram_quantile" in query)


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=[f"{b.name}-{p.title}" for b, p in PANELS])
def test_panel_shows_seconds_or_counts(board: Board, panel: Panel) -> None:
    assert {in_seconds(query.expression) for query in panel.queries} == {panel.unit == "s"}


def test_conditions_and_reasons_are_timelines_of_states() -> None:
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
    assert all(kinds == {"states"} for kinds in shown.values()), shown


def test_boards_of_services_mark_rollouts_and_choose_clusters() -> None:
    for board in BOARDS:
        names = [variable.name for variable in board.variables]
        assert names[0] == "cluster"
        assert bool(board.annotations) == ("service" in names)
        for annotation in board.annotations:
            assert set(NAMES.findall(annotation.expression)) <= known_names()
            assert set(re.findall(r"\$\w+", annotation.expression)) <= {f"${name}" for name in names}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
class TestJson:
    def test_grafanas_sdk_reads_back_what_it_wrote(self, board: Board) -> None:
        register_default_plugins()
        read = json.loads(JSONEncoder().encode(Dashboard.from_json(board_json(board))))
        for variable in read["templating"]["list"]:
            for name in ("auto", "auto_min", "auto_count"):  # which it gives to each kind of variable
                del variable[name]
        written = board_json(board)
        for annotation in written.get("annotations", {}).get("list", ()):
            for name in ("titleFormat", "textFormat"):  # of the data source, not of the SDK
                del annotation[name]
        assert read == written

    def test_it_fits_grafanas_schema(self, board: Board, schema: Draft7Validator) -> None:
        assert not [error.message for error in schema.iter_errors(board_json(board))]

    def test_the_schema_would_refuse_another_field_in_a_panel(
        self, board: Board, schema: Draft7Validator
    ) -> None:
        wrong = copy.deepcopy(board_json(board))
        wrong["panels"][1]["fieldConfig"]["defaults"]["colour"] = "red"
        assert not schema.is_valid(wrong)

    def test_rows_are_full_and_panels_do_not_overlap(self, board: Board) -> None:
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

    def test_links_and_ids_are_its_own(self, board: Board) -> None:
        made = board_json(board)
        assert made["uid"] == f"baton-{board.name}"
        ids = [panel["id"] for panel in made["panels"]]
        assert len(ids) == len(set(ids))


def test_links_to_runbooks_lead_where_they_are_told_to(tmp_path: Path) -> None:
    main(["--folder", str(tmp_path), "--runbooks", "https://wiki.example/baton"])
    written = "".join(path.read_text() for path in tmp_path.glob("*/*"))
    assert "https://wiki.example/baton/BatonNoWorker.md" in written and RUNBOOKS not in written
    assert all(text.count(f"{RUNBOOKS}/Baton") == text.count(RUNBOOKS) for text in generated().values())


def test_a_stale_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--folder", str(tmp_path)])
    (tmp_path / "dashboards/service.json").write_text("{}")
    (tmp_path / "rules/old.yaml").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["--check", "--folder", str(tmp_path)])
    assert ended.value.code == 1
    assert capsys.readouterr().err.count("make fix") == 2
    main(["--folder", str(tmp_path)])
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")} == set(generated())
