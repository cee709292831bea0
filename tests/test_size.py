"""The size check: long files, long functions, repeated class names, and the table."""

from __future__ import annotations

import pytest

from checks import size

CASES = {
    "a file at the limit": ({"a.py": "x = 1\n" * size.FILE_LIMIT}, []),
    "a file above it": ({"a.py": "x = 1\n" * (size.FILE_LIMIT + 1)}, ["long-file"]),
    "a function at the limit": ({"a.py": "def f():\n" + "    x = 1\n" * (size.FUNCTION_LIMIT - 1)}, []),
    "a function above it": ({"a.py": "def f():\n" + "    x = 1\n" * size.FUNCTION_LIMIT}, ["long-function"]),
    "a method above it": (
        {"a.py": "class A:\n  async def f():\n" + "    x = 1\n" * size.FUNCTION_LIMIT},
        ["long-function"],
    ),
    "one class name in two files": ({"a.py": "class A: ...\n", "b.py": "class A: ...\n"}, ["repeated-class"]),
    "private class names": ({"a.py": "class _A: ...\n", "b.py": "class _A: ...\n"}, []),
    "two classes in a file": ({"a.py": "class A:\n  class B: ...\n"}, []),
}


@pytest.mark.parametrize(("sources", "expected"), CASES.values(), ids=CASES)
def test_check_finds_what_exceeds_limits(sources: dict[str, str], expected: list[str]) -> None:
    files = [size.measure(path, source) for path, source in sources.items()]
    assert [finding.rule for finding in size.check(files)] == expected


def test_table_has_longest_file_and_function() -> None:
    files = [
        size.measure("api/baton_api/a.py", "def f():\n    pass\n\n\ndef g(): ...\n"),
        size.measure("api/baton_api/b.py", "x = 1\n"),
    ]
    lines = [line.split() for line in size.table(files).splitlines()]
    assert lines[1:] == [
        ["baton_api", "2", "6", "5", "a.py", "2", "f"],
        ["product", "2", "6", "5", "a.py", "2", "f"],
    ]


def test_read_measures_every_package() -> None:
    read = {file.path.split("/baton_")[0] for file in size.read()}
    assert {"api", "cli", "operator", "router", "runtime/engine"} <= read
