"""The metrics of vLLM and SGLang workers reach the contract, the autoscaler and its decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from baton_api import metrics
from baton_api.metrics import CONTRACT
from baton_api.metrics.engines import MAPPINGS
from baton_api.metrics.engines.mapping import EngineMapping
from baton_operator.rollout.decision import RoleName
from baton_operator.scaling.decision import decide
from baton_operator.scaling.prometheus import METRIC_LABEL, MetricsQuery
from baton_operator.scaling.sample import RoleMemory, RoleSample, ScalingDecision, ScalingPolicy
from baton_operator.scaling.signals import RolePods, ServiceMetrics, role_sample
from baton_operator.scaling.sizing import DecodeSlots
from tests.observing.engine_series import (
    NAMESPACE,
    SERVICE,
    Recording,
    Series,
    evaluated,
    router_series,
)

IDLE_S, BUSY_S, AFTER_S = 20, 55, 175
"""Before, during and after the load of the recording."""

SLOTS = DecodeSlots(4, exact=True)
"""`--max-num-seqs` of the decode workers, if the spec names it."""

DEFAULT = DecodeSlots(64, exact=False)
"""What the engine has at least, if the spec names nothing."""

POLICIES: Mapping[RoleName, ScalingPolicy] = {
    "prefill": ScalingPolicy(least=1, most=8, objective_s=2.0, queue_s=2.0),
    "decode": ScalingPolicy(least=1, most=8, objective_s=0.5),
}


@pytest.fixture(scope="module")
def pair() -> Recording:
    return Recording.read("vllm_pair")


@pytest.fixture(scope="module")
def sglang_pair() -> Recording:
    """Return a mock: the names and labels are SGLang's, the values are invented."""
    return Recording.read("sglang_pair")


def all_series(recording: Recording) -> Series:
    return {**recording.scraped(), **router_series(recording)}


def inputs(
    recording: Recording, series: Series, at_s: int, slots: DecodeSlots | None = None
) -> ServiceMetrics:
    """Return the inputs of the autoscaler at a time, from its own query."""
    query = MetricsQuery(NAMESPACE, SERVICE, 95, window_s=40, decode_slots=slots)
    results = evaluated(recording.interval_s, series, {"all": query.text}, at_s)["all"]
    return ServiceMetrics({labels[METRIC_LABEL]: value for labels, value in results})


def with_load(recording: Recording, running: float, queued: float) -> Series:
    """Return all series, with other numbers of requests in the decode worker."""
    changes = {"vllm:num_requests_running": running, "vllm:num_requests_waiting": queued}
    return {
        name: [changes[name.partition("{")[0]]] * len(values)
        if name.partition("{")[0] in changes and 'role="decode"' in name
        else values
        for name, values in all_series(recording).items()
    }


def sample(role: RoleName, seen: ServiceMetrics, replicas: int = 1) -> RoleSample:
    pods = RolePods(replicas=replicas, ready=replicas, routers=1)
    return role_sample(role, seen, pods, POLICIES[role].objective_s)


def decided(
    role: RoleName, one: RoleSample, seconds: int = 600, capacity: float | None = None
) -> ScalingDecision:
    """Return the first decision that changes something while the sample stays the same, or the last one."""
    memory = RoleMemory.new(0.0, capacity=capacity, startup_s=60.0)
    for now in range(1000, 1000 + seconds, 15):
        decision, memory = decide(POLICIES[role], memory, one, float(now))
        if decision.replicas != one.replicas:
            break
    return decision


@pytest.mark.parametrize("mapping", MAPPINGS, ids=lambda one: one.engine)
def test_mapping_names_only_metrics_of_recording(mapping: EngineMapping) -> None:
    pair = Recording.read(f"{mapping.engine}_pair")
    exposed = {name.partition("{")[0] for series in pair.workers.values() for name in series}
    stems = exposed | {name.removesuffix(part) for name in exposed for part in ("_bucket", "_sum", "_count")}
    assert set(mapping.names) <= stems


@pytest.mark.parametrize("mapping", MAPPINGS, ids=lambda one: one.engine)
def test_mapping_labels_are_those_of_contract(mapping: EngineMapping) -> None:
    for one in mapping.metrics:
        for source in one.sources:
            given = set(source.labels) | set(source.copied)
            # The scrape gives the name and the role of a worker.
            missing = set(one.metric.labels) - {"worker", "role"} - given
            assert given <= set(one.metric.labels) and (not missing or "unknown" in one.note), one.metric.name
            for label in one.metric.by:
                assert not label.values or source.labels.get(label.name, label.values[0]) in label.values


