"""
Authentication: the tenant of a request, from an API key, a web token, or a batch runner's token.

Three sources can be combined. Keys of `--api-key` and of a key file are for users who trust one another: each
name in the file is a tenant without limits that shares the common cache. A tenants file sets models, classes
and limits. Tokens of an issuer name a tenant, which must be in the tenants file if there is one. A key's name
never means the tenant of the same name.

A runner's token names the owner of its batch: a tenant, a named key, or the digest of a key. The tenant's
models and rights apply to its batch lines, without limits per minute and in the class batch. A batch may use
the models that its creator could use at creation and the tenant may use now. Lines of an owner that lost
access wait until the batch controller cancels the batch.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from baton_api import installing
from baton_api.errors import BatonError, Forbidden, ModelNotFound, NotReady, SetupError, Unauthorized
from baton_api.headers import BATCH_CLASS
from baton_api.inference_paths import PROXIED_PATHS
from baton_api.keys import AUTHORIZATION, HEALTH_PATHS, Keys, bearer, with_authorization
from baton_batches import runner_credentials
from baton_batches.runner_credentials import RunnerSecret
from baton_http.replies import Scope
from baton_router.settings import RouterSettings
from baton_router.tenants.tenants import DEFAULT_TENANT, OPEN_CLASSES, Tenant, Tenants, cache_salt

if TYPE_CHECKING:
    from baton_router.tenants.web_tokens import WebTokens

log = logging.getLogger(__name__)

ANONYMOUS = Tenant(admin=False)
"""The tenant of requests to open paths without a key, where keys are required."""

TENANT = "baton.tenant"
"""Key of a scope: the tenant of the request."""

FOR_TENANTS = frozenset(
    {
        *PROXIED_PATHS,
        "/version", "/openapi.json", "/model_info", "/get_model_info",
        "/dashboard/state", "/dashboard/events",
    }
)  # fmt: skip
"""Paths for every tenant besides /v1; the other ones show or change data of other tenants too."""


class Authenticator:
    """Authenticates requests by keys, tenants and tokens. Belongs to the event loop."""

    def __init__(
        self,
        settings: RouterSettings,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Raises SetupError for files that cannot be used and settings that do not fit one another."""
        self._secret = settings.ticket_secret.encode()
        self._keys = Keys(settings.api_key, settings.api_key_file, clock)
        self.tenants = Tenants(settings.tenants_file, self._secret, clock) if settings.tenants_file else None
        if self.tenants is not None and not self._secret:
            log.warning("Without --ticket-secret, the salts of the tenants' caches can be guessed.")
        self._tokens = self._read_tokens(settings, clock, now) if settings.jwt_jwks else None
        self._runners = RunnerAuthenticator(RunnerSecret(settings, settings.ticket_secret), self.owner, now)
        self._named: dict[str, Tenant] = {"": DEFAULT_TENANT}
        self._reads = 1

    @property
    def required(self) -> bool:
        """Whether a key or a token is required."""
        return self._keys.required or self.tenants is not None or self._tokens is not None

    @property
    def owned_by_tenants(self) -> bool:
        """Whether tenants own files, batches and responses; else API keys own them."""
        return self.tenants is not None or self._tokens is not None

    def authenticated(self, authorization: bytes) -> Tenant | None:
        """Return the tenant of a key; None for a token that is yet to be verified. Raises Unauthorized."""
        key = bearer(authorization)
        sha256 = hashlib.sha256(key).digest()
        if self._keys.required and (name := self._keys.name(sha256)) is not None:
            return self._named.get(name) or self._named.setdefault(name, Tenant(name=name, kind="key"))
        if self.tenants is not None and (tenant := self.tenants.by_key(sha256)) is not None:
            return tenant
        if self._tokens is None or key.count(b".") != 2:
            raise Unauthorized
        if self.tenants is not None and self.tenants.reads != self._reads:
            self._reads = self.tenants.reads
            self._tokens.forget()
        return self._tokens.verified(sha256)

    async def authenticate_token(self, authorization: bytes) -> Tenant:
        """Verify a token and return its tenant. Raises Unauthorized, Forbidden or NotReady."""
        assert self._tokens is not None  # else `authenticated` has raised
        token = bearer(authorization)
        return await self._tokens.verify(token, hashlib.sha256(token).digest())

    async def enter(self, scope: Scope) -> None:
        """
        Authenticate a request, and store its tenant in its scope. `x-api-key` becomes `Authorization`.

        Raises Unauthorized, Forbidden, or NotReady if an issuer's keys cannot be had.
        """
        scope["headers"] = with_authorization(scope["headers"])
        path = scope["path"]
        key = authorization(scope)
        if key.startswith(RUNNER_AUTHORIZATION):
            scope[TENANT] = await self._runners.enter(scope, key)
        elif self.required and path not in HEALTH_PATHS:
            tenant = self.authenticated(key) or await self.authenticate_token(key)
            check_path(tenant, scope["method"], path)
            scope[TENANT] = tenant
        elif self.required:
            scope[TENANT] = ANONYMOUS

    async def close(self) -> None:
        if self._tokens is not None:
            await self._tokens.close()

    def owner(self, owner: bytes) -> Tenant | None:
        """The tenant that owns a batch, as it is now; None if it has lost access."""
        kind, name = owner_name(owner)
        if kind == "tenant":
            return self._by_name(name) if self.owned_by_tenants else None
        if kind == "key":
            return Tenant(name=name, kind="key") if self._keys.has_name(name) else None
        is_key = bool(owner) and self._keys.required and self._keys.name(owner) is not None
        return DEFAULT_TENANT if is_key or not self.required else None

    def refusal(self, owner: bytes) -> str | None:
        """Return why the batches of an owner may not continue; None if they may."""
        if self.owner(owner) is not None:
            return None
        kind, name = owner_name(owner)
        if kind == "tenant":
            return f"The tenant {name!r} is no longer among the tenants of this service."
        return f"The API key {name + ' ' if name else ''}that made this batch is no longer valid."

    def _by_name(self, name: str) -> Tenant | None:
        """The tenant that a token names."""
        if self.tenants is not None:
            return self.tenants.by_name(name)
        salt = cache_salt(self._secret, name)
        return Tenant(name=name, salt=salt, classes=OPEN_CLASSES, admin=False)

    def _read_tokens(
        self, settings: RouterSettings, clock: Callable[[], float], now: Callable[[], float]
    ) -> WebTokens:
        if not settings.jwt_issuer or not settings.jwt_audience:
            raise SetupError(
                "--jwt-jwks wants --jwt-issuer and --jwt-audience as well: "
                "without them, tokens that were made for other services would be good here."
            )
        try:
            from baton_http.jwks import IssuerKeys, key_source
            from baton_router.tenants.web_tokens import TokenRules, WebTokens
        except ModuleNotFoundError as error:
            raise SetupError(f"--jwt-jwks needs one package more: {installing.command('jwt')}.") from error
        algorithms = frozenset(settings.jwt_algorithms)
        rules = TokenRules(
            issuer=settings.jwt_issuer,
            audience=settings.jwt_audience,
            algorithms=algorithms,
            leeway_s=settings.jwt_leeway_s,
            tenant_claim=settings.jwt_tenant_claim,
            models_claim=settings.jwt_models_claim,
            classes_claim=settings.jwt_classes_claim,
        )
        return WebTokens(
            rules, IssuerKeys(key_source(settings.jwt_jwks), algorithms, clock), self._by_name, now
        )


