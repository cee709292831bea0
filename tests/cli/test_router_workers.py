"""Reading workers of a service."""

from __future__ import annotations

import httpx
import pytest

from baton_cli.router_workers import samples


def refused(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("connection refused", request=request)


def answering(status: int, text: str) -> httpx.MockTransport:
    return httpx.MockTransport(lambda _: httpx.Response(status, text=text))


@pytest.mark.parametrize(
    ("transport", "expected"),
    [
        (answering(200, '# TYPE a gauge\na 3\na{x="1"} 4\n'), [("a", 3.0), ("a", 4.0)]),
        (answering(200, "<html>It works!</html>"), []),
        (answering(404, "a 3\n"), []),
        (httpx.MockTransport(refused), []),
    ],
    ids=["metrics", "a page", "not found", "refused"],
)
def test_samples_of_a_worker_whatever_it_answers(
    transport: httpx.MockTransport, expected: list[tuple[str, float]]
) -> None:
    with httpx.Client(transport=transport) as client:
        assert [(one.name, one.value) for one in samples(client, "http://worker:8000")] == expected
