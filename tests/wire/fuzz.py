"""
A fuzz of the wire: bytes that are no requests, requests in every framing, and bodies with odd fields.

Three kinds, each a pure function of a source of randomness:

- `mutated`: the bytes of a valid request, damaged. Whatever comes back is a row of whole HTTP responses.
- `framed`: valid requests one behind the other, whose bodies look like requests. Each has one answer, with
  its own status, wherever the bytes are cut into segments.
- `odd_body`: a valid JSON body of an endpoint, damaged in its fields or in its bytes. It is answered, and
  never by a status that says the server is at fault.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

SILENT_S = 0.5
"""Seconds after which a server that got damaged bytes waits for more of them."""

ANSWER_S = 120.0
"""Seconds after which a request that has no answer hangs, however busy the machine is."""

AT_ONCE = 32
"""Connections at the same time."""

FAULTS_NAMED = (503, 507)
"""Statuses from 500 on that say what the client can do."""

HIDDEN = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer another's\r\n\r\n"
"""What a body must never be read as."""

LAST = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"

TARGETS = {b"GET /health": 200, b"POST /v1/chat/completions": 400, b"POST /nowhere": 404}
"""Requests with the status that they get if their body is `HIDDEN`."""

OFFERS = (
    b"",
    b"connection: upgrade\r\nupgrade: websocket\r\n",
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n",
    b"upgrade: x\r\nconnection: keep-alive, upgrade\r\n",
    b"connection: keep-alive\r\n",
    b"expect: 100-continue\r\n",
    b"te: trailers\r\n",
)

Send = tuple[list[bytes], list[int]]
"""Segments of a connection, and the statuses of the answers to them."""


def framed(source: random.Random) -> Send:
    """One to four requests, the last of which closes the connection."""
    sent, expected = b"", []
    for _ in range(source.randint(0, 3)):
        target, status = source.choice(list(TARGETS.items()))
        body = source.choice([HIDDEN, HIDDEN * 3, b"", b"{", b"\r\n\r\n" + HIDDEN, b"0\r\n\r\n" + HIDDEN])
        if not body and target.startswith(b"POST /v1"):
            body = HIDDEN
        lines = [b"host: x\r\n", b"content-type: application/json\r\n", source.choice(OFFERS)]
        framing, content = _framing(source, body)
        lines.append(framing)
        source.shuffle(lines)
        sent += target + b" HTTP/1.1\r\n" + b"".join(lines) + b"\r\n" + content
        expected.append(status)
    return list(_cut(source, sent + LAST)), [*expected, 200]


def _framing(source: random.Random, body: bytes) -> tuple[bytes, bytes]:
    """The header of a body, and the body as it is sent."""
    if not body and source.random() < 0.5:
        return b"", b""
    if source.random() < 0.5:
        return b"content-length: %d\r\n" % len(body), body
    content = b""
    while body:
        size = source.randint(1, len(body))
        extension = source.choice([b"", b"", b";a=b", b';a="b"'])
        content += b"%x%b\r\n%b\r\n" % (size, extension, body[:size])
        body = body[size:]
    trailer = source.choice([b"", b"", b"authorization: Bearer another's\r\n", b"host: y\r\n"])
    return b"transfer-encoding: chunked\r\n", content + b"0\r\n" + trailer + b"\r\n"


def mutated(source: random.Random) -> list[bytes]:
    """A request with one to eight faults, and requests behind it."""
    data = bytearray(b"".join(framed(source)[0]))
    for _ in range(source.randint(1, 8)):
        source.choice(_DAMAGES)(source, data)
    return list(_cut(source, bytes(data)))


def _flip(source: random.Random, data: bytearray) -> None:
    if data:
        data[source.randrange(len(data))] ^= 1 << source.randrange(8)


def _insert(source: random.Random, data: bytearray) -> None:
    at = source.randint(0, len(data))
    data[at:at] = source.choice(_PIECES) * source.choice([1, 1, 1, 2, 300])


def _remove(source: random.Random, data: bytearray) -> None:
    at = source.randint(0, len(data))
    del data[at : at + source.choice([1, 1, 2, 20])]


def _repeat(source: random.Random, data: bytearray) -> None:
    lines = bytes(data).split(b"\r\n")
    at = source.randrange(len(lines))
    lines.insert(at, lines[source.randrange(len(lines))])
    data[:] = b"\r\n".join(lines)


def _unend(source: random.Random, data: bytearray) -> None:
    data[:] = bytes(data).replace(
        b"\r\n", source.choice([b"\n", b"\r", b"\r\r\n", b"\n\r"]), source.randint(1, 3)
    )


_DAMAGES: tuple[Callable[[random.Random, bytearray], None], ...] = (_flip, _insert, _remove, _repeat, _unend)

_PIECES = (
    b"\x00", b"\xff\xfe", b" ", b"\t", b"\r\n", b"\n", b":", b"x" * 700, b"%0d%0a", b"0\r\n\r\n", HIDDEN,
    b"HTTP/1.0",
    b"content-length: 5\r\n", b"content-length: +5\r\n", b"content-length: 18446744073709551616\r\n",
    b"transfer-encoding: chunked\r\n", b"transfer-encoding: gzip, chunked\r\n",
    b"transfer-encoding: identity\r\n",
    b"host: y\r\n", b"upgrade: h2c\r\nconnection: upgrade\r\n", b"connection: close\r\n",
    b"x-baton-prefill: e:1\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"CONNECT x:80 HTTP/1.1\r\n", b"ffffffffffffffff\r\n",
    b"\x16\x03\x01\x02\x00",
)  # fmt: skip


def _cut(source: random.Random, data: bytes) -> Iterator[bytes]:
    """The same bytes in one to four segments."""
    places = sorted(source.randint(0, len(data)) for _ in range(source.randint(0, 3)))
    for start, end in zip([0, *places], [*places, len(data)], strict=True):
        if start < end:
            yield data[start:end]


_TEXT = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _TEXT, "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 16},
    "/v1/messages": {"messages": _TEXT, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": _TEXT},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["a", "b"]},
    "/v1/score": {"text_1": "hi", "text_2": ["a", "b"]},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 2}},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2]},
}
FIELDS = (
    "messages", "prompt", "input", "max_tokens", "max_completion_tokens", "max_output_tokens",
    "temperature", "top_p",
    "top_k", "min_p", "n", "best_of", "stop", "stream", "stream_options", "logprobs", "top_logprobs",
    "logit_bias", "seed",
    "tools", "tool_choice", "response_format", "structured_outputs", "guided_json", "user", "metadata",
    "echo", "suffix",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "model", "system", "thinking",
    "reasoning", "text",
    "sampling_params", "documents", "query", "encoding_format", "dimensions", "priority", "cache_salt",
    "ignore_eos",
    "min_tokens", "stop_token_ids", "prediction", "service_tier", "store", "previous_response_id",
    "tokens", "rid",
)  # fmt: skip
_DEEP: Any = "x"
for _ in range(70):
    _DEEP = [_DEEP]
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 2**31, 2**63, -(2**63), 10**40, 0.5, -0.0, 1e308, 1e-320, "", "x",
    "\0", "\u2028", "é" * 50,
    "x" * 5000, [], [[]], [None], ["a"], [1, 2], [-1], [2**40], {}, {"": None}, {"type": "json_object"},
    {"type": "text"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}, {"1": 5},
    {"include_usage": True},
    [{"role": "user"}], [{"role": "tool", "content": 5}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}], "none", "auto",
    "required", _DEEP,
)  # fmt: skip


def odd_body(source: random.Random, model: str) -> tuple[str, bytes]:
    """The path and the body of a request."""
    path = source.choice(list(BODIES))
    body = {"model": model, **BODIES[path]}
    for _ in range(source.randint(0, 3)):
        name = source.choice([*FIELDS, *body])
        if source.random() < 0.1:
            body.pop(name, None)
        else:
            body[name] = source.choice(VALUES)
    data = bytearray(json.dumps(body).encode())
    damage = source.random()
    if damage < 0.05:
        data = data[: source.randint(0, len(data))]
    elif damage < 0.15:
        at = source.randint(0, len(data))
        data[at:at] = source.choice(
            [b"\xff", b"\\ud800", b"NaN", b",", b'"', b"\x00", b"\xef\xbb\xbf", b"[" * 500, b"1e999"]
        )
    elif damage < 0.2:
        data[-1:] = b', "model": "%b"}' % model.encode()
    return path, bytes(data)


# --- What a server did with them. ---


@dataclass
class Counts:
    """What came back."""

    sent: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    waited: int = 0
    """Connections whose server waited for more bytes."""
    closed: int = 0
    """Connections that ended without an answer."""
    faults: list[str] = field(default_factory=list)
    """What should not be."""

    def line(self) -> str:
        shown = ", ".join(f"{status}: {count}" for status, count in sorted(self.statuses.items()))
        rest = f"waited {self.waited}, closed {self.closed}, faults {len(self.faults)}"
        return f"{self.sent} sent; {shown}; {rest}"


def answers(data: bytes) -> tuple[list[int], bytes]:
    """
    The status of each whole response in these bytes, interim ones left out, and what is left of another one.

    Raises ValueError for bytes that are no responses.
    """
    statuses: list[int] = []
    while data:
        head, end, rest = data.partition(b"\r\n\r\n")
        if not end:
            break
        line, *lines = head.split(b"\r\n")
        version, code, _ = line.split(b" ", 2)
        if version != b"HTTP/1.1":
            raise ValueError(f"no response: {line!r}")
        fields = {name.lower(): value for name, _, value in (one.partition(b": ") for one in lines)}
        if fields.get(b"transfer-encoding") == b"chunked":
            whole, rest = _chunks(rest)
        elif b"content-length" in fields:
            length = int(fields[b"content-length"])
            whole, rest = len(rest) >= length, rest[length:]
        else:
            whole = int(code) < 200 or int(code) == 204
        if not whole:
            break
        if int(code) >= 200:
            statuses.append(int(code))
        data = rest
    return statuses, data


def _chunks(data: bytes) -> tuple[bool, bytes]:
    while True:
        size, end, data = data.partition(b"\r\n")
        if not end or len(data) < int(size, 16) + 2:
            return False, b""
        data = data[int(size, 16) + 2 :]
        if not int(size, 16):
            return True, data


async def exchange(port: int, parts: list[bytes], silent_s: float) -> tuple[bytes, bool]:
    """All that comes back, and whether the server closed the connection rather than be silent for so long."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0)
        while True:
            async with asyncio.timeout(silent_s):
                data = await reader.read(65536)
            if not data:
                return received, True
            received += data
    except TimeoutError:
        return received, False
    except ConnectionError:
        return received, True
    finally:
        writer.transport.abort()