def authorization(scope: Scope) -> bytes:
    """Return the Authorization header; empty without one."""
    for name, value in scope["headers"]:
        if name == AUTHORIZATION:
            return value  # type: ignore[no-any-return]
    return b""


def tenant_of(scope: Scope) -> Tenant:
    """Return the tenant of a request."""
    tenant = scope.get(TENANT, DEFAULT_TENANT)
    assert isinstance(tenant, Tenant)
    return tenant


def error_for(error: BatonError, tenant: Tenant) -> BatonError:
    """The error as this tenant may read it: with its own models, and with addresses for admins only."""
    if isinstance(error, ModelNotFound) and tenant.models is not None:
        return ModelNotFound(error.model, tuple(filter(tenant.may_use, error.served)))
    if error.public and not tenant.admin:
        error.args = (error.public,)
    return error


def batch_models(tenant: Tenant) -> frozenset[str] | None:
    """
    Return the models that a new batch of this tenant may use; None: all.

    Raises Forbidden for a tenant, or a token, without the class batch.
    """
    if BATCH_CLASS not in tenant.classes:
        raise Forbidden(f"create batches: their requests are of the class {BATCH_CLASS}", tenant.name)
    return tenant.models


def check_path(tenant: Tenant, method: str, path: str) -> None:
    """Raise Forbidden for operations that only admins may use."""
    if not tenant.admin and not path.startswith("/v1/") and path not in FOR_TENANTS:
        raise Forbidden(f"{method[:20]} {path[:200]}", tenant.name)


RUNNER_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"})
"""Paths to which a runner may send lines."""

OWNER = "baton.owner"
"""Key of a scope: the owner of the batch to which a request belongs."""

RUNNER_AUTHORIZATION = b"Bearer " + runner_credentials.TOKEN_PREFIX.encode()
"""Prefix of the header that only batch runners send."""

_TENANT = b"tenant:"
_KEY = b"key:"
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


class RunnerAuthenticator:
    """Authenticates requests of batch runners."""

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
        Return the owner of the batch that a runner's request belongs to, and drop the token.

        Raises Unauthorized, NotReady for an owner that has lost access, and StorageUnavailable.
        """
        key = authorization.decode("latin-1").removeprefix("Bearer ")
        token = runner_credentials.read_token(await self._secret.get(), key, self._now())
        if (
            token is None
            or token.epoch == runner_credentials.START_EPOCH
            or scope["path"] not in RUNNER_PATHS
        ):
            raise Unauthorized
        scope[OWNER] = owner = bytes.fromhex(token.owner)
        scope["headers"] = [header for header in scope["headers"] if header[0] != AUTHORIZATION]
        tenant = self._tenant(owner)
        if tenant is None:
            raise NotReady(f"The owner of {token.batch} is no longer let in: the batch is stopped soon.")
        tenant = tenant.narrowed(token.models, None)
        return replace(
            tenant,
            classes=frozenset({BATCH_CLASS}),
            default_class=BATCH_CLASS,
            limits=DEFAULT_TENANT.limits,
        )


def owner_name(owner: bytes) -> tuple[str, str]:
    """The kind and the name of an owner; both empty for the digest of a key without a name."""
    kind, _, name = owner.partition(b":")
    return (kind.decode(), name.decode()) if owner.startswith((_TENANT, _KEY)) else ("", "")


def parse_owner(text: str) -> bytes:
    """
    The owner of files and batches that an administrator writes as text. Raises SetupError.

    >>> parse_owner("tenant:acme"), parse_owner("key:ops")
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
