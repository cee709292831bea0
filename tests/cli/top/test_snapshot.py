"""Two looks at a service, and what `baton top` makes of them; no service."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console

from baton_api import metrics
from baton_cli.top.command import screen
from baton_cli.top.series import Exposed, gained, percentiles, quantile
from baton_cli.top.snapshot import Snapshot, rates

LOAD = {"running": 3, "queued": 1, "total_blocks": 100, "free_blocks": 75}


def row(worker: str, role: str = "decode", **more: Any) -> dict[str, Any]:
    state = {"state": "ready", "reason": None, "model": "tiny", "revision": None, "load": LOAD}
    return {"worker": worker, "role": role, **state, **more}


def counter(metric: metrics.Metric, value: float, labels: str = "") -> str:
    return f"# TYPE {metric.name} {metric.kind}\n{metric.name}{labels} {value}\n"


def histogram(metric: metrics.Metric, counts: dict[str, int]) -> str:
    lines = [f'{metric.name}_bucket{{le="{bound}"}} {count}' for bound, count in counts.items()]
    return (
        f"# TYPE {metric.name} histogram\n" + "\n".join(lines) + f"\n{metric.name}_count {counts['+Inf']}\n"
    )


def look(at_s: float, router: str = "", workers: dict[str, str] | None = None, rows: Any = None) -> Snapshot:
    exposed = {name: Exposed.parse(text) for name, text in (workers or {}).items()}
    return Snapshot(at_s, rows or [row("a:1")], Exposed.parse(router), exposed)


def test_gained_restarted_process_counts_from_0() -> None:
    name = metrics.WORKER_TRANSFER_BYTES
    before, now = Exposed.parse(counter(name, 100.0)), Exposed.parse(counter(name, 250.0))
    assert gained(before, now, name) == 150
    assert gained(now, before, name) == 100
    assert gained(before, Exposed({}), name) is None


def test_series_of_several_processes_are_added_up() -> None:
    name = metrics.ROUTER_REQUESTS
    text = counter(name, 3, '{process="0",code="200"}') + counter(name, 4, '{process="1",code="200"}')
    assert Exposed.parse(text).total(name, code="200") == 7
    assert Exposed.parse(text).total(name, code="500") is None


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 0.0), (0.25, 0.5), (0.5, 1.0), (0.75, 2.0), (1.0, 3.0)]
)
def test_percentiles_are_even_within_a_bucket(share: float, expected: float) -> None:
    assert quantile({1.0: 10, 3.0: 20, math.inf: 20}, share) == pytest.approx(expected)


def test_percentiles_are_of_what_came_between() -> None:
    name = metrics.WORKER_FIRST_TOKEN
    before = Exposed.parse(histogram(name, {"0.1": 90, "1.0": 90, "+Inf": 90}))
    now = Exposed.parse(histogram(name, {"0.1": 90, "1.0": 100, "+Inf": 100}))
    values = percentiles(before, now, name, (0.5,))
    assert values == pytest.approx((0.55,))
    assert percentiles(now, now, name, (0.5,)) is None
    assert percentiles(now, before, name, (0.5,)) == pytest.approx((0.05,))  # after a restart


def test_rates_unreachable_worker_is_shown_by_its_load() -> None:
    (worker,) = rates(look(0.0), look(2.0)).workers
    assert (worker.running, worker.waiting, worker.kv_usage) == (3, 1, 0.25)
    assert worker.generated_tokens_per_s is None and worker.ttft_s is None


def test_rates_combine_worker_and_router_metrics() -> None:
    own = [
        "".join(
            (
                counter(metrics.WORKER_RUNNING, 5),
                counter(metrics.WORKER_QUEUED, 2),
                counter(metrics.WORKER_FETCHING, 1),
                counter(metrics.WORKER_GENERATION_RATE, 640.0),
                counter(metrics.WORKER_KV_USAGE, 0.9),
                counter(metrics.WORKER_CACHE_QUERIES, queries),
                counter(metrics.WORKER_CACHE_HITS, hits),
                counter(metrics.WORKER_TRANSFER_BYTES, moved),
            )
        )
        for queries, hits, moved in ((100, 50, 1e6), (200, 125, 5e6))
    ]
    router = [
        counter(metrics.ROUTER_REQUESTS, good, '{code="200"}')
        + counter(metrics.ROUTER_REQUESTS, bad, '{code="503"}')
        + counter(metrics.ROUTER_IN_FLIGHT, 7)
        + counter(metrics.ROUTER_QUEUE_DEPTH, 4)
        for good, bad in ((10, 0), (30, 2))
    ]
    rows = [row("a:1"), row("b:1", "prefill", state="down", reason="no answer")]
    measured = rates(look(0.0, router[0], {"a:1": own[0]}, rows), look(2.0, router[1], {"a:1": own[1]}, rows))
    assert (measured.requests_per_s, measured.failed_per_s) == (11.0, 1.0)
    assert (measured.in_flight, measured.waiting, measured.generated_tokens_per_s) == (7, 4, 640.0)
    assert [one.role for one in measured.workers] == ["prefill", "decode"]
    decode = measured.workers[1]
    assert (decode.running, decode.waiting, decode.kv_usage) == (5, 3, 0.9)
    assert (decode.cache_hit, decode.transfer_bytes_per_s) == (0.75, 2e6)

    shown = io.StringIO()
    Console(file=shown, width=200).print(screen(measured, "http://router"))
    for words in ("1 of 2 workers ready", "11.0/s", "1.0/s failed", "down: no answer", "90 %", "2.00 MB/s"):
        assert words in shown.getvalue(), words
