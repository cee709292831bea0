"""
A request's prompt as names of chunks, which say what of it a worker may hold already.

The router does not tokenise: it takes the text in the order in which a template would, tools before
messages, and cuts it every 512 bytes and at the end of each message. A chunk's name covers all before
it, the tenant's salt and the model first of all. The same conversation, one turn later, has the same
names up to where it was continued; how many tokens a chunk has is learned from what workers report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

CHUNK_BYTES = 512
"""Shorter ones find a few tokens more and cost more to look up: a prompt of 32 KB has 64."""


class Message(msgspec.Struct):
    """What of a message decides the prompt, whatever its shape."""

    role: Any = None
    content: Any = None
    tool_calls: Any = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt cut into chunks."""

    names: tuple[int, ...]
    """64 bits each."""
    sizes: tuple[int, ...]
    """Bytes of the prompt up to and with each chunk."""
    answers: tuple[tuple[int, int], ...] = ()
    """The assistant's messages: number of the first chunk, and of the first one after it."""

    @property
    def bytes(self) -> int:
        return self.sizes[-1] if self.sizes else 0


def root_name(salt: str, model: str) -> int:
    """What the first chunk's name begins with."""
    return xxhash.xxh3_64_intdigest(f"{len(salt)}:{salt}{model}".encode())


def of_messages(messages: Sequence[Message], tools: msgspec.Raw | None, root: int) -> Prompt:
    """A conversation's chunks. `tools` is their JSON as it came."""
    cut = _Cut(root)
    if tools:
        cut.close(b"tools", bytes(tools))
    for message in messages:
        role = message.role if isinstance(message.role, str) else repr(message.role)
        begun = len(cut.names)
        cut.close(role.encode(errors="replace"), _text(message))
        if role == "assistant":
            cut.answers.append((begun, len(cut.names)))
    return cut.prompt()


def of_text(text: bytes, root: int) -> Prompt:
    """A plain prompt's chunks; its last one, if it is not full, is a chunk too."""
    cut = _Cut(root)
    cut.close(b"", text)
    return cut.prompt()


def _text(message: Message) -> bytes:
    content = message.content
    text = content.encode(errors="replace") if isinstance(content, str) else b""
    if not isinstance(content, str) and content is not None:
        text = _parts(content)
    if message.tool_calls:
        text += msgspec.json.encode(message.tool_calls)
    return text


def _parts(content: object) -> bytes:
    """Text parts as text, as a template has them; anything else by its JSON."""
    if not isinstance(content, list):
        return msgspec.json.encode(content)
    pieces: list[bytes] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else None
        pieces.append(text.encode(errors="replace") if isinstance(text, str) else msgspec.json.encode(part))
    return b"\n".join(pieces)


class _Cut:
    """Text going in, names coming out."""

    def __init__(self, root: int) -> None:
        self.names: list[int] = []
        self.sizes: list[int] = []
        self.answers: list[tuple[int, int]] = []
        self._name = root
        self._size = 0

    def close(self, label: bytes, text: bytes) -> None:
        """Add one message; its end is a chunk's end."""
        start, end = 0, len(text)
        name = self._name
        prefix = label + b"\0"
        while True:
            chunk = text[start : start + CHUNK_BYTES]
            name = xxhash.xxh3_64_intdigest(name.to_bytes(8) + prefix + chunk)
            prefix = b""
            start += CHUNK_BYTES
            self._size += len(chunk)
            self.names.append(name)
            self.sizes.append(self._size)
            if start >= end:
                break
        self._name = name

    def prompt(self) -> Prompt:
        return Prompt(tuple(self.names), tuple(self.sizes), tuple(self.answers))
