"""Forwarded bytes and resumption points of a stream, for every way in which it is cut."""

from __future__ import annotations

import json
import random

import pytest

from baton_api import anthropic
from baton_api.errors import InternalError, WorkerLost
from baton_api.stream_comments import Beginning, Resumption, begin_line, tokens_line, with_resumption
from baton_router.requests.resumable_stream import MessageStream, ResumableStream

BEGUN = Beginning("chatcmpl-1", 1700000000, 42, 16)
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


STEPS: list[tuple[bytes, list[int]]] = [
    (event("") + event("The"), [5]),
    (b"", [6]),  # half a character
    (event(" capital é"), [7, 8]),
    (event(": baton-tokens 9"), [9]),
    (event(".") + event("stop"), [2]),
]
"""(events, the tokens that they came of)"""

WRITES = [
    begin_line(BEGUN),
    *(events + tokens_line(tokens, ended=tokens == [2]) for events, tokens in STEPS),
    event("usage") + DONE,
]
WRITES.insert(4, KEEP_ALIVE)
EVENTS = b"".join(events for events, _ in STEPS) + event("usage") + DONE
TOKENS = [token for _, tokens in STEPS for token in tokens]


def comment(text: bytes) -> bytes:
    """Without comments."""
    return text.replace(KEEP_ALIVE, b"")


def behind(count: int) -> bytes:
    """The events that have passed when so many tokens are known."""
    events, seen_tokens = b"", 0
    for more, tokens in STEPS:
        if seen_tokens < count:
            events += more
            seen_tokens += len(tokens)
    return events


