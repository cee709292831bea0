"""
`kill -9` of runners, router and workers while batches run: no line is lost or duplicated.

Longer, as it is done before a release: `python -m benchmarks.batch_chaos --kills 1000`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.batches import chaos

KILLS = 16


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_law_batches_complete_under_random_kills(
    database: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = "" if database == "sqlite" else request.getfixturevalue("postgres").new_database()
    report = chaos.run(
        tmp_path, KILLS, seed=1, environment={"BATON_ROUTER_DATABASE": url}, lines=300, pause_s=(0.0, 0.5)
    )
    print(report)
    assert report.kills.total() == KILLS and report.batches >= 2
    assert (report.lost, report.doubled, report.different) == (0, 0, 0)
