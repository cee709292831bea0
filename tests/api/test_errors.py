"""Every error has its place in the tree, its status and OpenAI's shape."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from baton_api import errors
from baton_api.errors import (
    MESSAGE_LIMIT,
    BatonError,
    BodyTooLarge,
    ContextTooLong,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PromptTooLarge,
    Unauthorized,
)


def below(root: type[BatonError], depth: int = 0) -> Iterator[tuple[int, type[BatonError]]]:
    yield depth, root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:  # other components may have more particular ones
            yield from below(child, depth + 1)


def test_the_docstring_is_the_tree() -> None:
    """Each class stands there once, under its parent, with its status."""
    assert errors.__doc__ is not None
    drawn = re.findall(r"^( *)[*x+] (\w+) +(\d+)$", errors.__doc__, re.MULTILINE)
    told = sorted((len(indent) // 2, name, int(status)) for indent, name, status in drawn)
    real = sorted((depth, kind.__name__, kind.status) for depth, kind in below(BatonError))
    assert told == real


EXAMPLES: list[BatonError] = [
    InvalidRequest("temperature must be at least 0", param="temperature"),
    ContextTooLong(9000, 10, 8192, param="messages"),
    PromptTooLarge(600, 512, 16),
    Unauthorized(),
    ModelNotFound("gpt-x", ("smollm2",)),
    BodyTooLarge(4096),
    Overloaded(4096, 4096, retry_after=900),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_a_body_has_all_four_fields_of_openai(error: BatonError) -> None:
    body = error.body()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"] == error.message
    assert (body["type"] == "server_error") == (error.status >= 500)


def test_messages_name_the_number_and_the_way_out() -> None:
    assert str(ContextTooLong(9000, 10, 8192, param="messages")) == (
        "This model's maximum context length is 8192 tokens, but the request has 9000 prompt tokens "
        "and 10 to generate. Shorten the prompt or lower max_tokens."
    )
    assert "--kv-cache-memory" in str(PromptTooLarge(600, 512, 16))
    assert "Served here: smollm2." in str(ModelNotFound("gpt-x", ("smollm2",)))


def test_a_long_message_is_cut_before_it_reaches_a_client() -> None:
    assert len(InvalidRequest("x" * 10_000).message) == MESSAGE_LIMIT


@pytest.mark.parametrize("asked, told", [(0, 1), (5, 5), (900, 120)])
def test_retry_after_stays_where_clients_heed_it(asked: int, told: int) -> None:
    assert Overloaded(1, 1, retry_after=asked).retry_after == told
