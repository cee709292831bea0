"""Reachability of servers, and pages that may call them."""

from __future__ import annotations

import socket

import pytest

from baton_api import exposure
from baton_api.errors import SetupError
from baton_api.exposure import advertised_endpoint, advertised_host, reachable, without_a_key


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
def test_loopback_hosts_are_unreachable_for_others(host: str, others: bool) -> None:
    assert reachable(host) is others


def test_public_server_without_a_key_warns() -> None:
    warning = without_a_key("0.0.0.0", 30000, keyed=False)
    assert warning is not None
    assert "0.0.0.0:30000" in warning and "BATON_API_KEY" in warning and "127.0.0.1" in warning
    assert without_a_key("0.0.0.0", 30000, keyed=True) is None
    assert without_a_key("127.0.0.1", 30000, keyed=False) is None


ROUTES = {socket.AF_INET: "10.0.0.7", socket.AF_INET6: "fd00::7"}
"""Where packets of each family leave the machine of these tests."""


@pytest.mark.parametrize(
    ("host", "advertise", "expected"),
    [
        ("10.0.0.1", "", "10.0.0.1"),
        ("gpu-7.example.org", "", "gpu-7.example.org"),
        ("0.0.0.0", "", "10.0.0.7"),
        ("*", "", "10.0.0.7"),
        ("", "", "10.0.0.7"),
        ("::", "", "fd00::7"),
        ("0.0.0.0", "gpu-7.example.org", "gpu-7.example.org"),
        ("10.0.0.1", "203.0.113.5", "203.0.113.5"),
        ("127.0.0.1", "", "127.0.0.1"),
        ("127.0.0.1", "203.0.113.5", "127.0.0.1"),
    ],
)
def test_advertised_host_is_reachable_by_others(host: str, advertise: str, expected: str) -> None:
    assert advertised_host(host, "--control-host", advertise, ROUTES.get) == expected


def test_advertised_host_unknown_for_wildcard_names_setting() -> None:
    with pytest.raises(SetupError, match=r"--control-host 0\.0\.0\.0.*--advertise-host"):
        advertised_host("0.0.0.0", "--control-host", outgoing=lambda family: None)


@pytest.mark.parametrize(
    "advertise", ["0.0.0.0", "::", "*", "10.0.0.7:7000", "a b", "-a", f"{'a' * 64}.example", "[::1]", "a..b"]
)
@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "127.0.0.1"])
def test_unreachable_advertised_host_is_refused(host: str, advertise: str) -> None:
    with pytest.raises(SetupError, match="--advertise-host"):
        advertised_host(host, "--control-host", advertise, ROUTES.get)


@pytest.mark.parametrize(
    ("endpoint", "advertise", "expected"),
    [
        ("tcp://0.0.0.0:5557", "", "tcp://10.0.0.7:5557"),
        ("tcp://*:5557", "node-7", "tcp://node-7:5557"),
        ("tcp://[::]:5557", "", "tcp://[fd00::7]:5557"),
        ("tcp://127.0.0.1:5557", "node-7", "tcp://127.0.0.1:5557"),
        ("ipc:///run/kv", "node-7", "ipc:///run/kv"),
    ],
)
def test_advertised_endpoint_keeps_port_and_changes_host(
    endpoint: str, advertise: str, expected: str
) -> None:
    assert advertised_endpoint(endpoint, "--kv-events", advertise, ROUTES.get) == expected


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
def test_server_with_keys_admits_pages_of_all_origins(
    named: tuple[str, ...], keyed: bool, allowed: tuple[str, ...]
) -> None:
    assert exposure.allowed_origins(named, keyed) == allowed
