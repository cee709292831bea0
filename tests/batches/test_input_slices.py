"""Slices of an input file: together they are its lines, each once, with its number."""

from __future__ import annotations

import random

import pytest

from baton_batches.validation import InputCursor, cut_slice


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"\n", []),
        (b"a\nb\n", [(1, b"a"), (2, b"b")]),
        (b"a\nb", [(1, b"a"), (2, b"b")]),
        (b"a\r\nb\r\n", [(1, b"a"), (2, b"b")]),
        (b"\n\na\n \nb", [(3, b"a"), (5, b"b")]),
        (b"\xef\xbb\xbfa\nb", [(1, b"a"), (2, b"b")]),
    ],
    ids=["empty", "blank", "ended", "not ended", "of Windows", "with blank lines", "with a mark"],
)
def test_lines_are_numbered_as_in_an_editor(data: bytes, lines: list[tuple[int, bytes]]) -> None:
    cut, cursor = cut_slice(data, InputCursor(), True, 100)
    assert [(one.number, one.text) for one in cut] == lines
    assert cursor.position == len(data)


def test_incomplete_line_is_left_for_later() -> None:
    cut, cursor = cut_slice(b"aa\nbb\ncc", InputCursor(), False, 100)
    assert [one.text for one in cut] == [b"aa", b"bb"]
    assert cursor == InputCursor(6, 2)
    assert cut_slice(b"cc", cursor, False, 100) == ([], cursor)


@pytest.mark.parametrize("seed", range(20))
def test_law_lines_appear_once_for_any_pieces(seed: int) -> None:
    rng = random.Random(seed)
    texts = [b"" if rng.random() < 0.1 else b"x" * rng.randint(1, 30) for _ in range(200)]
    file = b"\n".join(texts) + rng.choice([b"", b"\n"])
    cut = []
    cursor = InputCursor()
    while cursor.position < len(file):
        data = file[cursor.position : cursor.position + rng.randint(40, 200)]
        end = cursor.position + len(data) == len(file)
        lines, after = cut_slice(data, cursor, end, rng.randint(1, 20))
        assert after.position > cursor.position
        cut += [(line.number, line.text) for line in lines]
        cursor = after
    assert cut == [(n, text) for n, text in enumerate(texts, 1) if text]
