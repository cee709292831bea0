"""Valid input files, errors of invalid ones, and the memory for a million lines."""

from __future__ import annotations

import itertools
import json
import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from baton_api.errors import INVALID_TYPE, MISSING_REQUIRED_PARAMETER
from baton_batches import validation
from baton_batches.validation import CustomIds, FileLimits, ValidationResult, repeated, validate
from baton_batches.values import VALIDATION_LIMIT, LineResult

CHAT = "/v1/chat/completions"
BOUNDS = FileLimits(bytes=10**9, lines=1000, line=1000)


def line(name: Any = "a", **more: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": {"model": "tiny"}} | more


def without(field: str) -> dict[str, Any]:
    return {name: value for name, value in line().items() if name != field}


def text(*given: Any) -> bytes:
    return b"".join(one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in given)


def examined(
    content: bytes, bounds: FileLimits = BOUNDS, cut: int = 65536, endpoint: str = CHAT
) -> tuple[ValidationResult, list[LineResult]]:
    kept: list[LineResult] = []
    reads = lambda: (content[at : at + cut] for at in range(0, len(content), cut))  # noqa: E731
    return validate(reads, len(content), endpoint, bounds, kept.extend), kept


BAD: dict[str, tuple[bytes, str, int | None, str | None]] = {
    "no json": (text(line(), b"{nonsense\n"), "invalid_json_line", 2, None),
    "no utf-8": (text(line(), b'{"custom_id":"\xff"}\n'), "invalid_json_line", 2, None),
    "deep": (text(b"[" * 500 + b"\n"), "invalid_json_line", 1, None),
    "no object": (text([1]), "invalid_line", 1, None),
    "no custom_id": (text(line(), without("custom_id")), MISSING_REQUIRED_PARAMETER, 2, "custom_id"),
    "custom_id null": (text(line(None)), MISSING_REQUIRED_PARAMETER, 1, "custom_id"),
    "custom_id a number": (text(line(7)), INVALID_TYPE, 1, "custom_id"),
    "duplicate custom_id": (text(line("a"), line("b"), line("a")), "duplicate_custom_id", 3, "custom_id"),
    "no method": (text(without("method")), MISSING_REQUIRED_PARAMETER, 1, "method"),
    "method GET": (text(line(method="GET")), "invalid_method", 1, "method"),
    "no url": (text(without("url")), MISSING_REQUIRED_PARAMETER, 1, "url"),
    "another endpoint": (text(line(url="/v1/embeddings")), "invalid_url", 1, "url"),
    "no body": (text(without("body")), MISSING_REQUIRED_PARAMETER, 1, "body"),
    "body a list": (text(line(body=[])), INVALID_TYPE, 1, "body"),
    "blank lines only": (b"\n \r\n\t\n", "empty_file", None, None),
    "a bom only": (b"\xef\xbb\xbf", "empty_file", None, None),
    "a long line": (text(line(), line("b", body={"x": "y" * 1000})), "line_too_long", 2, None),
    "a long line without an end": (b"x" * 5000, "line_too_long", 1, None),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("cut", [7, 65536])
def test_bad_lines_are_reported_by_kind(name: str, cut: int) -> None:
    content, code, number, param = BAD[name]
    result, _ = examined(content, cut=cut)
    (error,) = result.errors
    assert (error.code, error.line, error.param) == (code, number, param)
    assert error.message.endswith(".")


GOOD: dict[str, tuple[bytes, int]] = {
    "one line": (text(line()), 1),
    "no end of the last line": (text(line()).rstrip(), 1),
    "crlf": (text(line("a"), line("b")).replace(b"\n", b"\r\n"), 2),
    "a bom": (b"\xef\xbb\xbf" + text(line()), 1),
    "blank lines between": (text(line("a"), b"\n\r\n  \n", line("b"), b"\n"), 2),
    "the tutorials' url": (text(line(url="/chat/completions")), 1),
    "more fields": (text(line(priority=3)), 1),
    "no model": (text(line(body={})), 1),
}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("cut", [1, 65536])
def test_valid_files_are_batches(name: str, cut: int) -> None:
    content, total = GOOD[name]
    result, kept = examined(content, cut=cut)
    assert result == ValidationResult(total, None if name == "no model" else "tiny")
    assert kept == []


def test_lines_without_possible_answer_get_400_and_others_run() -> None:
    result, kept = examined(
        text(line("a", body={"stream": True}), b"\n", line("b"), line("c", body={"stream": True}))
    )
    assert (result.total, result.errors) == (3, ())
    assert [(one.line, one.status) for one in kept] == [(1, 400), (4, 400)]
    assert msgspec.json.decode(kept[0].body)["error"]["param"] == "stream"


def test_bad_lines_are_listed_up_to_a_limit() -> None:
    result, _ = examined(text(*(line(number) for number in range(150))))
    assert [error.line for error in result.errors] == list(range(1, VALIDATION_LIMIT + 1))
    mixed, _ = examined(text(line("a"), b"x\n", line("a"), line(method="GET"), line("a")))
    assert [(error.line, error.code) for error in mixed.errors] == [
        (2, "invalid_json_line"), (3, "duplicate_custom_id"),
        (4, "invalid_method"), (5, "duplicate_custom_id"),
    ]  # fmt: skip


def test_file_limits_are_exact() -> None:
    content = text(*(line(str(number)) for number in range(5)))
    assert examined(content, FileLimits(len(content), 5, 1000))[0].total == 5
    too_many, _ = examined(content, FileLimits(len(content), 4, 1000))
    assert [(error.code, error.line) for error in too_many.errors] == [("too_many_lines", 5)]
    too_large, _ = examined(content, FileLimits(len(content) - 1, 5, 1000))
    assert [(error.code, error.line) for error in too_large.errors] == [("file_too_large", None)]
    longest = len(text(line("0"))) - 1
    assert examined(content, FileLimits(10**9, 5, longest))[0].errors == ()
    assert examined(content, FileLimits(10**9, 5, longest - 1))[0].errors[0].code == "line_too_long"


@pytest.mark.parametrize("seed", range(20))
def test_lines_are_equal_for_any_pieces(seed: int) -> None:
    chance = random.Random(seed)
    parts = [b"a", b"{}", b"\n", b"\r\n", b"\xef\xbb\xbf", b" ", b"xyz"]
    content = b"".join(chance.choice(parts) for _ in range(chance.randrange(40)))

    def cut() -> Iterator[bytes]:
        at = 0
        while at < len(content):
            size = chance.randrange(0, 5)
            yield content[at : at + size]
            at += size

    # Split by hand.
    expected = []
    for number, raw in enumerate(content.split(b"\n"), start=1):
        bare = (raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw).strip()
        if bare:
            expected.append((number, bare))
    assert list(validation.split_lines(cut(), 100)) == expected


@pytest.mark.parametrize("seed", range(10))
def test_duplicate_custom_ids_are_found_exactly(seed: int) -> None:
    chance = random.Random(seed)
    given = [str(chance.randrange(2000)) for _ in range(chance.randrange(1, 200))]
    names = CustomIds()
    for name in given:
        names.add(name)
    repeats = [number for number, _ in repeated(enumerate(given), names.suspects())]
    assert repeats == [number for number, name in enumerate(given) if name in given[:number]]


def test_hash_collision_of_custom_ids_is_not_a_duplicate() -> None:
    assert list(repeated([(1, "a"), (2, "b")], suspects=all_hashes("a", "b"))) == []


def all_hashes(*given: str) -> set[int]:
    names = CustomIds()
    for name in given * 2:
        names.add(name)
    return names.suspects()


def test_large_file_is_never_held_in_memory() -> None:
    one = json.dumps(line("{}", body={"model": "tiny", "x": "y" * 200})).encode() + b"\n"

    def read() -> Iterator[bytes]:
        for start in range(0, 200_000, 500):
            yield b"".join(one.replace(b"{}", b"%d" % number, 1) for number in range(start, start + 500))

    validate(lambda: iter([one]), len(one), CHAT, BOUNDS, list)  # modules loaded once do not count
    tracemalloc.start()
    result = validate(read, 200_000 * len(one), CHAT, FileLimits(10**12, 10**6, 1000), list)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result == ValidationResult(200_000, "tiny")
    assert peak < 8_000_000, "for 60 MB; eight bytes of it are kept for each line"


@pytest.mark.parametrize("blank", [b"\n", b" \n", b"\r\n"])
def test_blank_lines_are_bounded_and_may_separate_lines(blank: bytes) -> None:
    bounds = FileLimits(bytes=10_000_000, lines=100, line=1000)
    separated = b"".join(text(line(str(number))) + blank for number in range(100))
    assert not examined(separated, bounds)[0].errors
    pieces = itertools.chain([text(line("a"))], itertools.repeat(blank * 1000))  # has no end
    (error,) = validate(lambda: pieces, 1_000_000, CHAT, bounds, lambda results: None).errors
    assert (error.code, error.line) == ("too_many_lines", 102)
