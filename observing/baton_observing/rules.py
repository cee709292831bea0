"""
Recording rules and alerts as Prometheus reads them: one file of what serves, one of what operates.

Whoever runs no operator leaves the second one out; there, that nobody leads would be an alert.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from baton_observing.alerts import OPERATING, SERVING
from baton_observing.alerts.alert import ANNOTATION, Alert
from baton_observing.recording import RECORDS

LINE = 110
HEAD = "# Written from baton_observing by `make fix`. Do not edit.\n"

RECORD_S = 30
"""From one look to the next, of what alerts are made of."""


def files() -> dict[str, str]:
    """File names, and their text."""
    recording = {
        "name": "baton-shares",
        "interval": f"{RECORD_S}s",
        "rules": [{"record": record.name, "expr": record.expression} for record in RECORDS],
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
                "for": alert.lasting,
                "labels": {"severity": alert.severity},
                "annotations": {"summary": alert.summary, ANNOTATION: alert.runbook},
            }
            for alert in alerts
        ],
    }


def _text(groups: list[dict[str, Any]]) -> str:
    return HEAD + yaml.safe_dump({"groups": groups}, sort_keys=False, width=LINE)
