"""Recorded metrics of other engines, and what rules and queries make of them according to promtool."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton_api import metrics
from baton_observing import rules

FIXTURES = Path(__file__).parent / "engine_metrics"
NAMESPACE, SERVICE = "models", "chat"
OF = f'namespace="{NAMESPACE}", service="{SERVICE}"'

Series = Mapping[str, Sequence[float | None]]
"""Values at each scrape by series; None: absent."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The metrics of workers at equal intervals."""

    interval_s: int
    workers: Mapping[str, Series]
    """By role, as the worker exposed them."""

    @classmethod
    def read(cls, name: str) -> Recording:
        document = json.loads((FIXTURES / f"{name}.json").read_text())
        workers = {
            role: {series: expanded(values) for series, values in of_role.items()}
            for role, of_role in document["workers"].items()
        }
        return cls(document["interval_s"], workers)

    def text(self, role: str, at_s: float) -> str:
        """Return the metrics of a worker in the text format."""
        index = round(at_s / self.interval_s)
        lines = (
            f"{series} {values[index]}"
            for series, values in self.workers[role].items()
            if values[index] is not None
        )
        return "\n".join(lines) + "\n"

    def scraped(self, *without: str) -> Series:
        """Return the series with the labels of their targets, except those of metrics in `without`."""
        series: dict[str, Sequence[float | None]] = {}
        for role, exposed in self.workers.items():
            target = target_labels(role)
            for name, values in exposed.items():
                if not name.startswith(without or ("-",)):
                    series[name.replace("}", f", {target}}}")] = values
        return series | {f"up{{{target_labels(role)}}}": [1.0] * self.samples for role in self.workers}

    @property
    def samples(self) -> int:
        return max(len(values) for series in self.workers.values() for values in series.values())


def expanded(text: str) -> list[float | None]:
    """
    Return values from promtool's notation: `2x3` is 2 and three more of it, `_` is absent.

    >>> expanded("0x1 5 _")
    [0.0, 0.0, 5.0, None]
    """
    values: list[float | None] = []
    for part in text.split():
        value, _, more = part.partition("x")
        values += [None if value == "_" else float(value)] * (int(more or 0) + 1)
    return values


def target_labels(role: str) -> str:
    worker = "" if role == "router" else f', worker="{role}-0"'
    return f'{OF}, role="{role}", pod="{role}-0", job="models/serving", instance="{role}-0:8000"{worker}'


@functools.cache
def engine_rules() -> str:
    return rules.files()["engines.yaml"]


def evaluated(
    interval_s: int, series: Series, queries: Mapping[str, str], at_s: int
) -> dict[str, list[tuple[Mapping[str, str], float]]]:
    """Return the samples of each query, with the rules of engines, at a time."""
    test: dict[str, Any] = {
        "interval": f"{interval_s}s",
        "input_series": [
            {"series": name, "values": " ".join("_" if one is None else str(one) for one in values)}
            for name, values in series.items()
        ],
        # No sample has this value, so promtool prints those that it got.
        "promql_expr_test": [
            {
                "expr": query,
                "eval_time": f"{at_s}s",
                "exp_samples": [{"labels": '{expected="none"}', "value": -1}],
            }
            for query in queries.values()
        ],
    }
    text = {"rule_files": ["engines.yaml"], "evaluation_interval": f"{interval_s}s", "tests": [test]}
    output = promtool_output(interval_s, json.dumps(text))
    got = re.findall(r"^ +got: ?(.*)$", output, re.MULTILINE)
    assert len(got) == len(queries), output
    return {name: samples(text) for name, text in zip(queries, got, strict=True)}


@functools.cache
def promtool_output(interval_s: int, test: str) -> str:
    """Return what promtool prints. It takes half a second, and tests with the same input share it."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (on Debian: apt install prometheus)")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        every = f"interval: {interval_s}s"
        (folder / "engines.yaml").write_text(re.sub(r"interval: \d+s", every, engine_rules()))
        (folder / "test.yaml").write_text(test)
        command = ["promtool", "test", "rules", "test.yaml"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def samples(text: str) -> list[tuple[Mapping[str, str], float]]:
    """Parse the samples that promtool prints: labels and values."""
    return [
        (dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value))
        for labels, value in re.findall(r"(\{[^}]*\}) ([-+\w.]+)", text)
    ]


def router_series(recording: Recording) -> Series:
    """Return the metrics of a router whose clients requested what the workers computed."""
    count = recording.samples
    target = target_labels("router")
    of_both = {role: recording.workers[role] for role in ("prefill", "decode")}

    def total(role: str, *parts: str) -> list[float]:
        """Return the sum of the first metric that exists."""
        for part in parts:
            if series := [values for name, values in of_both[role].items() if part in name]:
                return [sum(one or 0.0 for one in at) for at in zip(*series, strict=True)]
        raise ValueError(f"the recording has none of {parts}")

    def series(metric: metrics.Metric, labels: str = "", part: str = "") -> str:
        return f"{metric.name}{part}{{{target}{labels}}}"

    zero = [0.0] * count
    demand = {
        "prompt": total("prefill", 'source="local_compute"', 'mode="prefill_compute"'),
        "answer": total("decode", "vllm:generation_tokens_total", 'mode="decode"'),
        "local": zero,
    }
    first = total("decode", ":time_to_first_token_seconds_count")
    return {
        f"up{{{target}}}": [1.0] * count,
        **{series(metrics.ROUTER_DEMAND, f', kind="{kind}"'): one for kind, one in demand.items()},
        **{
            series(one): zero
            for one in (metrics.ROUTER_QUEUED_TOKENS, metrics.ROUTER_QUEUE_DEPTH, metrics.ROUTER_HELD)
        },
        series(metrics.ROUTER_IN_FLIGHT): total(
            "decode", "vllm:num_requests_running", "sglang:num_running_reqs"
        ),
        **{
            series(metrics.ROUTER_FIRST_BYTE, f', le="{bound}"', "_bucket"): first
            for bound in ("1.0", "+Inf")
        },
    }
