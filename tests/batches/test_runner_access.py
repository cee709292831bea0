"""Lines of a batch are its owner's: the tenant's models and cache, the lowest class, no limits per minute."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from baton_api import headers as header_names
from baton_api.errors import NotReady, StorageUnavailable, Unauthorized
from baton_batches import runner_credentials, wire
from baton_batches.controller import OWNER_REJECTED_S, BatchController
from baton_batches.files import NewFile
from baton_batches.runner_credentials import RunnerSecret, secret_of
from baton_batches.settings import BatchSettings
from baton_batches.storage import Storage
from baton_batches.values import BatchStatus, LineError
from baton_batches.wire import LeaseRequest
from baton_router.settings import RouterSettings
from baton_router.tenants.access import OWNER, Authenticator, tenant_of
from baton_router.tenants.tenants import DEFAULT_TENANT
from tests.batches.postgres import Postgres
from tests.batches.serving import CHAT, answered, bearer, create, line, run_lines, uploaded
from tests.router.fake_worker import FakeWorker
from tests.router.issuer import AUDIENCE, ISSUER, Issuer
from tests.router.running import QUESTION, running_router, until

KEY = hashlib.sha256(b"key").hexdigest()


def settings(folder: Path, **more: Any) -> RouterSettings:
    file = folder / "tenants.yaml"
    file.write_text(
        f"tenants:\n- name: acme\n  keys: ['sha256:{KEY}']\n  models: [m]\n  classes: [interactive]\n"
        "  requests_per_minute: 1\n"
    )
    return RouterSettings(tenants_file=str(file), ticket_secret="s", **more)


def scope_of(
    given: RouterSettings,
    owner: bytes,
    path: str = CHAT,
    epoch: int = 1,
    models: frozenset[str] | None = None,
) -> dict[str, Any]:
    secret = secret_of(given, given.ticket_secret) or b""
    token = runner_credentials.issue_token(secret, "batch_1", epoch, owner.hex(), time.time() + 60, models)
    headers = [(b"authorization", b"Bearer " + token.encode()), (header_names.CLASS.encode(), b"batch")]
    return {"path": path, "method": "POST", "headers": headers}


async def test_runner_acts_for_its_tenant_in_the_batch_class(tmp_path: Path) -> None:
    given = settings(tmp_path)
    access = Authenticator(given)
    assert access.tenants is not None
    acme = access.tenants.by_name("acme")
    scope = scope_of(given, b"tenant:acme")
    await access.enter(scope)
    tenant = tenant_of(scope)
    assert acme is not None and acme.salt
    assert (tenant.name, tenant.salt, tenant.models) == ("acme", acme.salt, frozenset({"m"}))
    assert (tenant.default_class, tenant.classes) == ("batch", frozenset({"batch"}))
    assert tenant.limits is DEFAULT_TENANT.limits
    assert scope[OWNER] == b"tenant:acme"
    assert scope["headers"] == [(header_names.CLASS.encode(), b"batch")]


async def test_runner_of_a_key_owner_uses_the_default_tenant(tmp_path: Path) -> None:
    given = RouterSettings(api_key=("k",))  # type: ignore[arg-type]
    scope = scope_of(given, hashlib.sha256(b"k").digest())
    await Authenticator(given).enter(scope)
    assert (tenant_of(scope).name, tenant_of(scope).salt, tenant_of(scope).default_class) == ("", "", "batch")


@pytest.mark.parametrize(
    ("path", "epoch"),
    [("/v1/models", 1), ("/v1/files", 1), ("/generate", 1), (CHAT, runner_credentials.START_EPOCH)],
)
async def test_token_opens_no_other_endpoint(tmp_path: Path, path: str, epoch: int) -> None:
    given = settings(tmp_path)
    with pytest.raises(Unauthorized):
        await Authenticator(given).enter(scope_of(given, b"tenant:acme", path, epoch))


async def test_token_of_another_router_opens_nothing(tmp_path: Path) -> None:
    given = settings(tmp_path)
    scope = scope_of(RouterSettings(batch_secret="another"), b"tenant:acme")  # type: ignore[arg-type]
    with pytest.raises(Unauthorized):
        await Authenticator(given).enter(scope)


def test_routers_with_the_same_settings_have_the_same_secret() -> None:
    plain, shared = RouterSettings(), RouterSettings(batch_secret="b" * 32)  # type: ignore[arg-type]
    assert secret_of(plain, "s") == secret_of(plain, "s") != secret_of(plain, "t")
    assert secret_of(shared, "s") == b"b" * 32
    assert len(secret_of(plain, "") or b"") == 32
    stored = RouterSettings(database="postgresql://h/d")  # type: ignore[arg-type]
    assert secret_of(stored, "s") is None, "routers that get a ticket secret later keep the stored one"


@pytest.mark.slow
async def test_token_outlives_the_password_of_the_database(postgres: Postgres) -> None:
    """A router with the new password takes what one with the old password has signed; no other does."""
    url = postgres.new_database()
    old, new, other = (
        RouterSettings(database=SecretStr(one.replace("baton@", f"baton:{password}@")))
        for one, password in ((url, "old"), (url, "new"), (postgres.new_database(), "old"))
    )
    secret = await RunnerSecret(old, "").get()
    token = runner_credentials.issue_token(secret, "batch_1", 1, "", time.time() + 60)

    def scope() -> dict[str, Any]:
        headers = [(b"authorization", b"Bearer " + token.encode())]
        return {"path": CHAT, "method": "POST", "headers": headers}

    await Authenticator(new).enter(scope())
    with pytest.raises(Unauthorized):
        await Authenticator(other).enter(scope())


@pytest.mark.slow
async def test_secret_of_routers_that_start_at_once_is_one(postgres: Postgres) -> None:
    given = RouterSettings(database=SecretStr(postgres.new_database()))
    secrets = await asyncio.gather(*(RunnerSecret(given, "").get() for _ in range(6)))
    assert len(set(secrets)) == 1 and len(secrets[0]) == 32


async def test_token_with_unreachable_secret_is_answered_later() -> None:
    """While the database is away a runner is asked to come back: its token may be good."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    given = RouterSettings(database=SecretStr(f"postgresql://baton@127.0.0.1:{port}/none"))
    scope = scope_of(RouterSettings(batch_secret="b"), b"tenant:acme")  # type: ignore[arg-type]
    with pytest.raises(StorageUnavailable):
        await Authenticator(given).enter(scope)