@pytest.mark.parametrize("mapping", MAPPINGS, ids=lambda one: one.engine)
def test_busy_pair_has_every_mapped_metric(mapping: EngineMapping) -> None:
    pair = Recording.read(f"{mapping.engine}_pair")
    parts = {"counter": "", "gauge": "", "histogram": "_count"}
    queries = {
        one.name: f"sum({one.name}{parts[one.kind]})"
        for one in CONTRACT
        if one.name.startswith("baton_worker_")
    }
    results = evaluated(pair.interval_s, all_series(pair), queries, BUSY_S)
    mapped = {one.metric.name for one in mapping.metrics} | {metrics.WORKER_QUEUED_TOKENS.name}
    assert {name for name, got in results.items() if got} == mapped


def test_recorded_values_are_those_of_workers(pair: Recording) -> None:
    table = {
        'baton_worker_requests_running{role="decode"}': 3,
        'baton_worker_requests_queued{role="prefill"}': 1,
        'baton_worker_requests_queued{role="decode"}': 0,
        'baton_worker_requests_fetching{role="decode"}': 0,
        'baton_worker_prompt_tokens_total{role="decode", source="remote"}': 10074,
        'baton_worker_prompt_tokens_total{role="prefill", source="computed"}': 10115,
        'baton_worker_generation_tokens_total{role="decode"}': 985,
        'baton_worker_requests_total{role="decode", finish_reason="length"}': 23,
        'baton_worker_requests_total{role="decode", finish_reason="stop"}': 0,
        'baton_worker_transfer_bytes_total{transport="nixl", role="decode"}': 259522560,
        'baton_worker_kv_usage_ratio{role="decode"}': 0.0413,
        'baton_worker_info{role="decode", worker="decode-0", model="smollm2"}': 1,
    }
    results = evaluated(pair.interval_s, all_series(pair), {name: name for name in table}, BUSY_S)
    assert {name: [value for _, value in got] for name, got in results.items()} == {
        name: [pytest.approx(value)] for name, value in table.items()
    }
    (labels, _), *_ = results['baton_worker_requests_running{role="decode"}']
    assert {"namespace", "service", "role", "worker", "pod"} <= labels.keys() and labels["engine"] == "vllm"


def test_recorded_values_are_those_of_sglang_mock(sglang_pair: Recording) -> None:
    """Queues add up, priorities do not; milliseconds and megabytes become seconds and bytes."""
    table = {
        'baton_worker_requests_running{role="decode"}': 6,
        'baton_worker_requests_queued{role="prefill"}': 3,
        'baton_worker_requests_queued{role="decode"}': 1,
        'baton_worker_requests_fetching{role="decode"}': 2,
        'baton_worker_requests_held{role="prefill"}': 3,
        'baton_worker_prompt_tokens_total{role="prefill", source="cached"}': 7000,
        'baton_worker_prefix_cache_queries_total{role="prefill"}': 35000,
        'baton_worker_prefix_cache_hits_total{role="prefill"}': 7000,
        'baton_worker_requests_total{role="decode", finish_reason=""}': 70,
        'baton_worker_prefill_seconds_count{role="prefill"}': 70,
        'baton_worker_transfer_bytes_total{role="prefill"}': 280 * 2**20,
        'baton_worker_transfer_seconds_sum{role="prefill"}': 0.56,
        'baton_worker_transfer_seconds_bucket{role="prefill", le="0.01"}': 70,
        'baton_worker_transfer_seconds_bucket{role="prefill", le="0.005"}': 0,
        'baton_worker_transfer_seconds_bucket{role="prefill", le="+Inf"}': 70,
        metrics.WORKER_TRANSFER_FAILURES.name: [0, 7],
    }
    series = all_series(sglang_pair)
    results = evaluated(sglang_pair.interval_s, series, {name: name for name in table}, BUSY_S)
    assert {name: sorted(value for _, value in got) for name, got in results.items()} == {
        name: [pytest.approx(one) for one in (value if isinstance(value, list) else [value])]
        for name, value in table.items()
    }


def test_aliases_and_other_vllm_servers_are_not_recorded() -> None:
    """Baton's aliases have no engine label; servers that Baton did not start have no worker label."""
    series: Series = {
        'vllm:num_requests_running{model_name="m", worker="decode-0", role="decode"}': [1.0] * 4,
        'vllm:num_requests_running{model_name="m", engine="0", pod="stranger"}': [1.0] * 4,
    }
    name = metrics.WORKER_RUNNING.name
    assert evaluated(5, series, {name: name}, 10) == {name: []}


