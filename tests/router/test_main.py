"""Limits and counters of a router process."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton_api import metrics
from baton_api.metrics.counters import LabeledCounter, LabeledHistogram
from baton_router.settings import RouterSettings

PROGRAM = """
import resource
from baton_router.main import prepare
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
prepare()
soft, still = resource.getrlimit(resource.RLIMIT_NOFILE)
assert still == hard and (soft == hard or hard == resource.RLIM_INFINITY and soft > 64), (soft, hard)
"""


def test_router_raises_its_open_file_limit_to_the_maximum() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)


def test_requests_are_counted_by_their_labels() -> None:
    registry = CollectorRegistry()
    metric = metrics.ROUTER_REQUESTS
    counter = LabeledCounter(metric)
    registry.register(counter)
    others = ["other"] * (len(metric.labels) - 1)
    for status in (200, 200, 503):
        counter.add(status, *others)

    def counted(status: str) -> float | None:
        return registry.get_sample_value(
            metric.name, dict(zip(metric.labels, [status, *others], strict=True))
        )

    assert [counted(status) for status in ("200", "503", "404")] == [2, 1, None]


def test_labeled_histogram_counts_by_bucket() -> None:
    registry = CollectorRegistry()
    spread = LabeledHistogram(metrics.ROUTER_FIRST_BYTE)
    registry.register(spread)
    rng = random.Random(1)
    values = [*metrics.ROUTER_FIRST_BYTE.buckets, *(rng.uniform(0, 400) for _ in range(200)), 1e6]
    for value in values:
        spread.observe(value)
    name = metrics.ROUTER_FIRST_BYTE.name
    for bound in metrics.ROUTER_FIRST_BYTE.buckets:
        counted = registry.get_sample_value(f"{name}_bucket", {"le": str(float(bound))})
        assert counted == sum(value <= bound for value in values)
    assert registry.get_sample_value(f"{name}_bucket", {"le": "+Inf"}) == len(values)
    assert registry.get_sample_value(f"{name}_count") == len(values)


@pytest.mark.parametrize(
    ("given", "has_workers"),
    [
        ({"decode": ["http://a:1"]}, True),
        ({"worker": ["http://a:1"]}, True),
        ({"decode_dns": ["workers:8000"]}, True),
        ({"prefill": ["http://a:1"]}, False),
        ({}, False),
    ],
)
def test_router_without_workers_that_answer_is_refused(given: dict[str, Any], has_workers: bool) -> None:
    assert RouterSettings.model_validate(given).has_workers is has_workers
