"""Sizes as people write them."""

from __future__ import annotations

import pytest

from baton_api.sizes import parse_size, show_size


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
def test_a_size_may_have_a_unit(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "-5MB", "5XB", "1,5GB", "five", "1e9"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
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