def test_ranks_of_one_worker_are_one_series() -> None:
    target = 'model_name="m", worker="decode-0", role="decode"'
    series: Series = {
        f'vllm:{metric}{{{target}, engine="{rank}"}}': [value] * 4
        for metric, values in (("num_requests_running", (2.0, 3.0)), ("kv_cache_usage_perc", (0.2, 0.7)))
        for rank, value in enumerate(values)
    }
    names = {one.name: one.name for one in (metrics.WORKER_RUNNING, metrics.WORKER_KV_USAGE)}
    results = evaluated(5, series, names, 10)
    assert [value for got in results.values() for _, value in got] == [5.0, 0.7]


class TestAutoscalerInputs:
    def test_busy_pair_gives_speed_and_backlog(self, pair: Recording) -> None:
        seen = inputs(pair, all_series(pair), BUSY_S)
        assert seen.read("prefill_workers").value == seen.read("decode_workers").value == 1
        assert seen.read("demand_prompt").above(100)
        # One prompt queued and one running at a mean of 400 computed tokens.
        assert seen.read("prefill_queued_tokens").value == pytest.approx(1.5 * 400, rel=0.2)
        # Never above the rate of the whole worker while it was busy.
        assert seen.read("prefill_speed").value == pytest.approx(150, rel=0.3)
        assert seen.read("decode_running").value == 3
        assert 0.1 < (seen.read("decode_token_mean").value or 0) < 0.2
        assert seen.read("decode_answer").value == pytest.approx(48, rel=0.5)

    def test_slots_are_unknown_unless_spec_names_them(self, pair: Recording) -> None:
        series = all_series(pair)
        without = inputs(pair, series, BUSY_S)
        assert (
            not without.read("decode_slots").has_value and not without.read("decode_fullest_slots").has_value
        )
        seen = inputs(pair, series, BUSY_S, slots=SLOTS)
        assert seen.read("decode_slots").value == SLOTS.count
        assert seen.read("decode_fullest_slots").value == 3 / SLOTS.count

    @pytest.mark.parametrize(
        ("running", "queued", "fullest", "slots"),
        [
            (0, 0, 0.0, None),
            (16, 0, 16 / 64, None),
            (60, 0, 0.8, None),
            (200, 0, 0.8, None),
            (200, 10, 0.8, None),
            (40, 20, 1.5, 40),
            (5, 1, 6 / 64, 5),
        ],
        ids=["idle", "a quarter", "many", "more than the default", "short queue", "queue", "one waits"],
    )
    def test_slots_without_an_argument_show_in_the_queue(
        self, pair: Recording, running: int, queued: int, fullest: float, slots: int | None
    ) -> None:
        seen = inputs(pair, with_load(pair, running, queued), BUSY_S, slots=DEFAULT)
        assert seen.read("decode_fullest_slots").value == pytest.approx(fullest)
        assert seen.read("decode_slots").value == slots

    def test_slots_of_a_full_worker_are_not_hidden_by_an_idle_one(self, pair: Recording) -> None:
        idle = {
            name.replace("decode-0", "decode-1"): [0.0 for _ in values]
            for name, values in with_load(pair, 0, 0).items()
            if name.startswith("vllm:num_requests")
        }
        for running, queued, fullest in ((200, 0, 0.8), (40, 20, 1.5)):
            series = {**with_load(pair, running, queued), **idle}
            assert inputs(pair, series, BUSY_S, slots=DEFAULT).read("decode_fullest_slots").value == fullest

    def test_idle_pair_has_zeros(self, pair: Recording) -> None:
        seen = inputs(pair, all_series(pair), AFTER_S, slots=SLOTS)
        zeros = (
            "prefill_queued_tokens",
            "prefill_queued",
            "decode_queued",
            "decode_running",
            "decode_fullest",
        )
        assert {name: seen.read(name).value for name in zeros} == dict.fromkeys(zeros, 0.0)

    def test_sglang_mock_gives_all_inputs_but_slots(self, sglang_pair: Recording) -> None:
        seen = inputs(sglang_pair, all_series(sglang_pair), BUSY_S)
        assert seen.read("prefill_speed").value == pytest.approx(4000 / 5, rel=0.3)
        # Three prompts wait, one runs, and each has 400 uncached tokens.
        assert seen.read("prefill_queued_tokens").value == pytest.approx(3.5 * 400)
        assert seen.read("decode_generated").value == pytest.approx(120, rel=0.3)
        assert seen.read("decode_running").value == 8 and seen.read("decode_queued").value == 1
        assert seen.read("decode_token_mean").value == pytest.approx(0.03)
        assert not seen.read("decode_slots").has_value

    def test_deletion_cost_counts_requests_by_pod(self, pair: Recording) -> None:
        query = MetricsQuery(NAMESPACE, SERVICE, 95).running
        results = evaluated(pair.interval_s, all_series(pair), {"pods": query}, BUSY_S)["pods"]
        assert {labels["pod"]: value for labels, value in results} == {"prefill-0": 2.0, "decode-0": 3.0}


