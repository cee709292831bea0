"""
The headers of a worker's response as the client gets them; bodies pass untouched.

The head of a request for a worker is made by `baton_router.engines.worker_head`.
"""

from __future__ import annotations

from baton_api import headers
from baton_api.prompt_report import PromptReport
from baton_http.replies import REQUEST_ID
from baton_http.request_heads import CONNECTION_HEADERS
from baton_http.upstream import Headers
from baton_router.engines.worker_head import forwarded
from baton_router.requests.picker import Grant

WORKER = headers.WORKER.encode()
DECISION = headers.DECISION.encode()
CACHED = headers.CACHED.encode()
TIMING = headers.TIMING.encode()

_RESPONSE_ONLY = CONNECTION_HEADERS | {b"server", b"date", REQUEST_ID}


def response_headers(
    given: Headers,
    request_id: bytes,
    grant: Grant | None,
    report: PromptReport | None = None,
    queued_s: float = 0.0,
) -> Headers:
    """
    The headers of a worker's answer as the client gets them, after a wait of `queued_s` in the router.

    With `grant` they name workers and number the decision: for clients that run the service.
    """
    fields: Headers = []
    if report is not None:
        times = 1000 * (queued_s + report.queue_s), 1000 * report.compute_s
        took = b"queue;dur=%.1f, prefill;dur=%.1f" % times
        if report.transfer_s:
            took += b", transfer;dur=%.2f" % (1000 * report.transfer_s)
        fields = [(TIMING, took)]
        if report.cached is not None:
            fields = [(CACHED, b"%d" % report.cached), *fields]
    if grant is not None:
        fields = [(WORKER, grant.decode.encode()), (DECISION, grant.summary), *fields]
    return [*forwarded(given, _RESPONSE_ONLY), (REQUEST_ID, request_id), *fields]
