"""
Of each alert, series under which it fires and series, hardly different, under which it stays silent.

A module here is one of `baton_observing.alerts`.
"""

from __future__ import annotations

from tests.observing.alert_cases import (
    batches,
    certificates,
    objectives,
    operator,
    router,
    scaling,
    services,
    workers,
)

CASES = (
    *objectives.CASES,
    *router.CASES,
    *workers.CASES,
    *certificates.CASES,
    *batches.CASES,
    *services.CASES,
    *scaling.CASES,
    *operator.CASES,
)
