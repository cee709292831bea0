"""A real Prometheus watches real processes under load: every panel and every rule has something to say."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from baton_api import metrics
from baton_observing import dcgm, pictures
from baton_observing.alerts import ALERTS
from baton_observing.boards import BOARDS
from baton_observing.panels import Query
from baton_observing.prometheus import Span
from baton_observing.recording import RECORDS
from baton_observing.variables import CLUSTER, TENANT
from tests.engine.models import make_model
from tests.observing.story import Load, Watched, watched

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]

LONG_S = 300.0
"""In which every query has found something, however slow the machine is."""

NAMES = re.compile(r"\bbaton_[a-z_]+")
RARE = frozenset(
    metric.name
    for metric in (
        metrics.ROUTER_TENANTS_STALE,
        metrics.ROUTER_CERTIFICATE_END,
        metrics.ROUTER_CERTIFICATE_LIFE,
        metrics.WORKER_CERTIFICATE_END,
        metrics.WORKER_CERTIFICATE_LIFE,
        metrics.WORKER_TRANSFER_FAILURES,
        metrics.OPERATOR_ROLLBACKS,
    )
)
"""There only with a file of tenants, with certificates, or once something has failed by some transport."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def it(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    (folder / "kubernetes").mkdir()
    async with watched(folder, make_model(folder / "tiny")) as made:
        yield made


def queries() -> dict[str, Query]:
    """Of all panels, and what rules look at, by where they stand."""
    found = {
        f"{board.name}: {panel.title}: {number}": query
        for board in BOARDS
        for panel in board.panels
        for number, query in enumerate(panel.queries)
    }
    found |= {record.name: Query(record.name) for record in RECORDS}
    found |= {record.expression: Query(record.expression) for record in RECORDS}
    looked_at = {name for alert in ALERTS for name in NAMES.findall(alert.expression)}
    # A machine without GPUs has none of theirs.
    found = {
        name: one for name, one in found.items() if not any(gpu in one.expression for gpu in dcgm.METRICS)
    }
    return found | {f"alerts: {name}": Query(f"count({name})") for name in looked_at - RARE}


async def test_every_query_of_every_panel_and_rule_returns_data(it: Watched, tmp_path: Path) -> None:
    load = Load(it.up.url, "tiny", people=3)
    began = time.time()
    missing = queries()
    everything = len(missing)
    with load.running():
        load.batch(20)
        for number in itertools.count(1):
            span = Span(began, time.time(), 1.0, "1m")
            for where, query in list(missing.items()):
                if it.prometheus.shown(query, span):
                    del missing[where]
            if not missing:
                break
            await it.change(number)
            assert time.time() < began + LONG_S, (
                f"{len(missing)} of {everything} show nothing: {sorted(missing)}"
            )
    _judge(it)
    _draw(it, tmp_path)


def _judge(it: Watched) -> None:
    # No rule fails.
    groups = it.prometheus.get("rules", {})["groups"]
    said = [rule for group in groups for rule in group["rules"]]
    assert len(said) == len(ALERTS) + len(RECORDS)
    assert not [rule["name"] for rule in said if rule["health"] != "ok"]

    # What is chosen at the top of a dashboard has values.
    for board in BOARDS:
        # Without a file of tenants none has a name, and one cluster's Prometheus does not name it.
        for variable in set(board.variables) - {TENANT, CLUSTER}:
            selector = re.fullmatch(r"label_values\((.*), (\w+)\)", variable.query)
            assert selector is not None
            asked = {"match[]": re.sub(r"\$\w+", ".*", selector.group(1))}
            assert it.prometheus.get(f"label/{selector.group(2)}/values", asked), variable


def _draw(it: Watched, folder: Path) -> None:
    pictures.main(["--prometheus", it.prometheus.url, "--minutes", "1", "--folder", str(folder)])
    drawn = {path.stem: path.read_bytes() for path in folder.glob("*.png")}
    assert set(drawn) == {board.name for board in BOARDS}
    assert all(5_000 < len(picture) < 300_000 for picture in drawn.values())
