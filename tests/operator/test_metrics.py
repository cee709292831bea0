"""The operator's metrics of services: their objectives, and the buckets that measure them."""

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


def exported(operator_metrics: OperatorMetrics) -> dict[str, tuple[dict[str, str], float]]:
    page = text_string_to_metric_families(operator_metrics.text().decode())
    samples = [one for family in page for one in family.samples if one.name in (FIRST, TOKEN, SHARE)]
    return {one.name: (one.labels, one.value) for one in samples}


@pytest.mark.parametrize(
    ("ttft", "first"),
    [("2s", "2.5"), ("2500ms", "2.5"), ("3s", "5.0"), ("1ms", "0.001"), ("1h", "300.0")],
)
def test_metrics_objective_has_the_bucket_that_holds_it(ttft: str, first: str) -> None:
    operator_metrics = OperatorMetrics(lambda: 0.0)
    operator_metrics.services.stands(
        "models", "chat", {}, Objectives(time_to_first_token=Duration(ttft), percentile=90)
    )
    values = exported(operator_metrics)
    of = {"namespace": "models", "service": "chat"}
    assert values[FIRST][0] == {**of, "bound": first}
    assert values[TOKEN] == ({**of, "bound": "0.05"}, 0.05)
    assert values[SHARE] == (of, 0.9)
    assert float(first) in metrics.ROUTER_FIRST_BYTE.buckets


def test_metrics_deleted_service_has_no_objective() -> None:
    operator_metrics = OperatorMetrics(lambda: 0.0)
    operator_metrics.services.stands("models", "chat", {}, Objectives())
    operator_metrics.services.stands("models", "chat", None)
    assert exported(operator_metrics) == {}
