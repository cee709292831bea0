"""A client of a Prometheus that tests started."""

from __future__ import annotations

import re
from typing import Any

import httpx

from baton_observing.dashboards.panels import Query

TIMEOUT_S = 60.0
VARIABLE = re.compile(r"\$(?!__)\w+")
"""A variable of a dashboard; `$__rate_interval` is none."""


class Prometheus:
    """One server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def has_data(self, query: Query, start: float, end: float) -> bool:
        """Whether a panel's query, with every variable set to All, gives a finite value between two times."""
        expression = VARIABLE.sub(".*", query.expression).replace("$__rate_interval", "1m")
        parameters = {"query": expression, "start": start, "end": end, "step": 1.0}
        series = self.get("query_range", parameters)["result"]
        values = (value for one in series for _, value in one["values"])
        return any(value not in ("NaN", "+Inf", "-Inf") for value in values)

    def get(self, path: str, parameters: dict[str, Any]) -> Any:
        """Return the data of a GET of `/api/v1/PATH`."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=TIMEOUT_S, trust_env=False)
        assert answer.is_success, (parameters, answer.text)
        return answer.json()["data"]