async def send_mutated(port: int, source: random.Random, counts: Counts) -> None:
    parts = mutated(source)
    received, closed = await exchange(port, parts, SILENT_S)
    try:
        statuses, _ = answers(received)
    except ValueError as error:
        counts.faults.append(f"{error} to {parts}")
        return
    counts.statuses.update(statuses)
    counts.waited += not closed
    counts.closed += closed and not statuses
    if any(status >= 500 and status not in FAULTS_NAMED for status in statuses):
        counts.faults.append(f"{statuses} to {parts}")


async def send_framed(port: int, source: random.Random, counts: Counts) -> None:
    parts, expected = framed(source)
    received, closed = await exchange(port, parts, ANSWER_S)
    try:
        statuses, rest = answers(received)
    except ValueError as error:
        counts.faults.append(f"{error} to {parts}")
        return
    counts.statuses.update(statuses)
    if statuses != expected or rest or not closed:
        counts.faults.append(f"{statuses} instead of {expected} to {parts}")


async def send_body(port: int, source: random.Random, counts: Counts, model: str) -> None:
    path, body = odd_body(source, model)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    parts = [f"{head}content-length: {len(body)}\r\n\r\n".encode() + body]
    received, closed = await exchange(port, parts, ANSWER_S)
    statuses, rest = answers(received)
    counts.statuses.update(statuses)
    fault = (
        len(statuses) != 1 or rest or not closed or (statuses[0] >= 500 and statuses[0] not in FAULTS_NAMED)
    )
    if fault:
        counts.faults.append(f"{statuses} {received[:200]!r} to {path} {body[:500]!r}")


async def run(seed: int, count: int, send: Callable[[random.Random, Counts], Awaitable[None]]) -> Counts:
    """Send `count` of one kind. Each has a seed of its own, by which a fault can be repeated."""
    total = Counts()
    numbers = iter(range(count))

    async def sender() -> None:
        for number in numbers:
            one = Counts()
            await send(random.Random(f"{seed}/{number}"), one)
            total.sent += 1
            total.statuses += one.statuses
            total.waited += one.waited
            total.closed += one.closed
            total.faults += [f"{seed}/{number}: {fault}" for fault in one.faults]

    await asyncio.gather(*(sender() for _ in range(AT_ONCE)))
    return total
