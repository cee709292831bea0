"""
How runners of batches get past the router's door: by a token, as their batch's owner and in the lowest class.

A runner has no key of the owner's, and no keys are kept. Its token names the owner, who is a tenant or, where
keys are nobody's in particular, a key's digest. What holds for the tenant holds for the lines of its batches,
except for limits per minute: a batch has all day, and takes what capacity is left. A batch may use the models
that its maker could use when it was made and the tenant can use now. The lines of an owner who is no longer
let in wait until the batch controller stops the batch.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from baton_api import runner_tokens
from baton_api.errors import NotReady, SetupError, Unauthorized
from baton_batches.runner_secret import RunnerSecret
from baton_router.tenants.tenants import NOBODY, Tenant

PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"})
"""Where a runner may send lines."""

OWNER = "baton.owner"
"""Where a scope says for whose batch a request is."""

BATCH = "batch"
"""The class of all that runners send."""

SIGNED = b"Bearer " + runner_tokens.PREFIX.encode()
"""How the header of a runner begins, and nobody else's."""

_TENANT = b"tenant:"
_KEY = b"key:"
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


class RunnersAccess:
    """Lets runners' requests in."""

    def __init__(
        self,
        secret: RunnerSecret,
        tenant: Callable[[bytes], Tenant | None],
        now: Callable[[], float] = time.time,
    ) -> None:
        """`tenant` finds the tenant that is this owner; None if the owner is no longer let in."""
        self._secret = secret
        self._tenant = tenant
        self._now = now

    async def enter(self, scope: Any, authorization: bytes) -> Tenant:
        """
        Whose batch a request with this header is of; the token goes no further.

        Raises Unauthorized, NotReady for an owner who is no longer let in, and StorageUnavailable.
        """
        key = authorization.decode("latin-1").removeprefix("Bearer ")
        token = runner_tokens.read(await self._secret.get(), key, self._now())
        if token is None or token.epoch == runner_tokens.START or scope["path"] not in PATHS:
            raise Unauthorized
        scope[OWNER] = owner = bytes.fromhex(token.owner)
        scope["headers"] = [header for header in scope["headers"] if header[0] != b"authorization"]
        tenant = self._tenant(owner)
        if tenant is None:
            raise NotReady(f"The owner of {token.batch} is no longer let in: the batch is stopped soon.")
        tenant = tenant.narrowed(token.models, None)
        return replace(tenant, classes=frozenset({BATCH}), default_class=BATCH, limits=NOBODY.limits)


def named_owner(owner: bytes) -> tuple[str, str]:
    """The kind and the name of an owner; both empty for the digest of a key without a name."""
    kind, _, name = owner.partition(b":")
    return (kind.decode(), name.decode()) if owner.startswith((_TENANT, _KEY)) else ("", "")


def owner_of(text: str) -> bytes:
    """
    The owner of files and batches that an administrator writes as text. Raises SetupError.

    >>> owner_of("tenant:acme"), owner_of("key:ops")
    (b'tenant:acme', b'key:ops')
    """
    kind, _, name = text.partition(":")
    if name and kind in ("tenant", "key"):
        return text.encode()
    if kind == "sha256" and _DIGEST.fullmatch(name):
        return bytes.fromhex(name)
    raise SetupError(
        f"Invalid owner {text!r}. Expected tenant:NAME, key:NAME for a key that the key file names, or "
        "sha256:HEX for the digest of a key without a name."
    )