def pieces(text: bytes, rng: random.Random) -> list[bytes]:
    cuts = sorted(rng.sample(range(1, len(text)), rng.randint(0, 12)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def test_comments_are_removed_and_nothing_else() -> None:
    stream = ResumableStream()
    passed = b"".join(map(stream.push, WRITES)) + stream.finish()
    assert comment(passed) == EVENTS and passed.count(KEEP_ALIVE) == 1
    assert stream.complete
    assert stream.resumption == Resumption(BEGUN, TOKENS, ended=True)


@pytest.mark.parametrize("seed", range(60))
def test_law_forwarded_text_equals_the_tokens_at_any_cut(seed: int) -> None:
    stream, passed = ResumableStream(), b""
    for piece in pieces(b"".join(WRITES), random.Random(seed)):
        passed += stream.push(piece)
        resumption = stream.resumption
        if resumption is None:
            assert passed == b""
        elif resumption.ended:
            assert resumption.tokens == TOKENS and comment(passed).startswith(behind(len(TOKENS)))
        else:
            seen_tokens = len(resumption.tokens)
            assert resumption.tokens == TOKENS[:seen_tokens] and comment(passed) == behind(seen_tokens)
    assert comment(passed + stream.finish()) == EVENTS


@pytest.mark.parametrize("writes", range(1, 6))
def test_events_that_arrive_one_by_one_pass_as_in_pieces(writes: int) -> None:
    texts = [f"{'word ' * 20}{number}" for number in range(4)]
    arriving = [begin_line(BEGUN)]
    arriving += [event(text) + tokens_line([len(text)], ended=text == texts[-1]) for text in texts]
    whole, cut = ResumableStream(), ResumableStream()
    passed = b"".join(whole.push(write) for write in arriving[:writes])
    assert passed == b"".join(cut.push(bytes([octet])) for octet in b"".join(arriving[:writes]))
    assert passed == b"".join(map(event, texts[: writes - 1]))
    assert (whole.resumption, whole.tokens, whole.waiting) == (cut.resumption, cut.tokens, cut.waiting)
    assert whole.error(WorkerLost("d")) == cut.error(WorkerLost("d"))


def test_worker_without_comments_is_not_delayed() -> None:
    stream = ResumableStream()
    for write in (event("The"), event(" capital"), DONE):
        assert stream.push(write) == write
    assert stream.resumption is None and stream.complete


def test_resumed_stream_keeps_counting() -> None:
    before = Resumption(BEGUN, [5, 6])
    stream = ResumableStream(before)
    assert stream.push(begin_line(BEGUN) + event("x") + tokens_line([7], ended=False)) == event("x")
    assert stream.resumption == Resumption(BEGUN, [5, 6, 7])
    assert before.tokens == [5, 6]


def test_worker_error_waits_and_is_sent_if_no_worker_resumes() -> None:
    failure = b'data: {"error":{"message":"the engine broke","type":"server_error"}}\n\n'
    stream = ResumableStream()
    passed = stream.push(WRITES[0] + WRITES[1] + failure)
    assert b"error" not in passed
    assert stream.resumption == Resumption(BEGUN, [5])
    assert stream.error(WorkerLost("d")) == failure


def test_error_of_the_request_itself_is_not_resumed() -> None:
    failure = b'data: {"error":{"message":"no","type":"invalid_request_error"}}\n\n'
    stream = ResumableStream()
    stream.push(WRITES[0] + WRITES[1] + failure)
    assert stream.resumption is None


@pytest.mark.parametrize("body", [b'{"model":"m"}', b' {"model":"m"}\n', b"{}", b'{"a":{"b":[]} }'])
def test_resumed_request_has_one_more_field(body: bytes) -> None:
    resumption = Resumption(BEGUN, [1, 2], ended=True)
    given = json.loads(with_resumption(body, resumption))
    assert given.pop("baton_resume") == {
        "beginning": {"id": "chatcmpl-1", "created": 1700000000, "seed": 42, "cached_tokens": 16},
        "tokens": [1, 2],
        "ended": True,
    }
    assert given == json.loads(body)


def test_answer_tokens_are_counted_for_each_worker() -> None:
    first = ResumableStream()
    assert first.generated is None
    for write in WRITES[:4]:
        first.push(write)
    assert first.generated == 4
    second = ResumableStream(first.resumption)
    for write in (begin_line(BEGUN), event("x") + tokens_line([3, 4], ended=False)):
        second.push(write)
    assert second.generated == 2
    silent = ResumableStream()
    silent.push(EVENTS)
    assert silent.generated is None


MESSAGE = [
    begin_line(Beginning("msg_1", 1700000000, 42, 16)),
    anthropic.event("message_start", {"message": {"id": "msg_1"}}) + tokens_line([5], ended=False),
    anthropic.event("content_block_delta", {"delta": {"text": '\ndata: {"type":"message_stop"}'}})
    + tokens_line([6], ended=False),
    anthropic.event("message_delta", {"delta": {"stop_reason": "end_turn"}}) + tokens_line([2], ended=True),
    anthropic.event("message_stop", {}),
]


@pytest.mark.parametrize("seed", range(20))
def test_message_stream_is_complete_at_its_stop(seed: int) -> None:
    whole, rng = b"".join(MESSAGE), random.Random(seed)
    stream, passed = MessageStream(), b""
    for piece in pieces(whole, rng):
        passed += stream.push(piece)
        assert stream.complete == passed.endswith(MESSAGE[-1])
    assert passed.count(b"\n\n") == 4 and b"baton" not in passed
    resumption = stream.resumption
    assert resumption is not None and (resumption.tokens, resumption.ended) == ([5, 6, 2], True)


def test_message_stream_failure_has_the_shape_of_its_api() -> None:
    stream = MessageStream()
    stream.push(MESSAGE[0] + MESSAGE[1])
    own = stream.error(WorkerLost("a worker"))
    assert own.startswith(b"event: error\ndata: ")
    assert json.loads(own.split(b"data: ")[1])["error"]["type"] == "overloaded_error"
    reported = anthropic.error_event(InternalError())
    stream.push(reported)
    assert stream.error(WorkerLost("a worker")) == reported
