"""Settings that are written as one text."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from baton_api import exposure, texts
from baton_api.texts import JsonObject, Names, Origins


def test_the_examples_are_true() -> None:
    assert doctest.testmod(texts).failed == doctest.testmod(exposure).failed == 0


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("", ()),
        ("a", ("a",)),
        ("a, b ,,c", ("a", "b", "c")),
        (("a,b", "org/c"), ("a", "b", "org/c")),
        ('["a, x", "b"]', ("a", "x", "b")),
    ],
)
def test_names_are_repeated_or_have_commas_between(given: Any, names: tuple[str, ...]) -> None:
    assert TypeAdapter(Names).validate_python(given) == names


@pytest.mark.parametrize("given", ["*", "https://chat.example.org", "http://localhost:3000", '["*"]'])
def test_origins(given: str) -> None:
    assert len(TypeAdapter(Origins).validate_python(given)) == 1


@pytest.mark.parametrize("given", ["chat.example.org", "https://a.example/path", "ftp://a.example", "null"])
def test_what_is_no_origin(given: str) -> None:
    with pytest.raises(ValidationError, match="is no origin"):
        TypeAdapter(Origins).validate_python(given)


def test_an_object_may_be_json() -> None:
    adapter = TypeAdapter[dict[str, Any]](JsonObject)
    assert adapter.validate_python('{"enable_thinking": false}') == {"enable_thinking": False}
    assert adapter.validate_python({"a": 1}) == {"a": 1}
    for wrong in ("{", "[1]", "3"):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)
