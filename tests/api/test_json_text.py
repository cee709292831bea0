"""Bodies of too many JSON values are rejected before they are parsed, whatever stands in their strings."""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import Any

import pytest

from baton_api import json_text, limits
from baton_api.errors import InvalidRequest
from baton_api.json_text import check_values
from tests.seeds import seeds

MOST = limits.VALUES.most

MANY: dict[str, Any] = {
    "objects": [{}] * MOST,
    "arrays": [[5]] * MOST,
    "strings": ["x"] * MOST,
    "names": {f"k{number}": number for number in range(MOST)},
    "messages": {"messages": [{"role": "user", "content": "x"}] * (MOST // 4)},
    "strings of braces": ["{"] * MOST,
}
FEW: dict[str, Any] = {
    "token ids": {"prompt": [5] * 10 * MOST},
    "a long text": {"prompt": "x" * 40 * MOST},
    "a text of braces": {"prompt": '{"a": [1, "b"]}, ' * MOST},
    "a text of quotes": {"prompt": '"' * 10 * MOST},
    "a text of backslashes": {"prompt": '\\"{' * 5 * MOST},
    "texts that end with a backslash": {"prompt": ["{{{{\\", "[[[[\\\\"] * (MOST // 4)},
    "as many as there may be": [""] * (MOST - 1),
}


@pytest.mark.parametrize("case", MANY)
def test_body_of_too_many_values_is_rejected(case: str) -> None:
    with pytest.raises(InvalidRequest, match=f"more than {MOST} objects, arrays and strings"):
        check_values(json.dumps(MANY[case], separators=(",", ":")).encode())


@pytest.mark.parametrize("case", FEW)
def test_body_of_few_values_is_accepted_whatever_its_texts_say(case: str) -> None:
    check_values(json.dumps(FEW[case], separators=(",", ":")).encode())


def test_counting_makes_few_objects() -> None:
    """It is one step of an event loop, which takes as long as the objects that it makes."""
    messages = [{"role": "user", "content": "{[" + "x" * 150}] * (MOST // 6)
    body = json.dumps({"messages": messages}).encode()
    tracemalloc.start()
    try:
        check_values(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2.5 * len(body)


def counted(value: Any) -> int:
    match value:
        case dict():
            return 1 + len(value) + sum(map(counted, value.values()))
        case list():
            return 1 + sum(map(counted, value))
        case str():
            return 1
        case _:
            return 0


@pytest.mark.parametrize("seed", seeds(100, 20))
def test_law_values_are_counted_as_a_parser_counts_them(seed: int) -> None:
    source = random.Random(seed)

    def text() -> str:
        return "".join(source.choices('ab"\\{}[]:,\n\u2028é', k=source.randint(0, 12)))

    def value(depth: int) -> Any:
        kind = source.randrange(6 if depth else 3)
        if kind > 3:
            return [value(depth - 1) for _ in range(source.randint(0, 4))]
        if kind == 3:
            return {text(): value(depth - 1) for _ in range(source.randint(0, 4))}
        return [text(), source.randint(-5, 5), None][kind]

    whole = [value(5) for _ in range(5)]
    body = json.dumps(whole, indent=source.choice([None, 2]), ensure_ascii=source.random() < 0.5)
    assert json_text._values(body.encode(), MOST) == counted(whole)