def named_key(folder: Path, name: str) -> str:
    """A key file in which the key "key" has this name."""
    file = folder / f"keys of {name}"
    file.write_text(f"{name}: sha256:{KEY}")
    return str(file)


OWNERS: dict[str, tuple[bytes, bool]] = {
    "a tenant of the file": (b"tenant:acme", True),
    "a tenant that is not in it": (b"tenant:umbrella", False),
    "a named key": (b"key:ops", True),
    "a name that no key has": (b"key:dev", False),
    "a key": (hashlib.sha256(b"plain").digest(), True),
    "an unknown key": (hashlib.sha256(b"other").digest(), False),
    "everybody, when no key was wanted": (b"", False),
}


@pytest.mark.parametrize(("owner", "let_in"), OWNERS.values(), ids=OWNERS)
async def test_lines_run_only_while_their_owner_is_admitted(
    tmp_path: Path, owner: bytes, let_in: bool
) -> None:
    """Lines of others get 503: the runner keeps them until the batch is stopped, and none fails for it."""
    given = settings(tmp_path, api_key=["plain"], api_key_file=named_key(tmp_path, "ops"))
    access = Authenticator(given)
    scope = scope_of(given, owner)
    if let_in:
        await access.enter(scope)
        assert access.refusal(owner) is None and scope[OWNER] == owner
        return
    with pytest.raises(NotReady, match="batch_1 is no longer let in"):
        await access.enter(scope)
    assert "no longer" in (access.refusal(owner) or "")


def jwt_settings(folder: Path, issuer: Issuer) -> dict[str, Any]:
    shown, file = folder / "jwks.json", folder / "tenants.yaml"
    shown.write_bytes(issuer.shown())
    file.write_text("tenants: [{name: acme, models: [tiny, large]}, {name: other}]")
    named = {"jwt_issuer": ISSUER, "jwt_audience": AUDIENCE, "jwt_models_claim": "models"}
    return {"jwt_jwks": str(shown), "tenants_file": str(file), "ticket_secret": "s", **named}


