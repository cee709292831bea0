"""Settings that are written as one text."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from baton_api.setting_types import JsonObject, Names, Origins, parse_size, show_size


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
def test_names_may_be_repeated_or_separated_by_commas(given: Any, names: tuple[str, ...]) -> None:
    assert TypeAdapter(Names).validate_python(given) == names


@pytest.mark.parametrize("given", ["*", "https://chat.example.org", "http://localhost:3000", '["*"]'])
def test_origins_are_read_from_settings(given: str) -> None:
    assert len(TypeAdapter(Origins).validate_python(given)) == 1


@pytest.mark.parametrize("given", ["chat.example.org", "https://a.example/path", "ftp://a.example", "null"])
def test_origin_that_is_invalid_is_rejected(given: str) -> None:
    with pytest.raises(ValidationError, match="is not an origin"):
        TypeAdapter(Origins).validate_python(given)


def test_object_may_be_json() -> None:
    adapter = TypeAdapter[dict[str, Any]](JsonObject)
    assert adapter.validate_python('{"enable_thinking": false}') == {"enable_thinking": False}
    assert adapter.validate_python({"a": 1}) == {"a": 1}
    for wrong in ("{", "[1]", "3"):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512MiB", 512 * 2**20),
        ("512Mi", 512 * 2**20),  # as Kubernetes writes it
        ("512 mib", 512 * 2**20),
        ("4GB", 4 * 10**9),
        ("4G", 4 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("2TiB", 2 * 2**40),
        (" 64k ", 64_000),
        ("100b", 100),
    ],
)
def test_size_may_have_a_unit(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "-5MB", "5XB", "1,5GB", "five", "1e9"])
def test_invalid_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="512MiB"):
        parse_size(text)


def test_numbers_are_left_to_the_settings_own_checks() -> None:
    assert parse_size(7) == 7


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (999_600, "1.00 MB"),
        (92_871_040, "92.9 MB"),
        (4 * 10**9, "4.00 GB"),
        (10**15, "1000 TB"),
    ],
)
def test_sizes_are_shown_with_three_digits(count: int, text: str) -> None:
    assert show_size(count) == text
