"""A ticket opens one session at one prefill worker for a minute, and nothing else."""

from __future__ import annotations

import random

import pytest

from baton_api import tickets

SECRET = b"secret"
SESSION = "chat.1-é"
PREFILL = "10.0.0.7:7000"
NOW = 1_700_000_000.0


def refusal(ticket: str, **changes: object) -> str | None:
    fields: dict[str, object] = {
        "secret": SECRET,
        "ticket": ticket,
        "session": SESSION,
        "prefill": PREFILL,
        "now": NOW,
        **changes,
    }
    return tickets.refusal(**fields)  # type: ignore[arg-type]


GOOD = tickets.issue(SECRET, SESSION, PREFILL, NOW)


def test_ticket_admits_its_session() -> None:
    assert refusal(GOOD) is None


def test_worker_without_a_secret_admits_all() -> None:
    assert refusal("", secret=b"") is None


def test_ticket_is_valid_for_its_time_plus_clock_skew() -> None:
    last = NOW + tickets.LIFETIME_S + tickets.CLOCK_SKEW_S
    assert refusal(GOOD, now=last) is None
    assert refusal(GOOD, now=last + 1) == f"the ticket expired {tickets.CLOCK_SKEW_S + 1:.0f} s ago"


REFUSED: dict[str, tuple[str, dict[str, object], str]] = {
    "no ticket": ("", {}, "was not signed for 10.0.0.7:7000"),
    "another session": (GOOD, {"session": "other"}, "not for session other"),
    "another prefill worker": (GOOD, {"prefill": "10.0.0.8:7000"}, "was not signed for 10.0.0.8:7000"),
    "another secret": (GOOD, {"secret": b"other"}, "was not signed"),
    "a later expiry": (GOOD.replace("v1.17", "v1.27"), {}, "was not signed"),
    "another version": (GOOD.replace("v1", "v2"), {}, "was not signed"),
    "not ASCII": ("v1.1.ü.é", {}, "was not signed"),
    "dots": ("....", {}, "was not signed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_forged_ticket_is_refused(case: str) -> None:
    ticket, changes, message = REFUSED[case]
    answer = refusal(ticket, **changes)
    assert answer is not None
    assert message in answer


def test_law_no_change_of_any_character_is_admitted() -> None:
    chance = random.Random(2)
    for _ in range(2000):
        letters = list(GOOD)
        place = chance.randrange(len(letters))
        letters[place] = chance.choice([c for c in "0123456789abcdef.vé\x00" if c != letters[place]])
        assert refusal("".join(letters)) is not None
