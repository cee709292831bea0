"""Tokens of batch runners: valid for one batch and epoch, for a limited time, and not forgeable."""

from __future__ import annotations

import random

import pytest

from baton_batches import runner_credentials
from baton_batches.runner_credentials import RunnerToken

SECRET = b"s" * 32
NOW = 1_800_000_000.0


def test_runner_token_contains_its_batch_and_epoch() -> None:
    token = runner_credentials.issue_token(SECRET, "batch_7", 3, "the owner. Größe", NOW + 60)
    assert runner_credentials.read_token(SECRET, token, NOW) == RunnerToken(
        "batch_7", 3, "the owner. Größe", int(NOW) + 60
    )


@pytest.mark.parametrize("models", [[], ["tiny", "meta-llama/Llama.3 ü"]])
def test_token_lists_the_models_of_its_batch(models: list[str]) -> None:
    token = runner_credentials.issue_token(SECRET, "batch_7", 3, "tenant", NOW + 60, frozenset(models))
    read = runner_credentials.read_token(SECRET, token, NOW)
    assert read is not None and read.models == frozenset(models)


@pytest.mark.parametrize(
    ("secret", "changed", "now"),
    [
        (b"another" * 8, ("", ""), NOW),
        (b"", ("", ""), NOW),
        (SECRET, ("batch_7", "batch_8"), NOW),
        (SECRET, (".3.", ".4."), NOW),
        (SECRET, (".1800000060.", ".1900000060."), NOW),
        (SECRET, (b"tenant".hex(), b"other!".hex()), NOW),
        (SECRET, ("", ""), NOW + 61),
    ],
    ids=[
        "another secret",
        "no secret",
        "another batch",
        "another epoch",
        "later",
        "another owner",
        "expired",
    ],
)
def test_runner_token_opens_nothing_else(secret: bytes, changed: tuple[str, str], now: float) -> None:
    token = runner_credentials.issue_token(SECRET, "batch_7", 3, "tenant", NOW + 60)
    assert runner_credentials.read_token(SECRET, token, NOW)
    assert runner_credentials.read_token(secret, token.replace(*changed), now) is None


def test_unsigned_token_of_an_empty_secret_is_refused() -> None:
    assert (
        runner_credentials.read_token(
            b"", runner_credentials.issue_token(b"", "batch_7", 3, "t", NOW + 60), NOW
        )
        is None
    )


def test_law_arbitrary_text_is_not_a_token() -> None:
    rng = random.Random(1)
    token = runner_credentials.issue_token(SECRET, "batch_7", 3, "tenant", NOW + 60)
    for _ in range(2000):
        letters = list(token)
        for _ in range(rng.randint(1, 3)):
            letters[rng.randrange(len(letters))] = rng.choice("0aZ.é\0 ")
        broken = "".join(letters[: rng.choice((len(letters), rng.randrange(len(letters))))])
        assert broken == token or runner_credentials.read_token(SECRET, broken, NOW) is None
