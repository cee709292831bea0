"""
What a worker says beside a stream so that another one can go on with it, and what that one is told.

Comments between the events carry it (https://html.spec.whatwg.org/multipage/server-sent-events.html), each
behind the events that it speaks of: what came before it is complete. A router that asked for them takes
them out again.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

BEGINS = b": baton-begins "
TOKENS = b": baton-tokens "
ENDED = b" ended"

BODY = "baton_resume"
"""The member of a request's body that holds a `Resumption`."""


class Beginning(msgspec.Struct, frozen=True):
    """What an answer has from its first event to its last, whoever writes them."""

    id: str
    created: int
    seed: int
    cached_tokens: int
    """Of the prompt, as the usage tells it."""


class Resumption(msgspec.Struct, frozen=True):
    """An answer that broke off."""

    beginning: Beginning
    tokens: list[int]
    """All that the client has the text of, from the first one on."""
    ended: bool = False
    """Whether the client has all but the end of the stream."""


def begin_line(beginning: Beginning) -> bytes:
    """Stands before all events."""
    return BEGINS + msgspec.json.encode(beginning) + b"\n\n"


def tokens_line(tokens: Sequence[int], *, ended: bool) -> bytes:
    """
    >>> tokens_line([5, 17], ended=False)
    b': baton-tokens 5,17\\n\\n'
    """
    return TOKENS + ",".join(map(str, tokens)).encode() + (ENDED if ended else b"") + b"\n\n"


def read_tokens(line: bytes) -> tuple[list[int], bool]:
    """The tokens of a whole `tokens_line`, and whether the answer has ended. Raises ValueError."""
    said = line.removeprefix(TOKENS).rstrip(b"\n")
    ended = said.endswith(ENDED)
    numbers = said.removesuffix(ENDED)
    return [int(number) for number in numbers.split(b",")] if numbers else [], ended


def with_resumption(body: bytes, resumption: Resumption) -> bytes:
    """The request once more, for the worker that goes on: a JSON object with one more member."""
    text = body.rstrip()
    comma = b"" if text[1:-1].strip() == b"" else b","
    member = msgspec.json.encode(BODY) + b":" + msgspec.json.encode(resumption)
    return text[:-1] + comma + member + b"}"
