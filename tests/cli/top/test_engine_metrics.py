"""`baton top` shows what workers of other engines report, and nothing for the rest."""

from __future__ import annotations

from typing import Any

import pytest

from baton_api import metrics
from baton_api.engines import EngineKind
from baton_cli.status.report import status_of_router
from baton_cli.top.engine_metrics import in_contract
from baton_cli.top.series import Exposed
from baton_cli.top.snapshot import Snapshot, WorkerRates, rates
from tests.observing.engine_series import Recording

FROM_S, TO_S = 50, 60


def row(role: str, engine: EngineKind, **load: Any) -> dict[str, Any]:
    state = {"state": "ready", "reason": None, "model": "m", "revision": None}
    return {"worker": f"{role}:1", "role": role, "load": {"engine": engine, **load}, **state}


def shown(engine: str) -> dict[str, WorkerRates]:
    """Return the rates of a recorded pair, by role."""
    pair = Recording.read(f"{engine}_pair")
    rows = [row(role, EngineKind(engine)) for role in pair.workers]
    before, now = (
        Snapshot(
            at_s,
            rows,
            Exposed({}),
            {f"{role}:1": in_contract(Exposed.parse(pair.text(role, at_s))) for role in pair.workers},
        )
        for at_s in (FROM_S, TO_S)
    )
    return {one.role: one for one in rates(before, now).workers}


def test_vllm_pair_has_its_rates() -> None:
    workers = shown("vllm")
    prefill, decode = workers["prefill"], workers["decode"]
    assert (prefill.running, prefill.waiting, decode.running, decode.waiting) == (1, 1, 3, 0)
    assert prefill.prompt_tokens_per_s == pytest.approx((10115 - 8370) / 10)
    assert decode.generated_tokens_per_s == pytest.approx((1093 - 914) / 10)
    assert decode.transfer_bytes_per_s == pytest.approx((259522560 - 215285760) / 10)
    assert decode.kv_usage == pytest.approx(0.0413) and decode.ttft_s is not None


def test_sglang_mock_has_its_rates() -> None:
    workers = shown("sglang")
    prefill, decode = workers["prefill"], workers["decode"]
    assert (prefill.running, prefill.waiting, decode.running, decode.waiting) == (1, 3, 6, 3)
    assert decode.generated_tokens_per_s == 120
    assert prefill.prompt_tokens_per_s == pytest.approx(800)
    assert prefill.cache_hit == pytest.approx(0.2)


def test_metrics_of_engine_become_those_of_contract() -> None:
    pair = Recording.read("vllm_pair")
    own = in_contract(Exposed.parse(pair.text("decode", TO_S)))
    assert own.total(metrics.WORKER_REQUESTS, finish_reason="length") == 23
    assert own.total(metrics.WORKER_INFO, model="smollm2") == 1
    for absent in (metrics.WORKER_RUNNING_LIMIT, metrics.WORKER_HELD, metrics.WORKER_STEP):
        assert own.total(absent) is None


def test_baton_aliases_are_not_counted_twice() -> None:
    text = f'{metrics.WORKER_RUNNING.name} 2\nvllm:num_requests_running{{model_name="m"}} 2\n'
    assert in_contract(Exposed.parse(text)).total(metrics.WORKER_RUNNING) == 2


def test_load_of_worker_without_metrics_is_unknown() -> None:
    """The router reports such a load as zeros."""
    zeros = {"running": 0, "queued": 0, "total_blocks": 0, "free_blocks": 0}
    snapshot = Snapshot(0.0, [row("decode", EngineKind.OPENAI, **zeros)], Exposed({}), {})
    (worker,) = rates(snapshot, snapshot).workers
    assert (worker.running, worker.waiting, worker.kv_usage) == (None, None, None)


def test_status_names_engine_and_unknown_load() -> None:
    info = {"status": "ready", "models": [{"id": "m"}], "version": "1"}
    rows = [
        row("decode", EngineKind.VLLM, version="0.32.0", total_blocks=10, running=2, queued=1),
        row("both", EngineKind.OPENAI),
    ]
    status = status_of_router("http://router", info, rows)
    assert [part.detail for part in status.parts] == [
        "2 running, 1 queued; vllm 0.32.0",
        "load unknown; openai of unknown version",
    ]
