"""Conversations, items and owners of stored responses. Stores: tests/router/test_response_stores.py."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton_api.errors import (
    INTEGER_ABOVE_MAX_VALUE,
    INTEGER_BELOW_MIN_VALUE,
    INVALID_VALUE,
    InvalidRequest,
)
from baton_api.response_items import listed, named, page
from baton_api.response_store import Turn, owner

ME, YOU = b"me", b"you"


def turn(id: str, before: Turn | None = None, text: str = "") -> Turn:
    return Turn(
        id, before, (b'"in %b"' % id.encode(),), b'{"output":["out %b","%b"]}' % (id.encode(), text.encode())
    )


def test_conversation_has_all_items_in_order() -> None:
    first = turn("a")
    second = turn("b", first)
    assert second.whole_input == [b'"in a"', b'"out a"', b'""', b'"in b"']
    assert second.conversation == [*second.whole_input, b'"out b"', b'""']


def test_length_of_a_conversation_is_compared_without_building_it() -> None:
    first = turn("a", text="x" * 100)
    second = turn("b", first)
    size = sum(map(len, second.conversation))
    assert second.is_longer_than(size - 1) and not second.is_longer_than(size)


def test_unknown_fields_of_items_are_not_stored() -> None:
    known: list[dict[str, Any]] = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "e"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "n"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "t"}]},
        {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "y"},
        {"type": "web_search_call", "action": {"type": "search", "query": "q"}},
    ]
    junk = {"junk": "A" * 1000}
    for item in known:
        parts = {
            name: [{**part, **junk} for part in value]
            for name, value in item.items()
            if isinstance(value, list)
        }
        own = {} if item["type"] == "web_search_call" else junk  # stored as it is
        (stored,) = named([{**item, **parts, **own}])
        assert msgspec.json.decode(stored).items() >= item.items()
        assert b"junk" not in stored


def test_key_is_an_owner_and_without_keys_there_is_one() -> None:
    assert owner(b"Bearer one", keyed=True) == owner(b"bearer  one ", keyed=True)
    assert owner(b"Bearer one", keyed=True) != owner(b"Bearer two", keyed=True)
    assert owner(b"Bearer one", keyed=False) == owner(b"", keyed=False)


def test_items_get_ids_types_and_whole_contents() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_mine"}
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho", "id": None},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}], "id": "mine"},
        call,
        {"role": "user", "content": "Hi", "id": 7, "type": None},
    ]
    user, assistant, whole, called, strange = map(msgspec.json.decode, named(items))
    assert user["id"].startswith("msg_")
    assert user["content"] == [{"type": "input_text", "text": "Hi"}]
    assert (user["type"], user["role"], user["status"]) == ("message", "user", "completed")
    assert assistant["content"] == [{"type": "output_text", "text": "Ho", "annotations": []}]
    assert assistant["id"].startswith("msg_")
    assert whole == items[2] | {"status": "completed"}
    assert (strange["id"][:4], strange["type"]) == ("msg_", "message")
    assert called == {**call, "status": "completed"}


def test_text_is_one_message_of_the_user() -> None:
    assert listed("Hi") == [{"type": "message", "role": "user", "content": "Hi"}]
    assert listed([1, 2]) == [1, 2]


ITEMS = [msgspec.json.encode({"id": str(number)}) for number in range(25)]


@pytest.mark.parametrize(
    ("query", "ids", "more"),
    [
        ({}, range(24, 4, -1), True),
        ({"order": "asc"}, range(20), True),
        ({"limit": "100"}, range(24, -1, -1), False),
        ({"order": "asc", "after": "19"}, range(20, 25), False),
        ({"after": "5", "limit": "5"}, range(4, -1, -1), False),
        ({"after": "5", "limit": "4"}, range(4, 0, -1), True),
        ({"after": "0"}, (), False),
    ],
    ids=str,
)
def test_page_has_the_requested_items(query: dict[str, str], ids: range, more: bool) -> None:
    shown = msgspec.json.decode(page(ITEMS, query))
    assert [item["id"] for item in shown["data"]] == [str(id) for id in ids]
    assert shown["has_more"] == more
    assert shown["object"] == "list"
    assert shown["first_id"] == (str(ids[0]) if ids else None)
    assert shown["last_id"] == (str(ids[-1]) if ids else None)


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ({"limit": "0"}, INTEGER_BELOW_MIN_VALUE),
        ({"limit": "101"}, INTEGER_ABOVE_MAX_VALUE),
        ({"limit": "-1"}, INTEGER_BELOW_MIN_VALUE),
        ({"limit": "x"}, INVALID_VALUE),
        ({"limit": "9" * 99}, INVALID_VALUE),
        ({"limit": "²"}, INVALID_VALUE),
        ({"order": "up"}, INVALID_VALUE),
        ({"after": "none"}, INVALID_VALUE),
    ],
    ids=str,
)
def test_invalid_page_is_refused(query: dict[str, str], code: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        page(ITEMS, query)
    assert (error.value.param, error.value.code) == (next(iter(query)), code)
