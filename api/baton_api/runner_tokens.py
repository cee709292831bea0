"""
Runner tokens: signed permissions of the router for one runner, one batch and one epoch, until an expiry.

A runner of batches has no API key and no access to the database. It starts with a token of epoch 0, which
only allows it to request the batch's lease. Its working tokens have the epoch of the lease. If another
runner takes over the lease, the tokens of the previous one become invalid. On the OpenAI paths a token acts
for the batch's owner, in the lowest class. A token with a list of models is valid for these only, because
the creator of the batch could use only those. Every replica of the router has the secret, so each accepts
the tokens of the others.

    bbt1.<expiry, seconds since 1970>.<batch>.<epoch>.<owner in hex>[.<models as JSON in hex>].<signature>

The signature is the HMAC-SHA-256 of the text before it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import dataclass

PREFIX = "bbt1."

START = 0
"""Epoch of a token that only allows requesting the lease."""


@dataclass(frozen=True, slots=True)
class RunnerToken:
    """The content of a token."""

    batch: str
    epoch: int
    owner: str
    """Owner of the batch."""
    expiry: int
    models: frozenset[str] | None = None
    """Models that the batch may use. None: as its owner may."""


def issue(
    secret: bytes, batch: str, epoch: int, owner: str, expiry: float, models: frozenset[str] | None = None
) -> str:
    """Create a token that is valid until `expiry`, rounded up to a second."""
    text = f"{PREFIX}{int(-(-expiry // 1))}.{batch}.{epoch}.{owner.encode().hex()}"
    if models is not None:
        text += f".{json.dumps(sorted(models)).encode().hex()}"
    return f"{text}.{_signature(secret, text)}"


def read(secret: bytes, token: str, now: float) -> RunnerToken | None:
    """Return the content of a valid token. None: the signature is wrong, the token has expired, or `secret`
    is empty.
    """
    text, _, signature = token.rpartition(".")
    expected = _signature(secret, text)
    if not secret or not hmac.compare_digest(signature.encode(), expected.encode()):  # a str must be ASCII
        return None
    _, expiry, batch, epoch, owner, *models = text.split(".")
    allowed = frozenset(json.loads(bytes.fromhex(models[0]))) if models else None
    content = RunnerToken(batch, int(epoch), bytes.fromhex(owner).decode(), int(expiry), allowed)
    return content if now <= content.expiry else None


def _signature(secret: bytes, text: str) -> str:
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
