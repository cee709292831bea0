"""What every process says of itself."""

from __future__ import annotations

from baton_api.metrics.metric import Label, Metric

BUILD_INFO = Metric(
    "baton_build_info",
    "gauge",
    "yes or no",
    "Always 1: which component this is, and of which version.",
    (Label("component", ("worker", "router", "operator")), Label("version", bound="Baton's own, one")),
)
