"""Forwarded parts of a stream of events, and whether it is complete."""

from __future__ import annotations

import json
import random

import pytest

from baton_api.errors import WorkerLost
from baton_api.stream_comments import AnswerUsage
from baton_http import sse
from baton_http.sse import EventStream, GenerateStream, ResponseStream
from baton_router.requests.resumable_stream import MessageStream, ResumableStream

ONE = b'data: {"a": 1}\n\n'
DONE = b"data: [DONE]\n\n"

STORIES: dict[str, tuple[list[bytes], bytes, bool]] = {
    "whole events": ([ONE, DONE], ONE + DONE, True),
    "no end": ([ONE], ONE, False),
    "nothing": ([], b"", False),
    "half a line waits": ([ONE, b"data: {"], ONE, False),
    "the end in pieces": ([ONE, b"data: [DO", b"NE]\n", b"\n"], ONE + DONE, True),
    "the end in single bytes": ([bytes([byte]) for byte in ONE + DONE], ONE + DONE, True),
    "the end without a space": ([b"data:[DONE]\n\n"], b"data:[DONE]\n\n", True),
    "carriage returns": ([b"data: [DONE]\r\n\r\n"], b"data: [DONE]\r\n\r\n", True),
    "the word in a text": ([b'data: {"t": "data: [DONE]"}\n\n'], b'data: {"t": "data: [DONE]"}\n\n', False),
    "something after the end": ([DONE + ONE], DONE + ONE, False),
    "a comment": ([b": wait\n\n"], b": wait\n\n", False),
}


@pytest.mark.parametrize(("pieces", "passed", "complete"), STORIES.values(), ids=STORIES.keys())
def test_lines_pass_and_the_end_is_recognised(pieces: list[bytes], passed: bytes, complete: bool) -> None:
    events = EventStream()
    assert b"".join([events.push(piece) for piece in pieces]) == passed
    assert events.complete == complete


def test_last_line_without_line_end_passes_at_the_end() -> None:
    events = EventStream()
    assert events.push(ONE + b"data: [DONE]") == ONE
    assert not events.complete
    assert events.finish() == b"data: [DONE]"
    assert events.complete


def test_line_over_the_limit_passes_in_parts() -> None:
    events = EventStream()
    pieces = [b"x" * 100_000] * 30
    passed = [events.push(piece) for piece in pieces]
    assert b"".join(passed) + events.finish() == b"".join(pieces)
    assert max(map(len, passed)) <= sse.LINE_LIMIT + 100_000


def events_of(stream: bytes) -> list[bytes]:
    """As a client reads them: what stands between blank lines."""
    return [part.removeprefix(b"data: ") for part in stream.split(b"\n\n") if part.strip()]


@pytest.mark.parametrize("seed", range(100))
def test_law_all_bytes_pass_and_an_error_is_a_separate_event(seed: int) -> None:
    rng = random.Random(seed)
    stream = b"".join(b'data: {"n": %d}\n\n' % n for n in range(rng.randint(0, 9)))
    stream += DONE if rng.random() < 0.5 else b""
    cut = rng.randint(0, len(stream))
    events, passed, at = EventStream(), b"", 0
    while at < cut:
        piece = stream[at : min(cut, at + rng.randint(1, 20))]
        passed += events.push(piece)
        at += len(piece)
    assert stream.startswith(passed)
    assert passed == b"" or passed.endswith(b"\n")
    *before, error = events_of(passed + events.error(WorkerLost("w")))
    error_body = json.loads(error)["error"]
    assert (error_body["code"], error_body["retryable"]) == (WorkerLost.code, True)
    assert all(event == b"[DONE]" or json.loads(event) for event in before)
    assert passed + events.finish() == stream[:cut]


USAGE = AnswerUsage(5, 17).comment()


@pytest.mark.parametrize(
    "kind", [EventStream, GenerateStream, ResponseStream, ResumableStream, MessageStream]
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_comments_with_the_usage_are_read_and_removed(kind: type[EventStream], size: int) -> None:
    """Wherever the stream is cut; text of an answer that looks like one stays."""
    text = b'data: {"text":"\\n: baton-usage 1 1\\n"}\n\n'
    stream = text + AnswerUsage(5, 3).comment() + b": keep-alive\n\n" + text + USAGE + b"data: [DONE]\n\n"
    events, passed = kind(), b""
    for at in range(0, len(stream), size):
        passed += events.push(stream[at : at + size])
    passed += events.finish()
    lines = [line for line in passed.split(b"\n") if line]
    assert lines == [text.rstrip(), b": keep-alive", text.rstrip(), b"data: [DONE]"]
    assert (events.usage, events.generated, events.tokens) == (AnswerUsage(5, 17), 17, 17)


def test_tokens_of_another_engine_are_read_from_its_usage() -> None:
    events = EventStream()
    events.push(b'data: {"choices":[{"delta":{"content":"\\"completion_tokens\\":9"}}],"usage":null}\n\n')
    assert events.generated is None
    events.push(b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":12}}\n\n')
    assert events.generated == 12


def test_tokens_of_a_stream_of_generate_are_those_of_all_choices() -> None:
    events = GenerateStream()
    for index, tokens in ((0, 1), (1, 1), (0, 2), (1, 3)):
        events.push(
            b'data: {"text":"a","meta_info":{"completion_tokens":%d},"index":%d}\n\n' % (tokens, index)
        )
    assert events.generated == 5
    alone = GenerateStream()
    alone.push(b'data: {"text":"a","meta_info":{"completion_tokens": 4}}\n\n')
    assert alone.generated == 4
