"""
The router's signed word that this runner may work on that batch, in one epoch and until a time.

A runner of batches has no API key and no way to the database. It starts with a token of epoch 0, good for one
thing: to ask for the batch's lease. The lease's epoch stands in the tokens it works with, and who lost the
lease to another runner finds the door closed. On the OpenAI paths such a token speaks for the batch's owner,
in the lowest class. A token that names models is good for no others: its batch was made by somebody who could
use only those. Every replica of the router has the secret, so each takes the others' tokens.

    bbt1.<expiry, seconds since 1970>.<batch>.<epoch>.<owner in hex>[.<models as JSON in hex>].<signature>

The signature is the HMAC-SHA-256 of what stands before it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import dataclass

PREFIX = "bbt1."

START = 0
"""The epoch of a token that is good for asking for the lease only."""


@dataclass(frozen=True, slots=True)
class RunnerToken:
    """What a token says."""

    batch: str
    epoch: int
    owner: str
    """Whose batch it is."""
    expiry: int
    models: frozenset[str] | None = None
    """The models that the batch may use; None if its owner's rights alone decide."""


def issue(
    secret: bytes, batch: str, epoch: int, owner: str, expiry: float, models: frozenset[str] | None = None
) -> str:
    """A token that is good until `expiry`, rounded up to a second."""
    text = f"{PREFIX}{int(-(-expiry // 1))}.{batch}.{epoch}.{owner.encode().hex()}"
    if models is not None:
        text += f".{json.dumps(sorted(models)).encode().hex()}"
    return f"{text}.{_signature(secret, text)}"


def read(secret: bytes, token: str, now: float) -> RunnerToken | None:
    """What `token` says, if it was signed with `secret` and is good still. Without a secret none is."""
    text, _, signature = token.rpartition(".")
    expected = _signature(secret, text)
    if not secret or not hmac.compare_digest(signature.encode(), expected.encode()):  # a str must be ASCII
        return None
    _, expiry, batch, epoch, owner, *models = text.split(".")
    allowed = frozenset(json.loads(bytes.fromhex(models[0]))) if models else None
    said = RunnerToken(batch, int(epoch), bytes.fromhex(owner).decode(), int(expiry), allowed)
    return said if now <= said.expiry else None


def _signature(secret: bytes, text: str) -> str:
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
