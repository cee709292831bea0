"""Lines of a batch are its owner's: the tenant's models and cache, the lowest class, no limits per minute."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from baton_api import runner_tokens
from baton_api.errors import Unauthorized
from baton_router.access import Access, tenant_of
from baton_router.batches.runners_access import OWNER, secret_of
from baton_router.settings import RouterSettings
from baton_router.tenants import NOBODY

CHAT = "/v1/chat/completions"
KEY = hashlib.sha256(b"key").hexdigest()


def settings(folder: Path, **more: Any) -> RouterSettings:
    file = folder / "tenants.yaml"
    file.write_text(
        f"tenants:\n- name: acme\n  keys: ['sha256:{KEY}']\n  models: [m]\n  classes: [interactive]\n"
        "  requests_per_minute: 1\n"
    )
    return RouterSettings(tenants_file=str(file), ticket_secret="s", **more)


def scope_of(given: RouterSettings, owner: bytes, path: str = CHAT, epoch: int = 1) -> dict[str, Any]:
    secret = secret_of(given, given.ticket_secret)
    token = runner_tokens.issue(secret, "batch_1", epoch, owner.hex(), time.time() + 60)
    headers = [(b"authorization", b"Bearer " + token.encode()), (b"x-baton-class", b"batch")]
    return {"path": path, "method": "POST", "headers": headers}


async def test_they_are_the_tenants_but_of_the_lowest_class_and_without_its_limits(tmp_path: Path) -> None:
    given = settings(tmp_path)
    access = Access(given)
    assert access.tenants is not None
    acme = access.tenants.by_name("acme")
    scope = scope_of(given, b"tenant:acme")
    await access.enter(scope)
    tenant = tenant_of(scope)
    assert acme is not None and acme.salt
    assert (tenant.name, tenant.salt, tenant.models) == ("acme", acme.salt, frozenset({"m"}))
    assert (tenant.default_class, tenant.classes) == ("batch", frozenset({"batch"}))
    assert tenant.limits is NOBODY.limits
    assert scope[OWNER] == b"tenant:acme"
    assert scope["headers"] == [(b"x-baton-class", b"batch")]


async def test_where_owners_are_keys_they_are_nobodys_in_particular(tmp_path: Path) -> None:
    given = RouterSettings(api_key=("k",))  # type: ignore[arg-type]
    scope = scope_of(given, hashlib.sha256(b"k").digest())
    await Access(given).enter(scope)
    assert (tenant_of(scope).name, tenant_of(scope).salt, tenant_of(scope).default_class) == ("", "", "batch")


@pytest.mark.parametrize(
    ("path", "epoch"),
    [("/v1/models", 1), ("/v1/files", 1), ("/generate", 1), (CHAT, runner_tokens.START)],
)
async def test_a_token_opens_nothing_else(tmp_path: Path, path: str, epoch: int) -> None:
    given = settings(tmp_path)
    with pytest.raises(Unauthorized):
        await Access(given).enter(scope_of(given, b"tenant:acme", path, epoch))


async def test_a_token_of_another_router_opens_nothing(tmp_path: Path) -> None:
    given = settings(tmp_path)
    scope = scope_of(RouterSettings(batch_secret="another"), b"tenant:acme")  # type: ignore[arg-type]
    with pytest.raises(Unauthorized):
        await Access(given).enter(scope)


def test_routers_with_the_same_settings_have_the_same_secret() -> None:
    plain, shared = RouterSettings(), RouterSettings(batch_secret="b" * 32)  # type: ignore[arg-type]
    assert secret_of(plain, "s") == secret_of(plain, "s") != secret_of(plain, "t")
    one, other = (RouterSettings(database=SecretStr(f"postgresql://a:{word}@host/b")) for word in "xy")
    assert secret_of(one, "") == secret_of(one, "") != secret_of(other, ""), "who shares a ledger shares it"
    assert secret_of(shared, "s") == b"b" * 32
    assert len(secret_of(plain, "")) == 32
