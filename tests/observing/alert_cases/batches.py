"""Batches that do not go on, or go wrong."""

from __future__ import annotations

from baton_api import metrics
from tests.observing.told_series import OF, Case, level, once, rise

CASES = (
    Case(
        "BatonBatchesStuck",
        "ticket",
        level(metrics.BATCH_LINES_LEFT, 100, **OF),
        {
            **level(metrics.BATCH_LINES_LEFT, 100, **OF),
            **rise(metrics.BATCH_LINES, 1, **OF, result="completed"),
        },
        at=45,
    ),
    Case(
        "BatonBatchesLate",
        "ticket",
        level(metrics.BATCHES_LATE, 1, **OF),
        level(metrics.BATCHES_LATE, 0, **OF),
    ),
    Case(
        "BatonBatchLinesFailing",
        "ticket",
        {
            **rise(metrics.BATCH_LINES, 5, **OF, result="completed"),
            **rise(metrics.BATCH_LINES, 5, **OF, result="failed"),
        },
        {
            **rise(metrics.BATCH_LINES, 50, **OF, result="completed"),
            **rise(metrics.BATCH_LINES, 5, **OF, result="failed"),
        },
        at=45,
    ),
    Case(
        "BatonBatchStorageFailing",
        "ticket",
        rise(metrics.BATCH_STORAGE_ERRORS, 1, **OF, error="unavailable"),
        once(metrics.BATCH_STORAGE_ERRORS, 1, 10, **OF, error="unavailable"),
    ),
)
