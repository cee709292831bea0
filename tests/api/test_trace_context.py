"""`traceparent`: what is believed of it, and what is said to whoever is next."""

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
def test_only_what_follows_the_standard_is_a_parent(parents: list[str], sampled: bool | None) -> None:
    found = read(given(*parents))
    if sampled is None:
        assert found is None
    else:
        assert found == TraceContext(int(TRACE, 16), int(SPAN, 16), sampled)


def test_the_next_one_is_told_in_the_same_words() -> None:
    parent = f"00-{TRACE}-{SPAN}-01"
    found = read(given(parent, states=("a=1", "b=2")))
    assert found is not None
    assert found.lines == f"traceparent: {parent}\r\ntracestate: a=1,b=2\r\n".encode()
    without = read(given(parent, states=("a" * (STATE_LIMIT + 1),)))
    assert without is not None and without.lines == f"traceparent: {parent}\r\n".encode()
