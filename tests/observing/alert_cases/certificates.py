"""Certificates between routers and workers."""

from __future__ import annotations

from baton_api import metrics
from tests.observing.told_series import DECODE, OF, Case, Series, level

LIFE = 100_000.0
"""Seconds; a case is looked at when 1800 of them are over."""


def certificates(router: float, worker: float) -> Series:
    """They end at these times."""
    return {
        **level(metrics.ROUTER_CERTIFICATE_END, router, **OF),
        **level(metrics.ROUTER_CERTIFICATE_LIFE, LIFE, **OF),
        **level(metrics.WORKER_CERTIFICATE_END, worker, **DECODE),
        **level(metrics.WORKER_CERTIFICATE_LIFE, LIFE, **DECODE),
    }


CASES = (
    Case(
        "BatonCertificateEnding",
        "ticket",
        certificates(90_000, 12_000),  # one worker still has the old one
        certificates(90_000, 90_000),
    ),
    Case("BatonCertificateEnding", "page", certificates(4_000, 90_000), certificates(12_000, 90_000)),
)
