"""
The rule files of Prometheus: `serving.yaml` for routers and workers, `operating.yaml` for the operator.

`engines.yaml` maps the metrics of other engines to the contract. Load `operating.yaml` only where an operator
runs: without one, its alert about a missing leader fires.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from baton_observing import engines
from baton_observing.alerts import OPERATING, SERVING
from baton_observing.alerts.alert import RUNBOOK_ANNOTATION, Alert
from baton_observing.objectives import RECORDING_RULES, RecordingRule

LINE_WIDTH = 110
HEADER = "# Generated from baton_observing by `make fix`. Do not edit.\n"

EVALUATION_INTERVAL = "30s"
"""Of the recording rules."""

ENGINE_INTERVAL = "15s"
"""Of the rules of engines: the scrape interval, so that rates lose no samples."""


def files() -> dict[str, str]:
    """Return the rule files: name and text."""
    recording = _recording("baton-recording", EVALUATION_INTERVAL, RECORDING_RULES)
    return {
        "engines.yaml": _text(
            [
                _recording(f"baton-{name}", ENGINE_INTERVAL, records)
                for name, records in engines.rules().items()
            ]
        ),
        "serving.yaml": _text([recording, _group("baton-serving", SERVING)]),
        "operating.yaml": _text([_group("baton-operating", OPERATING)]),
    }


def _recording(name: str, interval: str, records: Iterable[RecordingRule]) -> dict[str, Any]:
    rules = [
        {"record": rule.name, "expr": rule.expression}
        | ({"labels": dict(rule.labels)} if rule.labels else {})
        for rule in records
    ]
    return {"name": name, "interval": interval, "rules": rules}


def _group(name: str, alerts: Iterable[Alert]) -> dict[str, Any]:
    return {
        "name": name,
        "rules": [
            {
                "alert": alert.name,
                "expr": alert.expression,
                "for": alert.duration,
                "labels": {"severity": alert.severity},
                "annotations": {"summary": alert.summary, RUNBOOK_ANNOTATION: alert.runbook},
            }
            for alert in alerts
        ],
    }


def _text(groups: list[dict[str, Any]]) -> str:
    return HEADER + yaml.safe_dump({"groups": groups}, sort_keys=False, width=LINE_WIDTH)
