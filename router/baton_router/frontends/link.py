"""
The protocol between frontend processes and the scheduler over a Unix socket.

`baton_http.link` has the frames. A frontend numbers its requests, and releases each number
once, whether or not it received a grant, so that neither side keeps what the other has forgotten.
"""

from __future__ import annotations

import msgspec

from baton_api.errors import BatonError
from baton_api.prompt_report import PromptReport
from baton_http.link import RemoteError
from baton_router.metrics.registry import MetricFamily
from baton_router.requests.picker import Grant, PickRequest, RequestEnd, WorkerLoss


class LinkMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of the messages below."""


class PickMessage(LinkMessage, frozen=True):
    number: int
    request: PickRequest


class AnswerBegan(LinkMessage, frozen=True):
    number: int
    report: PromptReport | None


class WorkerFailed(LinkMessage, frozen=True):
    number: int
    loss: WorkerLoss


class WorkerFull(LinkMessage, frozen=True):
    number: int


class RequestReleased(LinkMessage, frozen=True):
    """Releases a request, also one that is still queued, because its client left or the frontend gave up."""

    number: int
    end: RequestEnd


class FrontendMetrics(LinkMessage, frozen=True):
    """The metrics of a frontend process, once a second: families of Prometheus samples."""

    families: list[MetricFamily]


class PickQueued(LinkMessage, frozen=True):
    """The request waits with the scheduler for a worker."""

    number: int


class PickGranted(LinkMessage, frozen=True):
    grant: Grant
    """Its number is the one that the frontend assigned."""


class PickRejected(LinkMessage, frozen=True):
    number: int
    error: RemoteError


class WorkerRegistry(LinkMessage, frozen=True):
    """All workers, as a frontend process needs them to continue without the scheduler."""

    workers: tuple[RegisteredWorker, ...]


FrontendMessage = PickMessage | AnswerBegan | WorkerFailed | WorkerFull | RequestReleased | FrontendMetrics
SchedulerMessage = PickQueued | PickGranted | PickRejected | WorkerRegistry


def rejection_of(number: int, error: BatonError) -> PickRejected:
    return PickRejected(number, RemoteError.of(error))


class RegisteredWorker(msgspec.Struct, frozen=True, array_like=True):
    """One worker."""

    name: str
    ready: bool
    down_since: float
    """Loop time since which it is down; 0 if it is not."""
    expired: bool = False
    """Whether its drain time is over."""
    secure: bool = False
    """Whether TLS is used."""
