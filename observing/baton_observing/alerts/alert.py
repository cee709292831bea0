"""What an alert is: what has to be so for how long, whom that concerns, and what it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["page", "ticket"]
"""Somebody is called; or somebody looks at it in the next days."""

RUNBOOKS = "docs/runbooks"
"""
Folder of the pages in the repository, which has no public address: alerts have the annotation `runbook`.
With an absolute URL (the chart's `observing.runbooks`, `python -m baton_observing --runbooks`) they have
`runbook_url`, of which Alertmanager and Grafana make a link.
"""


ANNOTATION = "runbook"


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
    """Where an alert's page is."""
    return f"{RUNBOOKS}/{name}.md"


def linked(text: str, address: str) -> str:
    """
    A generated file, with the pages at an address.

    >>> linked("runbook: docs/runbooks/BatonErrors.md", "https://wiki.example/baton")
    'runbook_url: https://wiki.example/baton/BatonErrors.md'
    """
    if address == RUNBOOKS:
        return text
    return text.replace(f"{ANNOTATION}: {RUNBOOKS}", f"{ANNOTATION}_url: {address}").replace(
        RUNBOOKS, address
    )


WHICH = "{{ $labels.namespace }}/{{ $labels.service }}"
"""Of a service, in summaries."""
