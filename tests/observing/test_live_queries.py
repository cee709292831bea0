"""Every panel and rule returns data from a real Prometheus of real processes under load."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from baton_api import metrics
from baton_observing import rules
from baton_observing.alerts import ALERTS
from baton_observing.dashboards import DASHBOARDS
from baton_observing.dashboards.panels import CLUSTER, TENANT, Query
from baton_observing.objectives import RECORDING_RULES
from tests.engine.models import make_model
from tests.observing.monitored import Load, Monitored, monitored

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LONG_S = 300.0
"""Enough for every query to return data on a slow machine."""

NAMES = re.compile(r"\bbaton_[a-z_]+")
RARE = frozenset(
    metric.name
    for metric in (
        metrics.ROUTER_TENANTS_STALE,
        metrics.ROUTER_CERTIFICATE_END,
        metrics.ROUTER_CERTIFICATE_LIFE,
        metrics.WORKER_CERTIFICATE_END,
        metrics.WORKER_CERTIFICATE_LIFE,
        metrics.WORKER_TIER_CORRUPT,
        metrics.WORKER_TIER_PAUSED,
        metrics.WORKER_TRANSFER_FAILURES,
        metrics.OPERATOR_ROLLBACKS,
    )
)
"""Exported only with a tenants file, with certificates, with a tier, or after a failure."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def it(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Monitored]:
    folder = tmp_path_factory.mktemp("monitored")
    (folder / "kubernetes").mkdir()
    async with monitored(folder, make_model(folder / "tiny")) as stack:
        yield stack


def queries() -> dict[str, Query]:
    """Return the queries of all panels and rules, by where they are."""
    by_expression = {
        f"{board.name}: {panel.title}: {number}": query
        for board in DASHBOARDS
        for panel in board.panels
        for number, query in enumerate(panel.queries)
    }
    by_expression |= {record.name: Query(record.name) for record in RECORDING_RULES}
    by_expression |= {record.expression: Query(record.expression) for record in RECORDING_RULES}
    looked_at = {name for alert in ALERTS for name in NAMES.findall(alert.expression)}
    # DCGM metrics need a GPU.
    by_expression = {name: one for name, one in by_expression.items() if "DCGM_" not in one.expression}
    return by_expression | {f"alerts: {name}": Query(f"count({name})") for name in looked_at - RARE}


async def test_panels_and_rules_return_data(it: Monitored) -> None:
    load = Load(it.up.url, "tiny", clients=3)
    began = time.time()
    missing = queries()
    everything = len(missing)
    with load.running():
        load.batch(20)
        for number in itertools.count(1):
            for where, query in list(missing.items()):
                if it.prometheus.has_data(query, began, time.time()):
                    del missing[where]
            if not missing:
                break
            await it.change(number)
            assert time.time() < began + LONG_S, (
                f"{len(missing)} of {everything} return no data: {sorted(missing)}"
            )
    _judge(it)


def _judge(it: Monitored) -> None:
    # No rule fails.
    groups = it.prometheus.get("rules", {})["groups"]
    evaluated = [rule for group in groups for rule in group["rules"]]
    mapped = sum(len(records) for records in rules.rules().values())
    assert len(evaluated) == len(ALERTS) + len(RECORDING_RULES) + mapped
    assert not [
        (rule["name"], rule["health"], rule.get("lastError")) for rule in evaluated if rule["health"] != "ok"
    ]

    # Every variable of a dashboard has values.
    for board in DASHBOARDS:
        # Tenants need a tenants file, clusters a Prometheus of several clusters.
        for variable in set(board.variables) - {TENANT, CLUSTER}:
            selector = re.fullmatch(r"label_values\((.*), (\w+)\)", variable.query)
            assert selector is not None
            parameters = {"match[]": re.sub(r"\$\w+", ".*", selector.group(1))}
            assert it.prometheus.get(f"label/{selector.group(2)}/values", parameters), variable
