"""Responses are kept within their bounds, for their owners alone, and continued whatever became of them."""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import Any

import msgspec
import pytest

from baton_api.errors import (
    INTEGER_ABOVE_MAX_VALUE,
    INTEGER_BELOW_MIN_VALUE,
    INVALID_VALUE,
    PREVIOUS_RESPONSE_NOT_FOUND,
    InvalidRequest,
    PreviousResponseNotFound,
    ResponseNotFound,
)
from baton_api.response_items import listed, named, page
from baton_api.response_store import ITEM_OVERHEAD, OVERHEAD, ResponseStore, StoreLimits, Turn, owner

ME, YOU = b"me", b"you"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_store(
    responses: int = 100, bytes: int = 10**9, seconds: float = 60.0
) -> tuple[ResponseStore, Clock]:
    clock = Clock()
    return ResponseStore(StoreLimits(responses, bytes, seconds), clock), clock


def turn(id: str, before: Turn | None = None, text: str = "") -> Turn:
    return Turn(
        id, before, (b'"in %b"' % id.encode(),), b'{"output":["out %b","%b"]}' % (id.encode(), text.encode())
    )


def test_response_is_found_by_its_owner_only() -> None:
    store, _ = make_store()
    kept = turn("a")
    store.put(ME, kept)
    assert store.get(ME, "a") is store.previous(ME, "a") is kept
    for someone, id in [(YOU, "a"), (ME, "b")]:
        with pytest.raises(ResponseNotFound, match=f"'{id}' not found"):
            store.get(someone, id)
        with pytest.raises(PreviousResponseNotFound) as error:
            store.previous(someone, id)
        assert (error.value.param, error.value.code) == (
            "previous_response_id",
            PREVIOUS_RESPONSE_NOT_FOUND,
        )
        with pytest.raises(ResponseNotFound):
            store.delete(someone, id)


def test_items_are_found_by_their_ids_while_their_response_is() -> None:
    store, _ = make_store()
    asked, said = b'{"id":"i1","role":"user"}', b'{"id":"o1"}'
    store.put(ME, Turn("a", None, (asked,), b'{"output":[%b]}' % said))
    store.put(ME, Turn("b", None, (asked,), b'{"output":[]}'))
    store.put(ME, Turn("no object", None, (), b"[]"))

    def reference(id: str) -> bytes:
        return msgspec.json.encode({"type": "item_reference", "id": id})

    new = b'{"content":"item_reference"}'
    assert store.resolved(ME, [reference("o1"), new, reference("i1")]) == [said, new, asked]
    with pytest.raises(InvalidRequest, match="'o1' not found") as error:
        store.resolved(YOU, [new, reference("o1")])
    assert error.value.param == "input[1].id"
    store.delete(ME, "a")
    assert store.resolved(ME, [reference("i1")]) == [asked], "the later response has it too"
    with pytest.raises(InvalidRequest, match="'o1' not found"):
        store.resolved(ME, [reference("o1")])
    store.delete(ME, "b")
    with pytest.raises(InvalidRequest, match="'i1' not found"):
        store.resolved(ME, [reference("i1")])


def test_items_outlive_a_later_response_that_has_them_too() -> None:
    store, _ = make_store()
    first, second = b'{"id":"msg_x","content":"first"}', b'{"id":"msg_x","content":"second"}'
    store.put(ME, Turn("a", None, (), b'{"output":[%b]}' % first))
    store.put(ME, Turn("b", None, (second, second), b'{"output":[]}'))
    reference = msgspec.json.encode({"type": "item_reference", "id": "msg_x"})
    assert store.resolved(ME, [reference]) == [second]
    store.delete(ME, "b")
    assert store.resolved(ME, [reference]) == [first]
    store.delete(ME, "a")
    with pytest.raises(InvalidRequest, match="'msg_x' not found"):
        store.resolved(ME, [reference])


def test_same_id_may_have_two_owners() -> None:
    store, _ = make_store()
    mine, yours = turn("a"), turn("a")
    store.put(ME, mine)
    store.put(YOU, yours)
    store.delete(YOU, "a")
    assert store.get(ME, "a") is mine


def test_conversation_has_all_items_in_order() -> None:
    first = turn("a")
    second = turn("b", first)
    assert second.whole_input == [b'"in a"', b'"out a"', b'""', b'"in b"']
    assert second.conversation == [*second.whole_input, b'"out b"', b'""']


def test_oldest_responses_leave_above_the_count() -> None:
    store, _ = make_store(responses=2)
    for id in "abc":
        store.put(ME, turn(id))
    assert len(store) == 2
    with pytest.raises(ResponseNotFound):
        store.get(ME, "a")
    store.get(ME, "b")


