"""
JSON web tokens (RFC 7519) instead of API keys: an issuer signs the name of the tenant.

A token is valid if one of its issuer's published keys signed it, with an allowed algorithm that is also the
key's own. Its audience must be this service, and it must not have expired. Valid tokens are remembered by
their digests until they expire, so that a known token costs one lookup.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jwt

from baton_api.errors import Forbidden, Unauthorized
from baton_http.jwks import IssuerKeys
from baton_router.tenants.tenants import Tenant

REMEMBERED_LIMIT = 10_000
"""Maximum remembered tokens; the least recently used one is dropped first."""

NAME_LIMIT = 128
"""Characters of a tenant's name that a token says."""

_TOKEN_ERRORS: tuple[tuple[type[Exception], str], ...] = (
    (jwt.ExpiredSignatureError, "has expired"),
    (jwt.ImmatureSignatureError, "is not valid yet"),
    (jwt.InvalidAudienceError, "is meant for another service: its aud is not this service"),
    (jwt.InvalidIssuerError, "is of another issuer"),
    (jwt.MissingRequiredClaimError, "lacks a claim that it must have: exp, iss and aud"),
    (jwt.InvalidAlgorithmError, "is signed with an algorithm that is not allowed"),
    (jwt.InvalidSignatureError, "has a wrong signature"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """Requirements on a token, and the names of the claims that are read."""

    issuer: str
    audience: str
    algorithms: frozenset[str]
    leeway_s: float
    """Maximum difference of the clocks, in seconds."""
    tenant_claim: str
    models_claim: str = ""
    """Empty: tokens do not narrow what models their tenant may use."""
    classes_claim: str = ""


class WebTokens:
    """Verifies tokens and finds their tenants. Belongs to the event loop."""

    def __init__(
        self,
        rules: TokenRules,
        keys: IssuerKeys,
        tenant: Callable[[str], Tenant | None],
        now: Callable[[], float],
        remembered: int = REMEMBERED_LIMIT,
    ) -> None:
        """`tenant` finds a tenant by its name; `now` is in seconds since 1970."""
        self._limit = remembered
        self._rules = rules
        self._keys = keys
        self._tenant = tenant
        self._now = now
        self._judged_by = keys.changes
        self._remembered: OrderedDict[bytes, tuple[Tenant, float]] = OrderedDict()
        """Digest of a token -> its tenant and its expiry."""

    def verified(self, sha256: bytes) -> Tenant | None:
        """Return the tenant of a token that was verified before and is still valid."""
        self._keys.refresh()  # else tokens of a withdrawn key would stay valid here
        if self._judged_by != self._keys.changes:
            self.forget()
        remembered_tenant = self._remembered.get(sha256)
        if remembered_tenant is None:
            return None
        tenant, until = remembered_tenant
        if self._now() >= until:
            del self._remembered[sha256]
            return None
        self._remembered.move_to_end(sha256)
        return tenant

    def forget(self) -> None:
        """Forget all verified tokens."""
        self._remembered.clear()
        self._judged_by = self._keys.changes

    async def close(self) -> None:
        await self._keys.close()

    async def verify(self, token: bytes, sha256: bytes) -> Tenant:
        """Return a token's tenant. Raises Unauthorized, Forbidden, or NotReady without the issuer's keys."""
        header = _header(token)
        key = await self._keys.find(str(header.get("kid", "")))
        if key is None:
            raise Unauthorized(token="is signed with a key that its issuer does not show")
        claims = self._claims(token, header, key)
        tenant = self._tenant_of(claims)
        self.verified(sha256)  # forgets, if the keys have changed
        self._remembered[sha256] = tenant, float(claims["exp"]) + self._rules.leeway_s
        if len(self._remembered) > self._limit:
            self._remembered.popitem(last=False)
        return tenant

    def _claims(self, token: bytes, header: Mapping[str, Any], key: jwt.PyJWK) -> dict[str, Any]:
        if header.get("alg") != key.algorithm_name:
            raise Unauthorized(token="is signed with an algorithm that is not its key's")
        rules = self._rules
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=sorted(rules.algorithms),
                audience=rules.audience,
                issuer=rules.issuer,
                leeway=rules.leeway_s,
                options={"require": ["exp", "iss", "aud"], "verify_iat": False},
            )
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError) as error:
            wrong = next(
                (text for kind, text in _TOKEN_ERRORS if isinstance(error, kind)), "is not well formed"
            )
            raise Unauthorized(token=wrong) from error
        return claims

    def _tenant_of(self, claims: Mapping[str, Any]) -> Tenant:
        rules = self._rules
        name = claims.get(rules.tenant_claim)
        if not isinstance(name, str) or not 0 < len(name) <= NAME_LIMIT or not name.isprintable():
            raise Unauthorized(token=f"names no tenant in its claim {rules.tenant_claim!r}")
        tenant = self._tenant(name)
        if tenant is None:
            raise Forbidden("use this service: it is not among its tenants", name)
        tenant = tenant.narrowed(
            _claim_values(claims, rules.models_claim), _claim_values(claims, rules.classes_claim)
        )
        if not tenant.classes:
            raise Forbidden(f"send requests of the classes in the token's {rules.classes_claim!r}", name)
        return tenant


def _header(token: bytes) -> dict[str, Any]:
    try:
        return jwt.get_unverified_header(token)
    except (jwt.PyJWTError, ValueError) as error:
        raise Unauthorized(token="is not well formed") from error


def _claim_values(claims: Mapping[str, Any], claim: str) -> list[str] | None:
    """A claim's texts: a list of them, or one with blanks between; None if tokens need not have it."""
    if not claim:
        return None
    given = claims.get(claim)
    if isinstance(given, str):
        return given.split()
    return [one for one in given if isinstance(one, str)] if isinstance(given, list) else []
