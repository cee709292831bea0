"""
The priority classes of requests. A class is one row of `CLASSES`, which the router and the metrics read.

A client names the class in the header `headers.CLASS`. The router's queue is strict: a class is offered what
the classes before it cannot use.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton_api.headers import BATCH_CLASS


@dataclass(frozen=True, slots=True)
class RequestClass:
    """What the requests of a class may expect."""

    name: str
    """In headers, files of tenants, and metrics."""
    open: bool = True
    """Whether a tenant may use it whose entry lists no classes."""
    waits_seconds: bool = False
    """Whether a request starves after some seconds, whatever its maximum wait: a person waits for it."""
    rejects_late: bool = False
    """Whether it has a target time to first token without a header, and a request that would miss its target
    is rejected at once."""
    background: bool = False
    """Whether no client waits for it. It goes only while no other class waits, for as long as its client
    likes, and leaves KV blocks free."""


CLASSES: dict[str, RequestClass] = {
    one.name: one
    for one in (
        RequestClass("critical", open=False, waits_seconds=True),
        RequestClass("interactive", waits_seconds=True, rejects_late=True),
        RequestClass("default"),
        RequestClass(BATCH_CLASS, background=True),
    )
}
"""By name, the most urgent first; those of the background last."""

DEFAULT_CLASS = "default"
"""The class of requests that name none."""
