"""Tokens: which are believed, whose they are, and what is asked of their issuer."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from baton_api.errors import Forbidden, NotReady, SetupError, Unauthorized
from baton_http import jwks
from baton_http.jwks import REFRESH_S, RETRY_S, UNKNOWN_KEY_S, IssuerKeys
from baton_router.tenants.tenants import Tenant
from baton_router.tenants.web_tokens import TokenRules, WebTokens
from tests.router.issuer import AUDIENCE, ISSUER, Issuer
from tests.router.running import until

ALGORITHMS = frozenset({"RS256", "ES256", "EdDSA"})
TENANTS = {"acme": Tenant(name="acme", models=frozenset({"m1", "m2"}), admin=False)}


class Reader:
    """Tokens of one issuer, with clocks that the test advances."""

    def __init__(self, issuer: Issuer, remembered: int = 100, **rules: Any) -> None:
        self.seconds = 1000.0
        self.now = time.time()
        self.keys = IssuerKeys(issuer.fetch, ALGORITHMS, lambda: self.seconds)
        message = {"leeway_s": 30.0, "tenant_claim": "sub", "algorithms": ALGORITHMS, **rules}
        self.tokens = WebTokens(
            TokenRules(issuer=ISSUER, audience=AUDIENCE, **message),
            self.keys,
            TENANTS.get,
            lambda: self.now,
            remembered,
        )

    def cached(self, token: str) -> Tenant | None:
        return self.tokens.verified(digest(token))

    async def judge(self, token: str) -> Tenant:
        return await self.tokens.verify(token.encode(), digest(token))


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
async def test_token_is_verified_once_and_then_cached(algorithm: str) -> None:
    issuer = Issuer()
    issuer.add("one", algorithm)
    reader = Reader(issuer)
    token = issuer.token("one")
    assert reader.cached(token) is None
    assert await reader.judge(token) == TENANTS["acme"]
    assert reader.cached(token) == TENANTS["acme"] and issuer.fetches == 1
    reader.now += 300 + 29
    assert reader.cached(token) is not None
    reader.now += 2
    assert reader.cached(token) is None


def unsigned(issuer: Issuer) -> str:
    claims = issuer.token().split(".")[1]
    nothing = base64.urlsafe_b64encode(b'{"alg":"none","kid":"rsa"}').rstrip(b"=").decode()
    return f"{nothing}.{claims}."


def signed_with_the_public_key(issuer: Issuer) -> str:
    """The known attack: the public key as a shared secret."""
    public = issuer.keys["rsa"][1].public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    header = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"rsa"}').rstrip(b"=")
    text = header + b"." + issuer.token().split(".")[1].encode()
    signature = base64.urlsafe_b64encode(hmac.digest(public, text, "sha256")).rstrip(b"=")
    return (text + b"." + signature).decode()


def tampered(issuer: Issuer) -> str:
    header, _, signature = issuer.token().split(".")
    return ".".join((header, issuer.token(sub="umbrella").split(".")[1], signature))


BAD: dict[str, tuple[Callable[[Issuer], str], str]] = {
    "expired": (lambda one: one.token(exp=time.time() - 31), "has expired"),
    "too early": (lambda one: one.token(nbf=time.time() + 40), "is not valid yet"),
    "of another issuer": (lambda one: one.token(iss="https://other.example"), "is of another issuer"),
    "for another audience": (lambda one: one.token(aud=["billing"]), "is meant for another service"),
    "without an end": (lambda one: one.token(exp=None), "lacks a claim"),
    "without an audience": (lambda one: one.token(aud=None), "lacks a claim"),
    "without an issuer": (lambda one: one.token(iss=None), "lacks a claim"),
    "without a tenant": (lambda one: one.token(sub=None), "names no tenant in its claim 'sub'"),
    "of a tenant with a line break": (lambda one: one.token(sub="a\nb"), "names no tenant"),
    "unsigned": (unsigned, "algorithm"),
    "signed with the public key as a secret": (signed_with_the_public_key, "algorithm"),
    "tampered with": (tampered, "has a wrong signature"),
    "signed by nobody known": (lambda one: one.token(headers={"kid": "other"}), "does not show"),
    "no token": (lambda one: "a.b.c", "is not well formed"),
    "no text": (lambda one: "\u00ff.\u00fe.", "is not well formed"),
}


@pytest.mark.parametrize(("forge", "message"), BAD.values(), ids=BAD)
async def test_bad_token_is_refused_with_the_reason(forge: Callable[[Issuer], str], message: str) -> None:
    issuer = Issuer()
    reader = Reader(issuer)
    token = forge(issuer)
    with pytest.raises(Unauthorized, match=message) as caught:
        await reader.judge(token)
    assert caught.value.code == Unauthorized.code and reader.cached(token) is None


async def test_clocks_may_differ_a_little() -> None:
    issuer = Issuer()
    for token in (issuer.token(exp=time.time() - 20), issuer.token(nbf=time.time() + 20)):
        assert await Reader(issuer).judge(token)


async def test_unknown_tenant_is_forbidden() -> None:
    issuer = Issuer()
    with pytest.raises(Forbidden, match="'umbrella' may not use this service"):
        await Reader(issuer).judge(issuer.token(sub="umbrella"))


async def test_claims_restrict_the_tenant() -> None:
    issuer = Issuer()
    reader = Reader(issuer, tenant_claim="org", models_claim="models", classes_claim="scope")
    tenant = await reader.judge(issuer.token(org="acme", models=["m2", "m3", 4], scope="batch openid"))
    assert (tenant.name, tenant.models, tenant.classes) == ("acme", frozenset({"m2"}), frozenset({"batch"}))
    none = await reader.judge(issuer.token(org="acme", scope="batch"))
    assert none.models == frozenset()  # the claim is looked for, and not there
    with pytest.raises(Forbidden, match="classes in the token's 'scope'"):
        await reader.judge(issuer.token(org="acme", models=["m1"], scope="openid"))


async def test_unknown_key_is_fetched_at_most_once_a_minute() -> None:
    issuer = Issuer()
    reader = Reader(issuer)
    await reader.judge(issuer.token())
    issuer.add("new", "ES256")
    for _ in range(3):
        with pytest.raises(Unauthorized, match="does not show"):
            await reader.judge(issuer.token("new"))
    assert issuer.fetches == 1
    reader.seconds += UNKNOWN_KEY_S
    both = await asyncio.gather(*(reader.judge(issuer.token("new")) for _ in range(5)))
    assert [one.name for one in both] == ["acme"] * 5 and issuer.fetches == 2


async def test_withdrawn_key_is_no_longer_accepted() -> None:
    issuer = Issuer()
    issuer.add("old", "EdDSA")
    reader = Reader(issuer)
    token = issuer.token("old")
    await reader.judge(token)
    del issuer.keys["old"]
    reader.seconds += REFRESH_S
    assert reader.cached(token) is not None  # asks for the keys, beside
    await until(lambda: reader.cached(token) is None)
    with pytest.raises(Unauthorized):
        await reader.judge(token)


async def test_unreachable_issuer_keeps_the_keys_or_gives_503() -> None:
    issuer = Issuer()
    issuer.down = True
    reader = Reader(issuer)
    token = issuer.token()
    for _ in range(2):
        with pytest.raises(NotReady, match="cannot be had from their issuer"):
            await reader.judge(token)
    assert issuer.fetches == 1
    issuer.down = False
    reader.seconds += RETRY_S
    await reader.judge(token)
    issuer.down = True
    reader.seconds += REFRESH_S
    assert reader.cached(token) is not None
    await until(lambda: issuer.fetches == 3)
    await reader.tokens.close()
    assert reader.cached(token) is not None


async def test_token_cache_is_bounded() -> None:
    issuer = Issuer()
    issuer.add("quick", "EdDSA")
    reader = Reader(issuer, remembered=2)
    first, second, third = (issuer.token("quick", jti=name) for name in "abc")
    await reader.judge(first)
    await reader.judge(second)
    assert reader.cached(first)  # seen again, and so not the next to go
    await reader.judge(third)
    assert [reader.cached(one) is not None for one in (first, second, third)] == [True, False, True]


def test_keys_for_other_uses_are_ignored() -> None:
    issuer = Issuer()
    public = msgspec.json.decode(issuer.shown())["keys"][0]
    secret = {"kty": "oct", "k": "c2VjcmV0", "kid": "secret", "alg": "HS256"}
    strange = [
        secret,
        {**secret, "alg": "RS256"},
        {**public, "kid": "encrypts", "use": "enc"},
        {**public, "kid": "none", "alg": "none"},
        {**public, "kid": "other", "alg": "RS512"},
        {"kty": "RSA", "kid": "broken"},
        {"kid": "empty"},
    ]
    assert list(jwks.read_key_set(msgspec.json.encode({"keys": [*strange, public]}), ALGORITHMS)) == ["rsa"]
    for text in (b"", b"[]", b'{"keys": 1}', b"\xff"):
        with pytest.raises(SetupError, match="Invalid set of keys"):
            jwks.read_key_set(text, ALGORITHMS)


async def test_token_without_key_id_uses_the_only_key() -> None:
    issuer = Issuer()
    assert await Reader(issuer).judge(issuer.token(headers={"kid": None}))
    issuer.add("second", "ES256")
    with pytest.raises(Unauthorized):
        await Reader(issuer).judge(issuer.token(headers={"kid": None}))


async def test_keys_are_read_from_a_file_or_url(tmp_path: Path) -> None:
    issuer = Issuer()
    file = tmp_path / "jwks.json"
    with pytest.raises(SetupError, match="neither an http address nor a file"):
        jwks.key_source(str(file))
    file.write_bytes(issuer.shown())
    assert await jwks.key_source(str(file))() == issuer.shown()

    async def show(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + issuer.shown())
        writer.close()

    server = await asyncio.start_server(show, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert await jwks.key_source(f"http://127.0.0.1:{port}/jwks")() == issuer.shown()
    with pytest.raises(OSError):
        await jwks.key_source(f"http://127.0.0.1:{port}/jwks")()


def test_library_enforces_the_allowed_algorithms() -> None:
    """`algorithms` is an allow-list even where a key says another one."""
    issuer = Issuer()
    key = jwks.read_key_set(issuer.shown(), ALGORITHMS)["rsa"]
    with pytest.raises(jwt.InvalidAlgorithmError):
        jwt.decode(issuer.token(), key, algorithms=["ES256"], audience=AUDIENCE)
