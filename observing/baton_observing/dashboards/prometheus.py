"""A client of Prometheus' HTTP API, as far as rendering a dashboard needs it."""

from __future__ import annotations

import json
import math
import re
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton_api.errors import SetupError
from baton_observing.dashboards.panels import Query

TIMEOUT_S = 60.0
VARIABLE = re.compile(r"\$(?!__)\w+")


@dataclass(frozen=True, slots=True)
class TimeRange:
    """The time range of a query, as Unix times, and its step in seconds."""

    start: float
    end: float
    step: float
    window: str = "1m"
    """Of rates."""


@dataclass(frozen=True, slots=True)
class Series:
    """One series: labels, Unix times and finite values."""

    labels: Mapping[str, str]
    times: tuple[float, ...]
    values: tuple[float, ...]

    def legend(self, template: str) -> str:
        """
        Fill in a legend, or list the labels if it is empty.

        >>> Series({"role": "decode"}, (), ()).legend("{{role}} workers")
        'decode workers'
        """
        if not template:
            return ", ".join(self.labels.values())
        return re.sub(r"{{(\w+)}}", lambda name: self.labels.get(name.group(1), ""), template)


class Prometheus:
    """One Prometheus server."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def query_range(self, query: Query, time_range: TimeRange) -> list[Series]:
        """Return a panel's series with every variable set to All. Raises SetupError if the query fails."""
        expression = VARIABLE.sub(".*", query.expression).replace("$__rate_interval", time_range.window)
        parameters = {
            "query": expression,
            "start": time_range.start,
            "end": time_range.end,
            "step": time_range.step,
        }
        series = []
        for one in self.get("query_range", parameters)["result"]:
            points = [(time, float(value)) for time, value in one["values"]]
            points = [(time, value) for time, value in points if math.isfinite(value)]
            if points:
                times, values = zip(*points, strict=True)
                series.append(Series(one["metric"], times, values))
        return series

    def get(self, path: str, parameters: Mapping[str, object]) -> Any:
        """Return the data of a GET of `/api/v1/PATH`."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with self._opener.open(url, timeout=TIMEOUT_S) as response:
                reply = json.load(response)
        except OSError as error:
            raise SetupError(f"Prometheus at {self.url} failed to answer {parameters}: {error}") from error
        return reply["data"]