def test_oldest_responses_leave_above_the_size() -> None:
    store, _ = make_store(bytes=3 * (OVERHEAD + ITEM_OVERHEAD + 1000))
    for id in "abcd":
        store.put(ME, turn(id, text="x" * 900))
    assert len(store) == 3
    with pytest.raises(ResponseNotFound):
        store.get(ME, "a")


def test_oversized_response_is_not_stored_and_evicts_nothing() -> None:
    store, _ = make_store(bytes=OVERHEAD + ITEM_OVERHEAD + 100)
    store.put(ME, turn("a"))
    store.put(ME, turn("b", text="x" * 900))
    store.get(ME, "a")
    with pytest.raises(ResponseNotFound):
        store.get(ME, "b")


@pytest.mark.parametrize(
    "bounds", [{"responses": 10}, {"bytes": 10 * (OVERHEAD + ITEM_OVERHEAD + 200)}], ids=str
)
def test_owner_with_most_evicts_its_own_responses(bounds: dict[str, int]) -> None:
    store, _ = make_store(**bounds)
    for number in range(3):
        store.put(ME, turn(f"mine {number}", text="x" * 10))
    before: Turn | None = None
    for number in range(50):
        before = turn(f"yours {number}", before if number % 5 else None, "x" * 100)
        store.put(YOU, before)
    for number in range(3):
        store.get(ME, f"mine {number}")
    store.get(YOU, "yours 49")
    with pytest.raises(ResponseNotFound):
        store.get(YOU, "yours 10")


def test_response_with_a_known_id_replaces_it() -> None:
    store, _ = make_store()
    store.put(ME, turn("a", text="x" * 100))
    store.put(ME, latest := turn("a"))
    assert store.get(ME, "a") is latest
    assert (len(store), store.size) == (1, latest.size)


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


@pytest.mark.parametrize("limits", [{"responses": 0}, {"bytes": 0}, {"seconds": 0.0}], ids=str)
def test_zero_bound_stores_nothing(limits: dict[str, int]) -> None:
    store, _ = make_store(**limits)
    store.put(ME, turn("a"))
    assert (len(store), store.size) == (0, 0)


def test_responses_expire() -> None:
    store, clock = make_store(seconds=60)
    store.put(ME, turn("a"))
    clock.now += 30
    store.put(ME, turn("b"))
    clock.now += 29.9
    store.get(ME, "a")
    clock.now += 0.2
    with pytest.raises(ResponseNotFound):
        store.get(ME, "a")
    store.get(ME, "b")
    clock.now += 30
    with pytest.raises(ResponseNotFound):
        store.delete(ME, "b")
    assert (len(store), store.size) == (0, 0)


def test_successor_of_a_deleted_response_keeps_its_items() -> None:
    store, _ = make_store()
    first = turn("a")
    second = turn("b", first)
    store.put(ME, first)
    store.put(ME, second)
    both = store.size
    store.delete(ME, "a")
    assert store.size == both
    assert store.get(ME, "b").whole_input[0] == b'"in a"'
    store.delete(ME, "b")
    assert store.size == 0


def test_long_conversation_stores_each_turn_once() -> None:
    store, _ = make_store(responses=1000)
    last = None
    sizes = 0
    for number in range(500):
        last = turn(str(number), last, "x" * 100)
        store.put(ME, last)
        sizes += last.size
    assert store.size == sizes


@pytest.mark.parametrize("seed", range(20))
def test_law_bounds_hold_and_nothing_leaks(seed: int) -> None:
    rng = random.Random(seed)
    limit = 30 * (OVERHEAD + ITEM_OVERHEAD + 100)
    store, clock = make_store(responses=20, bytes=limit, seconds=50)
    stored: list[tuple[bytes, Turn]] = []
    for number in itertools.count():
        if number == 300:
            break
        someone = rng.choice([ME, YOU])
        mine = [kept for holder, kept in stored if holder == someone]
        before = rng.choice(mine) if mine and rng.random() < 0.7 else None
        if rng.random() < 0.8:
            added = turn(str(number), before, "x" * rng.randrange(200))
            store.put(someone, added)
            stored.append((someone, added))
        elif before is not None:
            with contextlib.suppress(ResponseNotFound):  # it has gone by itself
                store.delete(someone, before.id)
        clock.now += rng.expovariate(0.5)
        assert len(store) <= 20
        assert store.size <= limit
    clock.now += 1000
    with pytest.raises(ResponseNotFound):
        store.get(ME, "0")
    assert (len(store), store.size) == (0, 0)
    assert not any(kept.holders for _, kept in stored)


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
