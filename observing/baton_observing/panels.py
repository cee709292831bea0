"""
What a dashboard is made of: panels that say what they mean and what to do, in rows.

Plain values, from which the JSON that Grafana reads, the pictures in docs/, and the tests are made alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from baton_observing.promql import Scope

Kind = Literal["lines", "stacked", "number", "states"]
"""Lines over time, areas on top of one another, one number now, or a timeline of states for each series."""

CLUSTER = 'cluster=~"$cluster"'
"""One cluster's Prometheus has no such label, which `.*` matches as well."""

HERE = Scope("$__rate_interval", (CLUSTER, 'namespace=~"$namespace"', 'service=~"$service"'))
"""Series of the services that are chosen at a dashboard's top."""

EVERYWHERE = Scope("$__rate_interval", (CLUSTER,))
"""Series of what belongs to no service."""


@dataclass(frozen=True, slots=True)
class Query:
    """One expression, and what each of its series is called."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class State:
    """What a value means in a timeline of states."""

    value: int
    text: str
    color: str
    """As Grafana calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture."""

    title: str
    meaning: str
    """What it shows, what is well, and what to do otherwise."""
    unit: str
    """As Grafana calls it."""
    queries: tuple[Query, ...]
    kind: Kind = "lines"
    states: tuple[State, ...] = ()
    """Of all values, if it is a timeline of states."""
    width: int = 8
    """Of 24 columns."""
    limit: float | None = None
    """From where on it is not well."""
    runbook: str = ""
    """The alert whose page tells more."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels that answer one question, which is its title."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of a dashboard: the values of a label."""

    name: str
    label: str
    query: str


@dataclass(frozen=True, slots=True)
class Annotation:
    """Times that are marked in all panels of a dashboard: those at which an expression has series."""

    name: str
    text: str
    """Of each series, by its labels."""
    expression: str


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard."""

    name: str
    """Of its file, and of its address in Grafana."""
    title: str
    about: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]
    annotations: tuple[Annotation, ...] = ()

    @property
    def panels(self) -> Iterator[Panel]:
        return (panel for row in self.rows for panel in row.panels)
