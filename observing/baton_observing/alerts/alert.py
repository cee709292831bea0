"""The fields of an alert, and the location of its runbook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["page", "ticket", "info"]
"""`page`: act now. `ticket`: act within days. `info`: context for other alerts, without a receiver."""

RUNBOOKS = "docs/runbooks"
"""
Folder of the runbooks in the repository, which has no public address: alerts carry the annotation `runbook`.
With an absolute URL (the chart's `observing.runbooks`, `python -m baton_observing --runbooks`) they carry
`runbook_url`, which Alertmanager and Grafana show as a link.
"""

RUNBOOK_ANNOTATION = "runbook"

SERVICE = "{{ $labels.namespace }}/{{ $labels.service }}"
"""The service, in the template language of summaries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alerting rule. Rules that share a name differ in severity and share a runbook."""

    name: str
    severity: Severity
    summary: str
    """One sentence that names the affected object, in Prometheus' template language."""
    expression: str
    duration: str = "5m"
    """The expression must hold this long (`for`)."""

    @property
    def runbook(self) -> str:
        return runbook(self.name)


def runbook(name: str) -> str:
    """Return the path of an alert's runbook."""
    return f"{RUNBOOKS}/{name}.md"


def with_runbook_url(text: str, url: str) -> str:
    """
    Point a generated file's runbooks at a URL.

    >>> with_runbook_url("runbook: docs/runbooks/BatonOverloaded.md", "https://wiki.example/baton")
    'runbook_url: https://wiki.example/baton/BatonOverloaded.md'
    """
    if url == RUNBOOKS:
        return text
    annotation = f"{RUNBOOK_ANNOTATION}: {RUNBOOKS}"
    return text.replace(annotation, f"{RUNBOOK_ANNOTATION}_url: {url}").replace(RUNBOOKS, url)
