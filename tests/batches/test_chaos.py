"""
`kill -9` of runners, router and workers while batches run: no line is lost, none is there twice.

Longer, as it is done before a release: `python -m benchmarks.batch_chaos --kills 1000`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.batches import chaos

KILLS = 16


@pytest.mark.processes
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_batches_come_through_whatever_is_killed(
    database: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = "" if database == "sqlite" else request.getfixturevalue("postgres").new_database()
    report = chaos.run(
        tmp_path, KILLS, seed=1, environment={"BATON_ROUTER_DATABASE": url}, lines=300, pause_s=(0.0, 0.5)
    )
    print(report)
    assert report.kills.total() == KILLS and report.batches >= 2
    assert (report.lost, report.doubled, report.different) == (0, 0, 0)
