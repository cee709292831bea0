"""
Credentials of batch runners: their tokens, the secret that signs these, and pod tokens of Kubernetes.

The secret comes from the settings or from the shared database. It is not derived from the database URL: that
changes with the password, and routers with the new password would reject runners of routers with the old one.
The first router that needs a secret generates one and stores it beside the ledger. A router without a shared
database keeps its secret in memory; its runners end with it.

A pod of a Job holds a ServiceAccount token that is bound to the pod, valid for an hour at most and only for
this service's routers. It is verified with the API server's public keys, which every account may read. It
opens one thing: the lease of the batch that belongs to the pod's BatchJob. From then on the runner uses a
token of the router, for one batch and one epoch.

A runner token is a signed permission of the router for one runner, one batch and one epoch, until an expiry.
A runner has no API key and no access to the database. It starts with a token of epoch 0, which
only allows it to request the batch's lease. Its working tokens have the epoch of the lease. If another
runner takes over the lease, the tokens of the previous one become invalid. On the OpenAI paths a token acts
for the batch's owner, in the lowest class. A token with a list of models is valid for these only, because
the creator of the batch could use only those. Every replica of the router has the secret, so each accepts
the tokens of the others.

    bbt1.<expiry, seconds since 1970>.<batch>.<epoch>.<owner in hex>[.<models as JSON in hex>].<signature>

The signature is the HMAC-SHA-256 of the text before it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from baton_api import batch_jobs, installing
from baton_api.errors import SetupError, Unauthorized
from baton_batches.settings import BatchSettings

if TYPE_CHECKING:
    from baton_batches.kubernetes import BatchJobApi
    from baton_http.jwks import IssuerKeys
import json
from dataclasses import dataclass

SECRET_NAME = "runner tokens"

SECRET_BYTES = 32

_PROCESS_SECRET = secrets.token_bytes(SECRET_BYTES)
"""The secret of a router that was given none: made before it forks, so that its processes share it."""


def secret_of(settings: BatchSettings, ticket_secret: str) -> bytes | None:
    """The secret that the settings give; None if it is in the database."""
    if given := settings.batch_secret.get_secret_value():
        return given.encode()
    if settings.database.get_secret_value():
        return None
    if ticket_secret:
        return hmac.new(ticket_secret.encode(), b"baton-batch-runners", hashlib.sha256).digest()
    return _PROCESS_SECRET


class RunnerSecret:
    """One process's. Belongs to its event loop, but for `value`."""

    def __init__(self, settings: BatchSettings, ticket_secret: str) -> None:
        """Connects to nothing yet."""
        self._url = settings.database.get_secret_value()
        self._loading = asyncio.Lock()
        self.value = secret_of(settings, ticket_secret) or b""
        """Empty until `get` has read it from the database: no token is good then."""

    async def get(self) -> bytes:
        """Raises StorageUnavailable if it is in a database that does not answer."""
        if not self.value:
            async with self._loading:
                self.value = self.value or await asyncio.to_thread(stored_secret, self._url)
        return self.value


def stored_secret(url: str) -> bytes:
    """The secret in the database at `url`, created if missing. Raises StorageUnavailable."""
    # Imported here: processes that only proxy requests do not need SQLAlchemy.
    from sqlalchemy import select

    from baton_batches.database import Database
    from baton_batches.tables import insert_new, kept_secrets

    wanted = select(kept_secrets.c.value).where(kept_secrets.c.name == SECRET_NAME)
    with closing(Database(url)) as database, database.writing() as connection:
        new = {"name": SECRET_NAME, "value": secrets.token_hex(SECRET_BYTES)}
        connection.execute(insert_new(connection, kept_secrets).values(new))
        return bytes.fromhex(connection.execute(wanted).scalar_one())


ALGORITHMS = frozenset({"RS256", "RS384", "RS512", "ES256", "ES384", "ES512"})

LEEWAY_S = 10.0
"""Maximum difference of the clocks, in seconds."""


class PodTokens:
    """Verifies the tokens of one service's runners. Belongs to the event loop."""

    def __init__(self, keys: IssuerKeys, cluster: BatchJobApi, service: str) -> None:
        self._keys = keys
        self._cluster = cluster
        self._service = service

    async def job(self, token: str) -> str:
        """
        The BatchJob whose pod has this token.

        Raises Unauthorized, and NotReady if the API server's keys cannot be had.
        """
        import jwt

        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, ValueError) as error:
            raise Unauthorized(token="is not well formed") from error
        self._keys.refresh()
        key = await self._keys.find(str(header.get("kid", "")))
        if key is None or header.get("alg") != key.algorithm_name:
            raise Unauthorized(token="is signed with a key that is not the API server's")
        try:
            namespace = self._cluster.namespace()
            claims = jwt.decode(
                token,
                key,
                algorithms=sorted(ALGORITHMS),
                audience=batch_jobs.audience(namespace, self._service),
                leeway=LEEWAY_S,
                options={"require": ["exp", "aud", "sub"], "verify_iat": False},
            )
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, OSError) as error:
            raise Unauthorized(token=f"is not for runners of {self._service} now: {error}") from error
        account = f"system:serviceaccount:{namespace}:{batch_jobs.account(self._service)}"
        job = batch_jobs.job_of(_pod(claims))
        if claims["sub"] != account or not job:
            raise Unauthorized(token=f"is of no pod of a BatchJob of {self._service}")
        return job

    async def close(self) -> None:
        await self._keys.close()


def pod_tokens(cluster: BatchJobApi, service: str, clock: Callable[[], float] = time.monotonic) -> PodTokens:
    """Raises SetupError if what it needs is not installed."""
    try:
        from baton_http.jwks import IssuerKeys
    except ModuleNotFoundError as error:
        raise SetupError(f"--batch-jobs needs one package more: {installing.command('jwt')}.") from error
    return PodTokens(IssuerKeys(cluster.keys, ALGORITHMS, clock), cluster, service)


def _pod(claims: Mapping[str, Any]) -> str:
    """The pod that a token is bound to; empty if it is bound to none."""
    bound = claims.get("kubernetes.io")
    pod = bound.get("pod") if isinstance(bound, dict) else None
    name = pod.get("name") if isinstance(pod, dict) else None
    return name if isinstance(name, str) else ""


TOKEN_PREFIX = "bbt1."

START_EPOCH = 0
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


def issue_token(
    secret: bytes, batch: str, epoch: int, owner: str, expiry: float, models: frozenset[str] | None = None
) -> str:
    """Create a token that is valid until `expiry`, rounded up to a second."""
    text = f"{TOKEN_PREFIX}{int(-(-expiry // 1))}.{batch}.{epoch}.{owner.encode().hex()}"
    if models is not None:
        text += f".{json.dumps(sorted(models)).encode().hex()}"
    return f"{text}.{_signature(secret, text)}"


def read_token(secret: bytes, token: str, now: float) -> RunnerToken | None:
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
