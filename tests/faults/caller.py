"""A client that says how its answer ended, and is strict about it: what looks complete must be complete."""

from __future__ import annotations

import asyncio
import enum
import json
from dataclasses import dataclass, field
from typing import Any

from tests.faults.mock_worker import TOKENS, MockRequest, text

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
ENDS = ("\ndata: [DONE]\n\n", "\nevent: response.completed\n")


class End(enum.StrEnum):
    COMPLETE = "complete"
    """The whole expected answer, once, with its end."""
    ERROR = "told"
    """An error event, and a cut connection."""
    REFUSED = "refused"
    """Another status than 200, with an error in its body."""
    BARE = "bare"
    """It ended without its end and without an error."""
    WRONG = "wrong"
    """It looks complete, and is not the expected answer."""
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class Outcome:
    end: End
    status: int = 0
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def resumed(self) -> bool:
        return "\n: resumed\n" in self.body

    @property
    def error(self) -> dict[str, Any]:
        """The received error, in an event or as the answer."""
        where = self.body.rpartition("data: ")[2] if self.end is End.ERROR else self.body
        error: dict[str, Any] = json.loads(where)["error"]
        return error


@dataclass(frozen=True, slots=True)
class CallSpec:
    """One request to make."""

    prompt: str
    path: str = CHAT
    stream: bool = True
    choices: int = 1
    tokens: int = TOKENS

    @property
    def body(self) -> bytes:
        fields: dict[str, Any] = {"model": "tiny", "stream": self.stream, "max_tokens": self.tokens}
        if self.choices > 1:
            fields["n"] = self.choices
        match self.path:
            case "/v1/chat/completions":
                fields["messages"] = [{"role": "user", "content": self.prompt}]
            case "/v1/responses":
                fields |= {"input": self.prompt, "store": False}
            case _:
                fields["prompt"] = self.prompt
        return json.dumps(fields).encode()

    @property
    def answer(self) -> str:
        return text(MockRequest(self.path, {}, self.body).prompt, self.tokens)


def head(spec: CallSpec, length: int) -> bytes:
    lines = (f"POST {spec.path} HTTP/1.1", "host: x", "connection: close", f"content-length: {length}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


async def call(port: int, spec: CallSpec, timeout_s: float = 60.0) -> Outcome:
    """Ask, and wait for the end however it comes."""
    received = b""
    cut = False
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head(spec, len(spec.body)) + spec.body)
        async with asyncio.timeout(timeout_s):
            while piece := await reader.read(65536):
                received += piece
    except ConnectionError:
        cut = True
    except TimeoutError:
        return Outcome(End.HUNG, 0, received.decode(errors="replace"))
    finally:
        writer.transport.abort()
    return _judged(spec, received, cut)


def _judged(spec: CallSpec, received: bytes, cut: bool) -> Outcome:
    top, _, rest = received.partition(b"\r\n\r\n")
    lines = top.decode().split("\r\n")
    if not top:
        return Outcome(End.BARE, 0)
    status = int(lines[0].split(" ")[1])
    given = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
    whole = not cut
    if "chunked" in given.get("transfer-encoding", ""):
        body, whole = _unchunked(rest)
    else:
        body = rest
        whole = whole and len(rest) == int(given.get("content-length", -1))
    reply = body.decode(errors="replace")
    return Outcome(_end(spec, status, reply, whole), status, reply, given)


def _end(spec: CallSpec, status: int, reply: str, whole: bool) -> End:
    if status != 200:
        return End.REFUSED if whole and "error" in json.loads(reply) else End.BARE
    if not spec.stream:
        if not whole:
            return End.BARE
        choice = json.loads(reply)["choices"][0]
        words = choice["text"] if "text" in choice else choice["message"]["content"]
        return End.COMPLETE if words == spec.answer else End.WRONG
    if '"error"' in reply.rpartition("\ndata: ")[2]:
        return End.ERROR if not whole else End.WRONG
    if not whole or not any(end in reply for end in ENDS):
        return End.BARE
    return End.COMPLETE if _words(spec, reply) == [spec.answer] * spec.choices else End.WRONG


def _words(spec: CallSpec, reply: str) -> list[str]:
    """Return each choice's text, if its events are those of one answer."""
    words = [""] * spec.choices
    names: set[object] = set()
    for line in reply.split("\n"):
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        if spec.path == RESPONSES:
            words[0] += event.get("delta", "")
            continue
        names.add((event["id"], event["created"]))
        for choice in event["choices"]:
            words[choice["index"]] += choice["text"] if "text" in choice else choice["delta"]["content"]
    return words if len(names) <= 1 else []


def _unchunked(rest: bytes) -> tuple[bytes, bool]:
    """The body, and whether its end was among the chunks."""
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        if not size:
            break
        length = int(size, 16)
        if not length:
            return body, True
        body += rest[:length]
        rest = rest[length + 2 :]
    return body, False
