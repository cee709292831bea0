"""
A prompt as chunk hashes, which show how much of it a worker may have cached.

The router does not tokenize. It takes the text in the order in which a template would, tools before
messages, and cuts it every 512 bytes and at the end of each message. A chunk's name covers all text before
it, and the tenant's salt and the model before that. One turn later, a conversation has the same names up to
the point where it was continued. The number of tokens in a chunk is learned from the workers' reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest as digest

from baton_api.limits import MESSAGES, PARTS

CHUNK_BYTES = 512
"""Shorter ones find a few tokens more and cost more to look up: a prompt of 32 KB has 64."""

BYTES_PER_TOKEN = 4.0
"""Of prompts, before a worker has reported one: as in English text."""


LABELS = {role: role.encode() for role in ("system", "developer", "user", "assistant", "tool")}
"""Of messages, the usual ones."""


class PromptMessage(msgspec.Struct):
    """The fields of a message that decide the prompt, in any shape."""

    role: Any = None
    content: Any = None
    tool_calls: Any = None


class PromptChunks(msgspec.Struct, frozen=True):
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
    """
    Return the prefix of the first chunk's name.

    Not cached: clients choose the model's name, and a cache would keep names of any length and number.
    """
    return digest(f"{len(salt)}:{salt}{model}".encode(errors="replace"))


def chunk_messages(messages: Sequence[PromptMessage], tools: msgspec.Raw | None, root: int) -> PromptChunks:
    """
    A conversation's chunks. `tools` is their JSON as it came.

    Messages after `MESSAGES.most` are one text: a chunk for each would keep the event loop from its work.
    """
    names: list[int] = []
    sizes: list[int] = []
    answers: list[tuple[int, int]] = []
    name = root
    if tools:
        name = _cut(b"tools", bytes(tools), name, names, sizes)
    for message in messages[: MESSAGES.most]:
        role, content = message.role, message.content
        label = LABELS.get(role) if isinstance(role, str) else repr(role).encode("utf-8", "replace")
        begun = len(names)
        plain = isinstance(content, str) and not message.tool_calls
        text = content.encode("utf-8", "replace") if plain else _text(message)
        name = _cut(label or role.encode("utf-8", "replace"), text, name, names, sizes)
        if role == "assistant":
            answers.append((begun, len(names)))
    if len(messages) > MESSAGES.most:
        _cut(b"", msgspec.json.encode(messages[MESSAGES.most :]), name, names, sizes)
    return PromptChunks(tuple(names), tuple(sizes), tuple(answers))


def chunk_text(text: bytes, root: int) -> PromptChunks:
    """A plain prompt's chunks; its last one, if it is not full, is a chunk too."""
    names: list[int] = []
    sizes: list[int] = []
    _cut(b"", text, root, names, sizes)
    return PromptChunks(tuple(names), tuple(sizes))


def _text(message: PromptMessage) -> bytes:
    content = message.content
    if isinstance(content, str):
        text = content.encode("utf-8", "replace")
    else:
        text = b"" if content is None else _parts(content)
    return text + msgspec.json.encode(message.tool_calls) if message.tool_calls else text


def _parts(content: object) -> bytes:
    """Text parts as text, as a template has them; anything else by its JSON."""
    if not isinstance(content, list) or len(content) > PARTS.most:
        return msgspec.json.encode(content)
    pieces: list[bytes] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else None
        pieces.append(text.encode(errors="replace") if isinstance(text, str) else msgspec.json.encode(part))
    return b"\n".join(pieces)


def _cut(label: bytes, text: bytes, name: int, names: list[int], sizes: list[int]) -> int:
    """
    Add one message, whose end is a chunk's end; gives its last chunk's name.

    A chunk is hashed with the name before it as the seed, a message's first one with its label between.
    """
    size = sizes[-1] if sizes else 0
    end = len(text)
    name = digest(label, name)
    if end <= CHUNK_BYTES:
        name = digest(text, name)
        names.append(name)
        sizes.append(size + end)
        return name
    names += [name := digest(text[at : at + CHUNK_BYTES], name) for at in range(0, end, CHUNK_BYTES)]
    sizes += range(size + CHUNK_BYTES, size + end, CHUNK_BYTES)
    sizes.append(size + end)
    return name
