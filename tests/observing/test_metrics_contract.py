"""Real processes expose exactly the metrics of the contract."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton_api import metrics
from baton_api.metrics import CONTRACT, Metric
from tests.observing.telemetry import SECRET, Telemetry
from tests.operator.real_cluster import real_cluster, running_operator

OF_LIBRARIES = ("python_", "process_")
"""Prefixes of metrics that prometheus-client adds."""

PEERS = ("vllm:", "sglang:")

SUFFIXES = {"seconds": "_seconds", "bytes": "_bytes", "ratio": "_ratio"}
COUNTED_BY_PROCESS = {"process"}


def of(*begins: str) -> dict[str, Metric]:
    """Return metrics by the family name that the parser uses."""
    return {one.name.removesuffix("_total"): one for one in CONTRACT if one.name.startswith(begins)}


def ours(families: dict[str, Any]) -> dict[str, Any]:
    left = (*OF_LIBRARIES, *PEERS)
    return {
        name: family
        for name, family in families.items()
        if not name.startswith(left) and not name.endswith("_created")
    }


def agree(families: dict[str, Any], contract: dict[str, Metric]) -> None:
    """Assert that type, labels and label values are those of the contract."""
    assert families.keys() <= contract.keys()
    for name, family in families.items():
        metric = contract[name]
        assert (family.type, family.documentation) == (metric.kind, metric.help), name
        values = {label.name: label.values for label in metric.by}
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            labels = {key: value for key, value in sample.labels.items() if key != "le"}
            assert labels.keys() - COUNTED_BY_PROCESS == set(metric.labels), sample
            for key, value in labels.items():
                assert not values.get(key) or value in values[key], sample
            if metric.unit == "ratio" and metric.kind == "gauge" and sample.value == sample.value:
                assert sample.value >= 0, sample
            if metric.unit == "yes or no":
                assert sample.value in (0, 1), sample
        if metric.kind == "histogram" and family.samples:
            bounds = {float(one.labels["le"]) for one in family.samples if "le" in one.labels}
            assert bounds == {*metric.buckets, float("inf")}, name


@pytest.mark.parametrize("metric", CONTRACT, ids=lambda metric: metric.name)
def test_metric_follows_naming_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"baton(_[a-z0-9]+)+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    stem = metric.name.removesuffix("_total")
    for unit, suffix in SUFFIXES.items():
        assert stem.endswith(suffix) == (metric.unit == unit), "a name ends in its base unit"
    assert metric.help.endswith(".") and not metric.help[0].islower()
    assert len(set(metric.labels)) == len(metric.labels) and "le" not in metric.labels
    for label in metric.by:
        assert bool(label.values) != bool(label.bound), f"what bounds {label.name} is said once"


def test_metric_names_are_unique_and_buckets_wide() -> None:
    assert not [name for name, count in Counter(one.name for one in CONTRACT).items() if count > 1]
    for first in (metrics.WORKER_FIRST_TOKEN, metrics.ROUTER_FIRST_BYTE):
        assert first.buckets[0] <= 0.001 and first.buckets[-1] >= 300
    for token in (metrics.WORKER_TOKEN, metrics.ROUTER_OUTPUT_TOKEN, metrics.WORKER_STEP):
        assert token.buckets[0] <= 0.0001


@pytest.mark.slow
@pytest.mark.parametrize("process", ["prefill", "decode"])
def test_worker_exposes_exactly_its_metrics(telemetry: Telemetry, process: str) -> None:
    contract = of("baton_worker_", "baton_build_")
    families = ours(telemetry.families(process))
    agree(families, contract)
    assert families.keys() == contract.keys()


@pytest.mark.slow
def test_router_exposes_exactly_its_metrics(telemetry: Telemetry) -> None:
    contract = of("baton_router_", "baton_batch", "baton_build_")
    several, one = ours(telemetry.families("router")), ours(telemetry.families("alone"))
    agree(several, contract)
    agree(one, contract)
    assert several.keys() | one.keys() == contract.keys()
    frontend_metrics = {
        metrics.ROUTER_REGISTERED_WORKERS.name,
        metrics.ROUTER_SCHEDULER_UNAVAILABLE.name.removesuffix("_total"),
    }
    assert several.keys() - one.keys() <= frontend_metrics, (
        "but for what only fronts have, one process shows it all"
    )


@pytest.mark.slow
def test_metrics_count_the_requests_of_the_test(telemetry: Telemetry) -> None:
    def total(process: str, metric: Metric, **labels: str) -> float:
        family = telemetry.families(process)[metric.name.removesuffix("_total")]
        name = metric.name + ("_count" if metric.kind == "histogram" else "")
        samples = [one for one in family.samples if one.name == name]
        return float(sum(one.value for one in samples if labels.items() <= one.labels.items()))

    assert total("decode", metrics.WORKER_TRANSFER_SECONDS) >= 2
    assert total("prefill", metrics.WORKER_PREFILL_TIME) >= 2
    assert total("decode", metrics.WORKER_DECODE_TIME) >= 3
    assert total("decode", metrics.WORKER_CACHE_QUERIES) > total("decode", metrics.WORKER_CACHE_HITS) >= 0
    assert total("router", metrics.BATCH_LINES, result="completed") == 1
    assert total("router", metrics.BATCHES, status="completed") == 1
    assert total("router", metrics.ROUTER_REQUEST_TIME, **{"class": "batch"}) == 1
    assert total("decode", metrics.WORKER_INFO, role="decode", model="tiny", worker="decode-0") == 1
    for page in telemetry.pages.values():
        assert SECRET not in page


@pytest.mark.slow
async def test_operator_exposes_exactly_its_metrics(tmp_path: Path) -> None:
    contract = of("baton_operator_", "baton_autoscaler_", "baton_build_")
    async with real_cluster(tmp_path) as cluster, running_operator(cluster, "shown") as operator:
        await cluster.until(lambda: leads(operator))
        page = (await operator.get("/metrics")).text
    families = ours({family.name: family for family in text_string_to_metric_families(page)})
    agree(families, contract)
    assert families.keys() == contract.keys()


async def leads(operator: Any) -> bool:
    return bool(await operator.figure(metrics.OPERATOR_LEADER.name) == 1)


def test_contract_metrics_belong_to_a_process() -> None:
    begins = ("baton_worker_", "baton_router_", "baton_batch", "baton_operator_", "baton_autoscaler_")
    assert of(*begins, "baton_build_").keys() == of("baton_").keys()
