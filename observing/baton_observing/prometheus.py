"""Prometheus, asked what a panel shows over a time: its HTTP API, as far as that needs it."""

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
from baton_observing.panels import Query

ANSWER_S = 60.0
VARIABLE = re.compile(r"\$(?!__)\w+")


@dataclass(frozen=True, slots=True)
class Span:
    """A time that is looked at."""

    start: float
    """As Unix counts it, in seconds."""
    end: float
    step: float
    window: str = "1m"
    """Of rates."""


@dataclass(frozen=True, slots=True)
class Line:
    """One series."""

    labels: Mapping[str, str]
    times: tuple[float, ...]
    values: tuple[float, ...]
    """Numbers only."""

    def called(self, legend: str) -> str:
        """
        >>> Line({"role": "decode"}, (), ()).called("{{role}} workers")
        'decode workers'
        """
        if not legend:
            return ", ".join(self.labels.values())
        return re.sub(r"{{(\w+)}}", lambda name: self.labels.get(name.group(1), ""), legend)


class Prometheus:
    """One server."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def shown(self, query: Query, span: Span) -> list[Line]:
        """What a panel's query shows if everything is chosen. Raises SetupError if the server refuses it."""
        expression = VARIABLE.sub(".*", query.expression).replace("$__rate_interval", span.window)
        asked = {"query": expression, "start": span.start, "end": span.end, "step": span.step}
        result = self.get("query_range", asked)["result"]
        found = []
        for one in result:
            points = [(time, float(value)) for time, value in one["values"]]
            points = [(time, value) for time, value in points if math.isfinite(value)]
            if points:
                times, values = zip(*points, strict=True)
                found.append(Line(one["metric"], times, values))
        return found

    def get(self, path: str, asked: Mapping[str, object]) -> Any:
        """The data of an answer of `/api/v1`."""
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(asked)}"
        try:
            with self._opener.open(address, timeout=ANSWER_S) as answer:
                said = json.load(answer)
        except OSError as error:
            raise SetupError(f"Prometheus at {self.url} does not answer {asked}: {error}") from error
        return said["data"]
