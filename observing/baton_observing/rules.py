"""
The rule files of Prometheus: `serving.yaml` for routers and workers, `operating.yaml` for the operator.

Load `operating.yaml` only where an operator runs: without one, its alert about a missing leader fires.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from baton_observing.alerts import OPERATING, SERVING
from baton_observing.alerts.alert import RUNBOOK_ANNOTATION, Alert
from baton_observing.objectives import RECORDING_RULES

LINE_WIDTH = 110
HEADER = "# Generated from baton_observing by `make fix`. Do not edit.\n"

EVALUATION_INTERVAL = "30s"
"""Of the recording rules."""


def files() -> dict[str, str]:
    """Return the rule files: name and text."""
    recording = {
        "name": "baton-recording",
        "interval": EVALUATION_INTERVAL,
        "rules": [{"record": rule.name, "expr": rule.expression} for rule in RECORDING_RULES],
    }
    return {
        "serving.yaml": _text([recording, _group("baton-serving", SERVING)]),
        "operating.yaml": _text([_group("baton-operating", OPERATING)]),
    }


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
