"""Constraints are compiled once, under limits; one that explodes is rejected, and the next one is served."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from baton_api import limits
from baton_api.errors import INVALID_VALUE, InvalidRequest, Overloaded
from baton_api.sampling import Constraint
from baton_engine.grammar import texts
from baton_engine.grammar.grammars import CACHE_LIMIT, THREADS, Grammars
from tests.engine.grammar.tokenizers import GRAMMARS, TOKENIZER, allowed, ids, make_tokenizer, takes


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    grammars = Grammars(TOKENIZER, compile_s=0.5)
    yield grammars
    grammars.close()


def schema(value: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(value))


def assert_serves(grammars: Grammars, number: int) -> None:
    """A constraint that was not seen before is compiled."""
    matcher = grammars.matcher(Constraint("regex", f"x{number}"), None)
    assert allowed(matcher) == set(ids("x"))


def branching(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "string"}
    for level in range(depth):
        ways = [{"type": "object", "properties": {"a": inner, f"{way}{level}": {}}} for way in "bc"]
        inner = {"anyOf": ways}
    return inner


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        inner = {"type": "object", "properties": {"a": inner}}
    return inner


DOUBLING = "\n".join(f"A{level}: A{level + 1} A{level + 1}" for level in range(60))
CHAIN = "\n".join(f"r{number} ::= r{number + 1}" for number in range(15_000))

ENUM_OF_OBJECTS = [{"a": number, "b": [{"c": str(number)}]} for number in range(5_000)]

EXPLOSIVE = {
    "patterns that must all match": schema(
        {"allOf": [{"type": "string", "pattern": f".*a.{{{number}}}.*"} for number in range(10, 40)]}
    ),
    "a repetition of repetitions": Constraint("regex", "((a{1000}){1000}){1000}"),
    "a large multiple": schema({"type": "integer", "multipleOf": 99_999_989}),
    "terminals that double": Constraint("lark", f"start: A0\n{DOUBLING}\nA60: /[ab]/"),
    "a chain of rules longer than any stack": Constraint("ebnf", f'{CHAIN}\nr15000 ::= "x"\nroot ::= r0'),
    "more ways than a rule can have": Constraint(
        "lark", "start: " + " | ".join(f'"{number}"' for number in range(21_000))
    ),
    "two ways at each of many levels": schema({"allOf": [branching(2) for _ in range(16)]}),
    "a schema too deep": schema(nested(100)),
    "an enumeration of objects": schema({"enum": ENUM_OF_OBJECTS}),
    "thousands of optional properties": schema(
        {"type": "object", "properties": {f"property{number}": {} for number in range(8_000)}}
    ),
    "alternatives that must hold together": schema(
        {"allOf": [{"anyOf": [{"properties": {f"{way}{part}": {}}} for way in "ab"]} for part in range(16)]}
    ),
    "a reference to itself": schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    ),
}


@pytest.mark.parametrize("case", EXPLOSIVE)
def test_grammars_explosive_is_rejected_and_the_next_is_served(grammars: Grammars, case: str) -> None:
    with pytest.raises(InvalidRequest, match="Invalid constraint") as error:
        grammars.check(EXPLOSIVE[case])
    assert len(error.value.message) < 700
    remedy = "leads back to itself" if case == "a reference to itself" else "Make it smaller: fewer"
    assert remedy in error.value.message
    assert_serves(grammars, list(EXPLOSIVE).index(case))


def test_grammars_rejection_is_remembered(grammars: Grammars) -> None:
    constraint = schema({"type": "integer", "multipleOf": 99_999_989})
    with pytest.raises(InvalidRequest):
        grammars.check(constraint)
    before = time.process_time()
    for _ in range(100):
        with pytest.raises(InvalidRequest):
            grammars.check(constraint)
    assert time.process_time() - before < 0.5


LARGE = {
    "500 properties": schema(
        {"type": "object", "properties": {f"property{number}": {} for number in range(500)}}
    ),
    "ten thousand values": schema({"enum": [f"value{number}" for number in range(10_000)]}),
    "recursion": schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}}}}
    ),
    "bounds far apart": schema({"type": "integer", "minimum": -(10**18), "maximum": 10**18 + 7}),
    "very long strings": schema({"type": "string", "minLength": 10_000, "maxLength": 1_000_000}),
    "many items": schema({"type": "array", "items": {"type": "integer"}, "maxItems": 100_000}),
    "at least very many objects": schema(
        {"type": "array", "items": {"properties": {"a": {}, "b": {}}}, "minItems": 50_000}
    ),
    "lists of lists of lists": schema(
        {
            "items": {
                "items": {"items": {"type": "integer"}, "minItems": 100, "maxItems": 1000},
                "minItems": 100,
                "maxItems": 1000,
            },
            "minItems": 100,
            "maxItems": 1000,
        }
    ),
    "sixty levels": schema(nested(60)),
    "an enumeration in each of many properties": schema(
        {
            "properties": {
                f"p{number}": {"enum": [f"v{value}" for value in range(200)]} for number in range(100)
            }
        }
    ),
    "a pattern of thousands of words": schema(
        {"pattern": "^(" + "|".join(f"w{n}x*" for n in range(5_000)) + ")$"}
    ),
    "a pattern of repetitions": schema({"pattern": "^([a-z]{1,100} ){1,1000}$"}),
    "a thousand alternatives": schema(
        {"anyOf": [{"properties": {"kind": {"const": f"k{n}"}}, "required": ["kind"]} for n in range(1_000)]}
    ),
}


@pytest.mark.parametrize("case", LARGE)
def test_grammars_large_constraint_is_served(case: str) -> None:
    GRAMMARS.check(LARGE[case])


WRONG = {
    "an open parenthesis": (Constraint("regex", "("), "unclosed group"),
    "a look ahead": (Constraint("regex", "(?=a)b"), "not supported"),
    "an unknown type": (schema({"type": "poem"}), "is not a type"),
    "a keyword that cannot be enforced": (schema({"uniqueItems": True, "type": "array"}), "uniqueItems"),
    "bounds that exclude one another": (schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
    "a reference to elsewhere": (schema({"$ref": "http://x/y"}), "http://x/y"),
    "no JSON": (Constraint("json_schema", "{"), "Expecting"),
    "half a character": (Constraint("regex", "\ud800"), "surrogate"),
    "another kind": (Constraint("poem", "x"), "kind 'poem'"),
    "no grammar": (Constraint("ebnf", "x"), "expected a rule: its name"),
    "an unknown special token": (Constraint("lark", "start: <nobody>"), "unknown special token"),
    "too much text": (Constraint("regex", "x" * (limits.CONSTRAINT.most + 1)), str(limits.CONSTRAINT.most)),
}


@pytest.mark.parametrize("case", WRONG)
def test_grammars_impossible_is_rejected_with_the_reason(grammars: Grammars, case: str) -> None:
    constraint, reason = WRONG[case]
    with pytest.raises(InvalidRequest) as error:
        grammars.check(constraint)
    assert reason in error.value.message
    assert error.value.code == INVALID_VALUE


def test_grammars_concurrent_checks_compile_once(grammars: Grammars) -> None:
    constraint = Constraint("regex", "(together){3}")
    start, before = threading.Barrier(8), grammars.validator.count

    def ask(_: int) -> None:
        start.wait()
        grammars.check(constraint)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    assert grammars.validator.count == before + 1


def test_grammars_cache_is_bounded(grammars: Grammars) -> None:
    def compilations(*names: str) -> int:
        before = grammars.validator.count
        for name in names:
            grammars.check(Constraint("regex", name))
        return grammars.validator.count - before

    others = [f"n{number}" for number in range(CACHE_LIMIT)]
    assert compilations("first", "first", *others[1:], "first") == CACHE_LIMIT
    assert compilations(others[0], "first") == 1
    assert compilations(others[1]) == 1, "it was not asked for longest, and had to make room"


def test_grammars_dead_validator_process_is_replaced(grammars: Grammars) -> None:
    assert_serves(grammars, 1000)
    process = grammars.validator.process
    assert process is not None
    os.kill(process, signal.SIGKILL)
    assert_serves(grammars, 1001)
    assert grammars.validator.process != process


async def test_grammars_stuck_validator_delays_only_new_constraints() -> None:
    """The event loop's threads are for all requests; constraints wait on threads of their own, in bounds."""
    grammars = Grammars(TOKENIZER, compile_s=60, queue_s=3.0)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    checked = Constraint("regex", "known")
    await grammars.prepare(checked, None)
    process = grammars.validator.process
    assert process is not None
    os.kill(process, signal.SIGSTOP)
    try:
        new = [Constraint("regex", f"new{number}") for number in range(THREADS)]
        waiting = [asyncio.ensure_future(grammars.prepare(constraint, None)) for constraint in new]
        await asyncio.sleep(0)  # each has a thread of its own now, and there are no more
        with pytest.raises(Overloaded):
            await grammars.prepare(Constraint("regex", "one too many"), None)
        assert allowed((await grammars.prepare(checked, None))()) == set(ids("k"))
        assert await asyncio.to_thread(lambda: "free") == "free"
        assert not any(one.done() for one in waiting)
    finally:
        os.kill(process, signal.SIGCONT)
    for matchers in await asyncio.gather(*waiting):
        assert allowed(matchers()) == set(ids("n"))
    grammars.close()


