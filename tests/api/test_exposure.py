"""Which servers others can reach, and which pages may call them."""

from __future__ import annotations

import pytest

from baton_api import origins
from baton_api.exposure import reachable, without_a_key


@pytest.mark.parametrize(
    ("host", "others"),
    [
        ("127.0.0.1", False),
        ("127.3.2.1", False),
        ("::1", False),
        ("localhost", False),
        ("0.0.0.0", True),
        ("::", True),
        ("10.0.0.1", True),
        ("gpu-7.example.org", True),
    ],
)
def test_only_the_loopback_keeps_others_out(host: str, others: bool) -> None:
    assert reachable(host) is others


def test_a_server_without_a_key_is_warned_of_if_others_reach_it() -> None:
    warning = without_a_key("0.0.0.0", 30000, keyed=False)
    assert warning is not None
    assert "0.0.0.0:30000" in warning and "BATON_API_KEY" in warning and "127.0.0.1" in warning
    assert without_a_key("0.0.0.0", 30000, keyed=True) is None
    assert without_a_key("127.0.0.1", 30000, keyed=False) is None


@pytest.mark.parametrize(
    ("named", "keyed", "allowed"),
    [
        ((), True, ("*",)),
        ((), False, ()),
        (("https://a.example",), False, ("https://a.example",)),
        (("https://a.example",), True, ("https://a.example",)),
        (("*",), False, ("*",)),
    ],
)
def test_pages_of_all_origins_are_welcome_where_a_key_is_wanted(
    named: tuple[str, ...], keyed: bool, allowed: tuple[str, ...]
) -> None:
    assert origins.allowed(named, keyed) == allowed