class TestDecisions:
    def test_load_scales_decode_up(self, pair: Recording) -> None:
        """Three of three slots are in use, and the rate of such a worker is its capacity."""
        seen = inputs(pair, all_series(pair), BUSY_S, slots=DecodeSlots(3, exact=True))
        assert sample("decode", seen).utilisation.value == 1
        decision = decided("decode", sample("decode", seen))
        assert (decision.replicas, decision.reason) == (2, "Demand")

    def test_load_scales_prefill_up(self, pair: Recording) -> None:
        """The learned speed and the backlog make the need."""
        seen = inputs(pair, all_series(pair), BUSY_S)
        decision = decided("prefill", sample("prefill", seen))
        assert decision.replicas > 1 and decision.reason in ("Demand", "Saturated"), decision

    def test_queue_in_decode_grows_decode_and_not_prefill(self, pair: Recording) -> None:
        """No argument names the slots, and KV blocks are hardly used: only the queue says that it is full."""
        series = dict(with_load(pair, 64, 60))
        for name, value in ((metrics.ROUTER_QUEUE_DEPTH, 60.0), (metrics.ROUTER_QUEUED_TOKENS, 250_000.0)):
            (queue,) = (one for one in series if one.startswith(name.name))
            series[queue] = [value] * pair.samples
        seen = inputs(pair, series, BUSY_S, slots=DEFAULT)
        decode = sample("decode", seen)
        assert decode.utilisation.value == pytest.approx((64 + 60) / 64 + 60 / 64)
        assert decode.tightest == "BatchSlots"
        assert decided("decode", decode).replicas > 1
        calm = inputs(pair, all_series(pair), BUSY_S, slots=DEFAULT)
        assert sample("prefill", seen).backlog.value == sample("prefill", calm).backlog.value

    @pytest.mark.parametrize("engine", ["vllm", "sglang"])
    @pytest.mark.parametrize("slots", [SLOTS, DEFAULT], ids=["named", "by default"])
    @pytest.mark.parametrize("role", ["prefill", "decode"])
    def test_idle_pair_scales_down(self, engine: str, slots: DecodeSlots, role: RoleName) -> None:
        pair = Recording.read(f"{engine}_pair")
        seen = inputs(pair, all_series(pair), AFTER_S, slots=slots)
        decision = decided(role, replace(sample(role, seen, replicas=2), silent=0), capacity=150.0)
        assert (decision.replicas, decision.reason) == (1, "Spare"), decision

    @pytest.mark.parametrize(
        ("role", "missing"),
        [
            ("prefill", "vllm:num_requests_waiting"),
            ("prefill", "vllm:num_requests_running"),
            ("decode", "vllm:num_requests_waiting"),
            ("decode", "vllm:num_requests_running"),
            ("decode", "vllm:kv_cache_usage_perc"),
            ("decode", "vllm:"),
            ("prefill", "vllm:"),
        ],
    )
    def test_missing_metric_is_unknown_and_holds(self, pair: Recording, role: RoleName, missing: str) -> None:
        series = {**pair.scraped(missing), **router_series(pair)}
        seen = inputs(pair, series, AFTER_S, slots=SLOTS)
        decision = decided(role, replace(sample(role, seen, replicas=2), silent=0), capacity=150.0)
        assert decision.replicas == 2 and "unknown" in decision.message, decision

    def test_decode_without_known_slots_holds(self, pair: Recording) -> None:
        """vLLM does not report its batch slots: without them in the spec, decode never scales down."""
        seen = inputs(pair, all_series(pair), AFTER_S)
        decision = decided("decode", replace(sample("decode", seen, replicas=2), silent=0), capacity=150.0)
        assert decision.replicas == 2 and "utilization is unknown" in decision.message, decision