async def test_grammars_tenant_delays_no_other_tenant() -> None:
    """However many constraints of one tenant wait, that of another one is validated next."""
    grammars = Grammars(TOKENIZER, compile_s=60)
    await grammars.prepare(Constraint("regex", "first"), None)
    process, ended = grammars.validator.process, list[str]()
    assert process is not None

    async def prepare(source: str, tenant: str) -> None:
        await grammars.prepare(Constraint("regex", source), None, tenant)
        ended.append(source)

    os.kill(process, signal.SIGSTOP)
    try:
        hostile = [asyncio.ensure_future(prepare(f"a{number}", "a")) for number in range(2 * THREADS)]
        other = asyncio.ensure_future(prepare("b", "b"))
        await asyncio.sleep(0)  # each waits for its turn or for the process
    finally:
        os.kill(process, signal.SIGCONT)
    await asyncio.gather(*hostile, other)
    assert ended.index("b") <= 2
    grammars.close()


async def test_grammars_tenant_that_hangs_up_keeps_its_turn_until_its_thread_is_free() -> None:
    """Otherwise, requests that are sent and abandoned would take all threads."""
    grammars = Grammars(TOKENIZER, compile_s=60)
    await grammars.prepare(Constraint("regex", "first"), None)
    process, before = grammars.validator.process, grammars.validator.count
    assert process is not None
    os.kill(process, signal.SIGSTOP)
    try:
        for number in range(THREADS):
            abandoned = asyncio.ensure_future(grammars.prepare(Constraint("regex", f"a{number}"), None, "a"))
            await asyncio.sleep(0)  # it waits for its turn or for the process
            abandoned.cancel()
            with pytest.raises(asyncio.CancelledError):
                await abandoned
        other = asyncio.ensure_future(grammars.prepare(Constraint("regex", "b"), None, "b"))
        await asyncio.sleep(0)
    finally:
        os.kill(process, signal.SIGCONT)
    await other
    await grammars.prepare(Constraint("regex", "last"), None, "a")
    assert grammars.validator.count == before + 3, "the first of a, b, and the last of a"
    grammars.close()