async def test_batch_of_a_narrowed_token_has_its_models_only(tmp_path: Path) -> None:
    """Acme may use two models, the token that makes the batch one of them; so may each of its leases."""
    issuer = Issuer()
    key = issuer.token(sub="acme", models=["tiny", "not acme's"])
    given = jwt_settings(tmp_path, issuer)
    one, other = FakeWorker(), FakeWorker(model="large")
    async with one, other, running_router([one, other], batch_poll_s=0.05, **given) as router:
        file = await uploaded(router, line("a") + line("b"), key)
        id = (await create(router, file, key)).json()["id"]
        ledger = router.router.storage.ledger
        await until(lambda: ledger.find(id).status is BatchStatus.IN_PROGRESS)
        owner = ledger.find(id).owner
        start = runner_credentials.issue_token(
            secret_of(router.router.settings, "s") or b"",
            id,
            runner_credentials.START_EPOCH,
            owner,
            time.time() + 60,
        )
        path = f"{wire.PATH}{id}"
        leased = await router.client.post(
            f"{path}/lease", headers=bearer(start), content=wire.encode(LeaseRequest("r"))
        )
        first = wire.decode_lease(leased.content).token
        renewed = await router.client.post(f"{path}/renew", headers=bearer(first))
        for token in (first, wire.decode_renewal(renewed.content).token):
            for model, status in (("tiny", 200), ("large", 404), ("not acme's", 404)):
                body = {**QUESTION, "model": model}
                answer = await router.client.post(CHAT, json=body, headers=bearer(token))
                assert answer.status_code == status
        assert not other.requests


async def test_batch_never_has_more_models_than_the_tenant_has_now(tmp_path: Path) -> None:
    given = settings(tmp_path)
    scope = scope_of(given, b"tenant:acme", models=frozenset({"m", "taken from acme"}))
    await Authenticator(given).enter(scope)
    assert tenant_of(scope).models == frozenset({"m"})


async def test_batches_of_a_removed_tenant_are_cancelled_with_a_reason(tmp_path: Path) -> None:
    """After rejections for REFUSED_S its results are delivered, and other owners' batches continue."""
    now = 1_700_000_000.0
    storage = Storage(BatchSettings.model_validate({"state": str(tmp_path), "batch_poll_s": 0.01}), 0)
    ledger, gone, looks = storage.ledger, set[str](), 0

    def refusal(owner: str) -> str | None:
        nonlocal looks
        looks += 1
        return "The tenant 'a' has left." if owner in gone else None

    ids = {}
    for owner in ("a", "b"):
        writer = storage.objects.writer(f"k/{owner}")
        writer.write(text := line("1") + line("2"))
        writer.commit()
        file = storage.files.add(NewFile(owner, "batch", "f", len(text), "", f"k/{owner}", None), int(now))
        ids[owner] = ledger.create(owner, CHAT, file, int(now)).id
    keeping = asyncio.create_task(BatchController(storage, lambda: now, refusal).run())
    await until(lambda: all(ledger.find(id).status is BatchStatus.IN_PROGRESS for id in ids.values()))
    run_lines(ledger, ids["a"], [answered(1)], now)
    gone.add("a")
    now += OWNER_REJECTED_S - 1
    before = looks
    await until(lambda: looks > before + 4)
    assert ledger.find(ids["a"]).status is BatchStatus.IN_PROGRESS, "a replica may not have read its file yet"
    now += OWNER_REJECTED_S
    await until(lambda: ledger.find(ids["a"]).status.ended)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    batch, other = ledger.find(ids["a"]), ledger.find(ids["b"])
    assert (batch.status, other.status) == (BatchStatus.CANCELLED, BatchStatus.IN_PROGRESS)
    assert batch.errors == (LineError("owner_refused", "The tenant 'a' has left."),)
    assert batch.output_file is not None and batch.completed == 1
    storage.close()
