"""What `--log-requests` tells of a request when it has ended: names and figures, never text."""

from __future__ import annotations

from typing import Protocol

from baton_router.proxy.attempt import Attempt
from baton_router.proxy.routed_request import Asked


class Ended(Protocol):
    """What is known of it; times are in seconds of one clock, 0 if there was none."""

    id: bytes
    asked: Asked | None
    attempt: Attempt | None
    status: int
    resumes: int
    arrived: float
    granted: float
    opened: float


def request_line(path: str, ended: Ended, now: float) -> str:
    parts = [f"{path} {ended.status}", f"request={ended.id.decode()}"]
    asked, attempt = ended.asked, ended.attempt
    if asked is not None:
        parts += [f"tenant={asked.tenant.name}" if asked.tenant.name else "", f"class={asked.urgency[0]}"]
    if attempt is not None:
        grant, report = attempt.grant, attempt.report
        parts += [f"decode={grant.decode}", f"prefill={grant.prefill}" if grant.prefill else ""]
        if report is not None:
            parts += [f"prompt={report.tokens}", f"cached={report.cached}"]
        parts += [f"completion={attempt.tokens}", f"resumes={ended.resumes}" if ended.resumes else ""]
    if ended.granted:
        parts.append(f"queue={ended.granted - ended.arrived:.3f}s")
    if ended.opened:
        parts.append(f"ttft={ended.opened - ended.arrived:.3f}s")
    if ended.arrived:
        parts.append(f"total={now - ended.arrived:.3f}s")
    return " ".join(filter(None, parts))
