"""What an alert is: what has to be so for how long, whom that concerns, and what it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["page", "ticket"]
"""Somebody is called; or somebody looks at it in the next days."""

RUNBOOKS = "docs/runbooks"
"""Where the pages are, in the project's repository; whoever reads them elsewhere has that address put in its
place, by a value of the chart or a flag of `python -m baton_observing`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One rule. Two of one name differ in severity, and have one page."""

    name: str
    severity: Severity
    summary: str
    """One sentence, with what is concerned in Prometheus' template language."""
    expression: str
    lasting: str = "5m"

    @property
    def runbook(self) -> str:
        return runbook(self.name)


def runbook(name: str) -> str:
    """The address of an alert's page."""
    return f"{RUNBOOKS}/{name}.md"


WHICH = "{{ $labels.namespace }}/{{ $labels.service }}"
"""Of a service, in summaries."""
