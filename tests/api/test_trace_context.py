"""`traceparent`: accepted values, and the headers for the next hop."""

from __future__ import annotations

import pytest

from baton_api.trace_context import STATE_LIMIT, TraceContext, read

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def given(*parents: str, states: tuple[str, ...] = ()) -> list[tuple[bytes, bytes]]:
    headers = [(b"accept", b"*/*"), *((b"traceparent", one.encode()) for one in parents)]
    return headers + [(b"tracestate", one.encode()) for one in states]


@pytest.mark.parametrize(
    ("parents", "sampled"),
    [
        ([f"00-{TRACE}-{SPAN}-01"], True),
        ([f"00-{TRACE}-{SPAN}-00"], False),
        ([f" 00-{TRACE}-{SPAN}-03 "], True),
        ([f"cc-{TRACE}-{SPAN}-01-what-comes-later"], True),
        ([f"00-{TRACE}-{SPAN}-01-more"], None),
        ([f"ff-{TRACE}-{SPAN}-01"], None),
        ([f"00-{'0' * 32}-{SPAN}-01"], None),
        ([f"00-{TRACE}-{'0' * 16}-01"], None),
        ([f"00-{TRACE.upper()}-{SPAN}-01"], None),
        ([f"00-{TRACE[1:]}-{SPAN}-01"], None),
        ([f"00-{TRACE}-{SPAN}-0"], None),
        (["00"], None),
        ([""], None),
        ([f"00-{TRACE}-{SPAN}-01"] * 2, None),
        ([], None),
    ],
)
def test_trace_parent_must_follow_the_standard(parents: list[str], sampled: bool | None) -> None:
    context = read(given(*parents))
    if sampled is None:
        assert context is None
    else:
        assert context == TraceContext(int(TRACE, 16), int(SPAN, 16), sampled)


def test_next_hop_gets_the_same_headers() -> None:
    parent = f"00-{TRACE}-{SPAN}-01"
    context = read(given(parent, states=("a=1", "b=2")))
    assert context is not None
    assert context.lines == f"traceparent: {parent}\r\ntracestate: a=1,b=2\r\n".encode()
    without = read(given(parent, states=("a" * (STATE_LIMIT + 1),)))
    assert without is not None and without.lines == f"traceparent: {parent}\r\n".encode()