async def test_grammars_abandoned_request_starts_no_validation() -> None:
    grammars = Grammars(TOKENIZER, compile_s=60)
    await grammars.prepare(Constraint("regex", "first"), None)
    process, before = grammars.validator.process, grammars.validator.count
    assert process is not None
    os.kill(process, signal.SIGSTOP)
    try:
        new = [Constraint("regex", f"new{number}") for number in range(THREADS + 1)]
        *waiting, last = [asyncio.ensure_future(grammars.prepare(constraint, None)) for constraint in new]
        await asyncio.sleep(0)  # all of them have been handed over, the last one to no thread
        last.cancel()
        with pytest.raises(asyncio.CancelledError):
            await last
    finally:
        os.kill(process, signal.SIGCONT)
    await asyncio.gather(*waiting)
    assert grammars.validator.count == before + THREADS
    grammars.close()


def test_white_space_in_json_is_free_but_bounded() -> None:
    source = texts.schema({"type": "object"})
    pretty = json.dumps({"a": {"b": [1, 2]}}, indent=4)
    for text in (pretty, '{"a":1}', '{"a": 1, "b": [1, 2]}', '{\n\t"a": 1\n}'):
        assert takes("json_schema", source, text), text
    for text in ('{"a":  1}', '{\n\n"a":1}', '{"a":\n' + " " * 41 + "1}", '{"a": 1}\n', ' {"a": 1}'):
        assert not takes("json_schema", source, text), text


def test_grammars_model_without_end_of_sequence_is_rejected() -> None:
    endless = Grammars(make_tokenizer(ends=False))
    with pytest.raises(InvalidRequest, match="no end-of-sequence"):
        endless.check(Constraint("regex", "a"))
    assert endless.validator.process is None
