"""What the operator tells of services: their objectives, and the buckets by which those are judged."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton_api import metrics
from baton_operator.kinds.part import Duration
from baton_operator.kinds.service_policies import Objectives
from baton_operator.metrics import OperatorMetrics

FIRST, TOKEN, SHARE = (
    metrics.OPERATOR_OBJECTIVE_FIRST_TOKEN.name,
    metrics.OPERATOR_OBJECTIVE_TOKEN.name,
    metrics.OPERATOR_OBJECTIVE_SHARE.name,
)


def told(figures: OperatorMetrics) -> dict[str, tuple[dict[str, str], float]]:
    page = text_string_to_metric_families(figures.text().decode())
    samples = [one for family in page for one in family.samples if one.name in (FIRST, TOKEN, SHARE)]
    return {one.name: (one.labels, one.value) for one in samples}


@pytest.mark.parametrize(
    ("ttft", "first"),
    [("2s", "2.5"), ("2500ms", "2.5"), ("3s", "5.0"), ("1ms", "0.001"), ("1h", "300.0")],
)
def test_an_objective_is_told_with_the_bucket_that_holds_it(ttft: str, first: str) -> None:
    figures = OperatorMetrics(lambda: 0.0)
    figures.services.stands(
        "models", "chat", {}, Objectives(time_to_first_token=Duration(ttft), percentile=90)
    )
    found = told(figures)
    of = {"namespace": "models", "service": "chat"}
    assert found[FIRST][0] == {**of, "bound": first}
    assert found[TOKEN] == ({**of, "bound": "0.05"}, 0.05)
    assert found[SHARE] == (of, 0.9)
    assert float(first) in metrics.ROUTER_FIRST_BYTE.buckets


def test_a_service_that_is_gone_has_none() -> None:
    figures = OperatorMetrics(lambda: 0.0)
    figures.services.stands("models", "chat", {}, Objectives())
    figures.services.stands("models", "chat", None)
    assert told(figures) == {}
