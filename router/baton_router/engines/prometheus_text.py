"""Single samples out of a text of metrics, in Prometheus' exposition format."""

from __future__ import annotations

import re
from functools import lru_cache


@lru_cache(64)
def _lines(name: str) -> re.Pattern[str]:
    return re.compile(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", re.MULTILINE)


def total(text: str, name: str) -> float | None:
    """
    The sum of all samples of `name`; None without one.

    >>> total('vllm:num_requests_running{engine="0"} 2.0', "vllm:num_requests_running")
    2.0
    """
    values = [float(value) for _, value in _lines(name).findall(text)]
    return sum(values) if values else None


def mean(text: str, name: str) -> float | None:
    """
    The mean of all samples of `name`, such as a ratio of each data-parallel rank; None without one.

    >>> mean('usage{engine="0"} 0.25\\nusage{engine="1"} 0.75', "usage")
    0.5
    """
    values = [float(value) for _, value in _lines(name).findall(text)]
    return sum(values) / len(values) if values else None


def label_values(text: str, name: str) -> dict[str, str]:
    """The labels of the first sample of `name`; empty without one."""
    sample = _lines(name).search(text)
    return dict(_LABEL.findall(sample[1] or "")) if sample else {}


_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
