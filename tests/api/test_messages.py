"""Control messages: they survive a round trip, and invalid ones are refused with a reason."""

from __future__ import annotations

import random

import msgspec
import pytest

from baton_api import messages
from baton_api.errors import TransferFailed
from baton_api.messages import (
    FRAME_LIMIT,
    LENGTH_BYTES,
    PROTOCOL,
    Abort,
    AnyMessage,
    Checksums,
    Chunk,
    Commit,
    Done,
    Drained,
    Failed,
    Hello,
    Ping,
    Pong,
    PoolLayout,
    Prefill,
    ReadCached,
    Refuse,
    TokenChoice,
    Welcome,
)
from baton_api.sampling import SamplingParams

POOL = PoolLayout(address=2**47 + 4096, block_bytes=2**21, blocks=1000)

EXAMPLES: list[AnyMessage] = [
    Hello(
        protocol=PROTOCOL, worker="decode-0", epoch="e", model="m", digest="d", labels={"dtype": "float32"}
    ),
    Welcome(
        protocol=PROTOCOL,
        worker="p",
        epoch="e",
        model="m",
        digest="d",
        agent=b"\x00\xff" * 200,
        pools=(POOL, POOL),
    ),
    Refuse(reason="another model"),
    Prefill(
        session="r",
        epoch=3,
        tokens=list(range(1000)),
        start_block=2,
        parent=b"p" * 16,
        sampling=SamplingParams(
            seed=2**64 - 1, temperature=0.7, logit_bias=((5, -1.5),), stop_ids=frozenset({2}), logprobs=3
        ),
        salt="tenant",
        ticket="v1.1.r.s",
        source="10.0.0.7:7000",
        deadline_s=12.5,
    ),
    ReadCached(
        session="r", epoch=3, hashes=[b"h" * 8, b"i" * 8], ticket="v1.1.r.s", request_id="q", deadline_s=0.5
    ),
    Chunk(session="r", epoch=3, first_block=2, blocks=[7, 9]),
    Checksums(session="r", epoch=3, first_block=2, checksums=[2**64 - 1, 0]),
    Commit(
        session="r",
        epoch=3,
        first=TokenChoice(token=5, logprob=-0.25, top=[(5, -0.25), (6, -2.0)]),
        prompt_tokens=1000,
        cached_tokens=16,
        tail=b"t" * 16,
        queue_s=0.1,
        peer_tokens=8,
    ),
    Failed(session="r", epoch=3, reason="draining", retry=True),
    Done(session="r", epoch=3),
    Abort(session="r", epoch=3),
    Drained(session="r", epoch=3),
    Ping(number=1),
    Pong(number=1, queued_tokens=5, free_blocks=7, draining=True),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_messages_survive_a_round_trip(message: AnyMessage) -> None:
    frame = messages.encode(message)
    assert messages.frame_length(frame[:LENGTH_BYTES]) == len(frame) - LENGTH_BYTES
    assert messages.decode(frame[LENGTH_BYTES:]) == message


def test_message_kinds_all_have_an_example() -> None:
    assert {type(message) for message in EXAMPLES} == set(messages.Message.__subclasses__())


@pytest.mark.parametrize(
    "body, complaint",
    {
        "no msgpack": (b"\xc1", "MessagePack"),
        "cut off": (messages.encode(Done(session="r", epoch=1))[LENGTH_BYTES:-1], "truncated"),
        "trailing bytes": (messages.encode(Done(session="r", epoch=1))[LENGTH_BYTES:] + b"x", "trailing"),
        "no type": (msgspec.msgpack.encode({"room": "r"}), "type"),
        "an unknown type": (msgspec.msgpack.encode({"type": "dance"}), "dance"),
        "a missing field": (msgspec.msgpack.encode({"type": "done", "room": "r"}), "epoch"),
        "an unknown field": (
            msgspec.msgpack.encode({"type": "done", "room": "r", "epoch": 1, "x": 1}),
            "unknown field `x`",
        ),
        "a field of another type": (
            msgspec.msgpack.encode({"type": "done", "room": "r", "epoch": "1"}),
            r"epoch",
        ),
        "text that is not UTF-8": (b"\x83\xa4type\xa4done\xa4room\xa1\xff\xa5epoch\x01", "utf-8"),
        "deep nesting": (b"\x82\xa1x" + b"\x91" * 60_000, "recursion"),
        "a list": (msgspec.msgpack.encode([1, 2]), "object"),
    }.values(),
)
def test_invalid_message_is_refused_with_the_reason(body: bytes, complaint: str) -> None:
    with pytest.raises(TransferFailed, match=f"Not a message of the control protocol: .*{complaint}"):
        messages.decode(body)


def test_frame_is_allowed_up_to_its_limit() -> None:
    assert messages.frame_length(FRAME_LIMIT.to_bytes(4)) == FRAME_LIMIT
    with pytest.raises(TransferFailed, match=f"{FRAME_LIMIT + 1} bytes is over the limit of {FRAME_LIMIT}"):
        messages.frame_length((FRAME_LIMIT + 1).to_bytes(4))


def test_million_token_prompt_fits_a_frame_and_two_do_not() -> None:
    def prefill(count: int) -> Prefill:
        return Prefill(
            session="r",
            epoch=1,
            tokens=[100_000] * count,
            start_block=0,
            parent=b"",
            sampling=SamplingParams(seed=0),
        )

    messages.encode(prefill(1_000_000))
    with pytest.raises(TransferFailed, match="A Prefill message of 1000"):
        messages.encode(prefill(2_000_000))


def test_mutated_messages_are_read_or_refused_and_nothing_else() -> None:
    chance = random.Random(1)
    bodies = [messages.encode(message)[LENGTH_BYTES:] for message in EXAMPLES]
    refused = 0
    for _ in range(10_000):
        body = bytearray(chance.choice(bodies))
        for _ in range(chance.randint(1, 5)):
            body[chance.randrange(len(body))] = chance.randrange(256)
        if chance.random() < 0.3:
            del body[chance.randrange(len(body)) :]
        try:
            assert isinstance(messages.decode(bytes(body)), messages.Message)
        except TransferFailed:
            refused += 1
    assert refused > 2000
