"""Tenants at a router: admission, visibility, headers for workers, and ownership."""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from baton_api import headers
from baton_api.errors import Forbidden, ModelNotFound, SetupError, Unauthorized
from baton_batches.files import NewFile
from baton_cli.main import create_app as create_cli
from baton_router.app import create_app
from baton_router.settings import RouterSettings
from baton_router.tenants.access import Authenticator
from baton_router.tenants.tenants import cache_salt
from tests.plain_http import PLAIN
from tests.router import fake_worker
from tests.router.fake_worker import FakeWorker
from tests.router.issuer import AUDIENCE, ISSUER, Issuer
from tests.router.running import CHAT, QUESTION, RunningRouter, running_router, until

SECRET = "between the routers"


def hashed(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Two tenants: a small one, and an admin."""
    tenants = [
        {"name": "acme", "keys": [hashed("acme-1"), hashed("acme-2")], "models": ["tiny"]},
        {"name": "ops", "keys": [hashed("ops")], "admin": True},
    ]
    path = tmp_path / "tenants.yaml"
    path.write_text(json.dumps({"tenants": tenants}))
    return str(path)


async def ask(router: RunningRouter, key: str, **fields: Any) -> httpx.Response:
    body = {**QUESTION, **fields}
    return await router.client.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"})


async def get(router: RunningRouter, path: str, key: str, method: str = "GET") -> httpx.Response:
    return await router.client.request(method, path, headers={"authorization": f"Bearer {key}"})


async def test_worker_gets_the_salt_of_the_tenant_not_of_the_client(file: str) -> None:
    forged = {headers.SALT: "another's", headers.TICKET: "forged"}
    async with FakeWorker() as worker:
        async with running_router([worker], tenants_file=file, ticket_secret=SECRET) as router:
            for key in ("acme-1", "acme-2", "ops"):
                assert (await ask(router, key)).status_code == 200
            given = {**forged, "authorization": "Bearer acme-1"}
            assert (await router.client.post(CHAT, json=QUESTION, headers=given)).status_code == 200
            assert (await ask(router, "nobody")).status_code == 401
        salts = [sent.header(headers.SALT) for sent in worker.requests]
        acme, ops = (cache_salt(SECRET.encode(), name) for name in ("acme", "ops"))
        assert salts == [acme, acme, ops, acme]
        assert [sent.header("authorization") for sent in worker.requests] == [None] * 4
        worker.requests.clear()
        async with running_router([worker], api_key=["k"]) as router:
            assert (await ask(router, "k")).status_code == 200
        assert worker.requests[0].header(headers.SALT) is None


async def test_prefix_index_separates_prompts_of_two_tenants(file: str) -> None:
    async with FakeWorker() as worker, running_router([worker], tenants_file=file) as router:
        changes = [0]
        for key in ("acme-1", "ops", "acme-2"):
            await ask(router, key)
            changes.append(len(router.router.scheduler.planner.worker_states))
        assert changes[0] < changes[1] < changes[2] == changes[3] == 2 * changes[1]


async def test_tenant_sees_and_uses_only_its_own_models(file: str) -> None:
    async with (
        FakeWorker() as tiny,
        FakeWorker(model="large") as large,
        running_router([tiny, large], tenants_file=file) as router,
    ):
        for key, seen in (("acme-1", ["tiny"]), ("ops", ["large", "tiny"])):
            listed = (await get(router, "/v1/models", key)).json()["data"]
            assert [model["id"] for model in listed] == seen
            assert (await get(router, "/model_info", key)).json()["served_model_names"] == seen
            assert ('"large"' in (await get(router, "/openapi.json", key)).text) is (key == "ops")
        for answer in (
            await ask(router, "acme-1", model="large"),
            await get(router, "/v1/models/large", "acme-1"),
        ):
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == ModelNotFound.code
        assert (await ask(router, "ops", model="large")).status_code == 200
        answer = await router.client.post(
            "/generate", json={"text": "x"}, headers={"authorization": "Bearer acme-1"}
        )
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "model"
        assert len(large.requests) == 1 and not tiny.requests


ADMIN = (
    ("GET", "/workers"),
    ("GET", "/workers/targets"),
    ("GET", "/server_info"),
    ("GET", "/get_server_info"),
    ("GET", "/debug/decisions"),
    ("POST", "/flush_cache"),
    ("POST", "/abort_request"),
    ("GET", "/no/such/path"),
)


async def test_resources_of_others_require_an_admin(file: str) -> None:
    async with FakeWorker() as worker, running_router([worker], tenants_file=file) as router:
        for method, path in ADMIN:
            answer = await get(router, path, "acme-1", method)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, Forbidden.code), path
            assert f"'acme' may not {method} {path}" in answer.json()["error"]["message"]
            if method == "GET":
                assert (await get(router, path, "ops")).status_code != 403
        for path in ("/health", "/ready", "/version", "/v1/models"):
            assert (await get(router, path, "acme-1")).status_code == 200, path


async def test_routes_require_a_key_and_only_listed_ones_admit_tenants(file: str) -> None:
    """New routes are closed until they are opened explicitly."""
    async with FakeWorker() as worker, running_router([worker], tenants_file=file) as router:
        paths = {getattr(route, "path", "") for route in router.router._rest.routes}
        assert len(paths) > 15
        for path in paths - {"/health", "/ping", "/ready"}:
            assert (await router.client.get(path)).status_code == 401, path
            for_all = path.startswith("/v1/") or path in (
                "/version", "/openapi.json", "/model_info", "/get_model_info",
            )  # fmt: skip
            assert ((await get(router, path, "acme-1")).status_code == 403) is not for_all, path


async def test_responses_belong_to_the_tenant_for_all_its_keys(file: str) -> None:
    access = create_app(RouterSettings(tenants_file=file))

    def owner_of(key: str) -> bytes:
        tenant = access.access.authenticated(f"Bearer {key}".encode())
        scope = {"headers": [(b"authorization", f"Bearer {key}".encode())], "baton.tenant": tenant}
        return access.owner_of(scope)

    assert owner_of("acme-1") == owner_of("acme-2") != owner_of("ops")


# --- Metrics and internals ---


async def test_metrics_and_probes_of_workers_are_for_admins(file: str) -> None:
    async with FakeWorker() as worker, running_router([worker], tenants_file=file) as router:
        for path in ("/metrics", "/workers/targets", "/health_generate"):
            assert (await router.client.get(path)).status_code == 401, path
            assert (await get(router, path, "acme-1")).status_code == 403, path
            assert (await get(router, path, "ops")).status_code == 200, path


@pytest.mark.parametrize("keyed", [True, False])
async def test_metrics_port_serves_what_the_api_then_does_not(file: str, keyed: bool) -> None:
    settings: dict[str, Any] = {"tenants_file": file} if keyed else {}
    async with (
        FakeWorker() as worker,
        running_router([worker], metrics_port=0, **settings) as router,
        httpx.AsyncClient(base_url=router.server.metrics_url, trust_env=False, verify=PLAIN) as prometheus,
    ):
        for path, status in {
            "/metrics": 200, "/workers/targets": 200, "/health": 200, "/ready": 200,
            "/workers": 404, "/debug/decisions": 404, "/v1/models": 404, "/health_generate": 404, "/": 404,
        }.items():  # fmt: skip
            assert (await prometheus.get(path)).status_code == status, path
        assert worker.name in (await prometheus.get("/metrics")).text
        for key in ("ops", "acme-1", "unknown"):
            for path in ("/metrics", "/workers/targets"):
                assert (await get(router, path, key)).status_code == 404, (path, key)
    async with httpx.AsyncClient(trust_env=False, verify=PLAIN) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{router.server.metrics_url}/metrics")


# --- Names of a key file, and tokens ---


def test_key_file_names_are_tenants_that_share_one_cache(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice:k-1\nk-2\n")
    access = Authenticator(RouterSettings(api_key_file=str(file)))
    alice, no_tenant = access.authenticated(b"Bearer k-1"), access.authenticated(b"Bearer k-2")
    assert alice is not None and no_tenant is not None
    assert (alice.name, alice.salt, alice.admin) == ("alice", "", True)
    assert (no_tenant.name, no_tenant.salt) == ("", "") and not access.owned_by_tenants
    assert access.authenticated(b"Bearer k-1") is alice


def jwt_settings(tmp_path: Path, issuer: Issuer, **more: Any) -> dict[str, Any]:
    shown = tmp_path / "jwks.json"
    shown.write_bytes(issuer.shown())
    return {"jwt_jwks": str(shown), "jwt_issuer": ISSUER, "jwt_audience": AUDIENCE, **more}


async def test_web_token_is_accepted_like_a_key(tmp_path: Path, file: str) -> None:
    issuer = Issuer()
    settings = jwt_settings(tmp_path, issuer, tenants_file=file, api_key=["k"])
    async with FakeWorker() as worker, running_router([worker], **settings) as router:
        for key in (issuer.token(), issuer.token(), "acme-1", "ops", "k"):
            assert (await ask(router, key)).status_code == 200
        salts = [sent.header(headers.SALT) for sent in worker.requests]
        assert len(set(salts[:3])) == 1 and len(set(salts)) == 3 and salts[4] is None
        refused = await ask(router, issuer.token(exp=1))
        assert refused.status_code == 401
        assert refused.json()["error"] == {
            "message": "The token has expired.",
            "type": "invalid_request_error",
            "param": None,
            "code": Unauthorized.code,
        }
        stranger = await ask(router, issuer.token(sub="umbrella"))
        assert (stranger.status_code, stranger.json()["error"]["code"]) == (403, Forbidden.code)
        assert (await ask(router, "a.b.c")).status_code == 401
        assert len(worker.requests) == 5


async def test_token_names_are_tenants_without_a_tenants_file(tmp_path: Path) -> None:
    issuer = Issuer()
    async with FakeWorker() as worker, running_router([worker], **jwt_settings(tmp_path, issuer)) as router:
        for name in ("a", "b", "a"):
            assert (await ask(router, issuer.token(sub=name))).status_code == 200
        salts = [sent.header(headers.SALT) for sent in worker.requests]
        assert salts[0] == salts[2] != salts[1] and all(salts)
        assert (await get(router, "/workers", issuer.token())).status_code == 403


async def test_batch_needs_the_class_batch_of_tenant_and_token(tmp_path: Path) -> None:
    issuer, file = Issuer(), tmp_path / "tenants.yaml"
    file.write_text(
        "tenants: [{name: acme}, "
        f"{{name: chat, classes: [default], keys: ['{hashed('chat-key')}']}}, "
        f"{{name: all, keys: ['{hashed('all-key')}']}}]"
    )
    settings = jwt_settings(tmp_path, issuer, tenants_file=str(file), jwt_classes_claim="classes")
    cases = {
        issuer.token(classes=["batch"]): 200,
        issuer.token(classes="default batch"): 200,
        issuer.token(classes="default"): 403,
        "all-key": 200,
        "chat-key": 403,
    }
    async with running_router(state=str(tmp_path), batch_execution="off", **settings) as router:
        for key, status in cases.items():
            bearer = {"authorization": f"Bearer {key}"}
            files, data = {"file": ("f", b"{}\n")}, {"purpose": "batch"}
            uploaded = await router.client.post("/v1/files", files=files, data=data, headers=bearer)
            assert uploaded.status_code == 200, uploaded.text
            body = {
                "input_file_id": uploaded.json()["id"], "endpoint": CHAT, "completion_window": "24h",
            }  # fmt: skip
            answer = await router.client.post("/v1/batches", json=body, headers=bearer)
            assert answer.status_code == status, answer.text
            if status == 403:
                assert answer.json()["error"]["code"] == Forbidden.code


async def test_removed_tenant_invalidates_its_tokens(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: [{name: acme}]")
    issuer = Issuer()
    seconds = [0.0]
    settings = RouterSettings(**jwt_settings(tmp_path, issuer, tenants_file=str(file)))
    access = Authenticator(settings, lambda: seconds[0])
    key = f"Bearer {issuer.token()}".encode()
    assert access.authenticated(key) is None and (await access.authenticate_token(key)).name == "acme"
    assert access.authenticated(key) is not None
    file.write_text("tenants: [{name: umbrella}]")
    seconds[0] = 1.0
    assert access.authenticated(key) is None


def test_tokens_without_issuer_and_audience_prevent_the_start(tmp_path: Path) -> None:
    settings = jwt_settings(tmp_path, Issuer())
    for missing in ("jwt_issuer", "jwt_audience"):
        with pytest.raises(SetupError, match="--jwt-jwks wants"):
            Authenticator(RouterSettings(**{**settings, missing: ""}))


async def test_key_name_and_equal_claim_are_two_owners(tmp_path: Path) -> None:
    """A token whose claim says `ops` sees nothing of what the key named `ops` holds, and not the reverse."""
    issuer, keys = Issuer(), tmp_path / "keys"
    keys.write_text(f"ops: {hashed('secret-key')}\n")
    settings = jwt_settings(tmp_path, issuer, api_key_file=str(keys), dashboard=True)
    async with FakeWorker() as worker, running_router([worker], **settings) as router:
        key, token = "secret-key", issuer.token(sub="ops")
        upload: dict[str, Any] = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}}
        bearer = {"authorization": f"Bearer {key}"}
        kept = (await router.client.post("/v1/files", headers=bearer, **upload)).json()["id"]
        assert (await get(router, f"/v1/files/{kept}", key)).status_code == 200
        assert (await get(router, f"/v1/files/{kept}", token)).status_code == 404
        assert (await get(router, "/v1/files", token)).json()["data"] == []
        assert (await ask(router, key)).status_code == 200
        assert (await get(router, "/dashboard/state", token)).json()["requests"] == []
        owners = set()
        for one in (key, token):
            scope = {
                "path": CHAT,
                "method": "POST",
                "headers": [(b"authorization", f"Bearer {one}".encode())],
            }
            await router.router.access.enter(scope)
            owners.add(router.router.owner_of(scope))
        assert owners == {b"key:ops", b"tenant:ops"}


async def test_reassigned_files_belong_to_the_named_key(tmp_path: Path) -> None:
    """Version 0.1.0 kept what a named key held as a tenant's; `baton batch reassign` moves it."""
    keys, state = tmp_path / "keys", str(tmp_path / "state")
    keys.write_text(f"ops: {hashed('secret-key')}\n")
    settings = jwt_settings(tmp_path, Issuer(), api_key_file=str(keys), state=state)
    command = ["batch", "reassign", "tenant:ops", "key:ops", "--state", state]
    async with FakeWorker() as worker, running_router([worker], **settings) as router:
        router.router.storage.files.add(NewFile(b"tenant:ops".hex(), "batch", "a", 0, "", "k", None), 1)
        assert (await get(router, "/v1/files", "secret-key")).json()["data"] == []
        done = await asyncio.to_thread(CliRunner().invoke, create_cli(command), command)
        assert done.output == "1 files and 0 batches of tenant:ops now belong to key:ops.\n"
        assert len((await get(router, "/v1/files", "secret-key")).json()["data"]) == 1
    wrong = CliRunner().invoke(create_cli(command), [*command[:3], "ops", *command[4:]])
    assert "Expected tenant:NAME" in str(wrong.exception)


async def test_tenants_read_no_addresses_and_no_numbers_of_all(file: str) -> None:
    """Names of pods, and how many requests there were, are for admins; so are they while workers are away."""
    async with FakeWorker() as worker:
        settings: dict[str, Any] = {"tenants_file": file, "health_interval_s": 0.05}
        async with running_router([worker], **settings) as router:
            for key, full in (("acme-1", False), ("ops", True)):
                answer = await ask(router, key)
                assert answer.status_code == 200
                assert (headers.WORKER in answer.headers) is (headers.DECISION in answer.headers) is full
                assert worker.name not in str(answer.headers) or full
            await worker.die()
            await until(lambda: router.router.workers.decode[0].health.down)
            for key, full in (("acme-1", False), ("ops", True)):
                for answer in (await ask(router, key), await get(router, "/v1/models", key)):
                    assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
                    assert (worker.name in answer.text) is full
            visitor = await router.client.get("/ready")
            assert visitor.status_code == 503 and worker.name not in visitor.text


async def test_tenant_does_not_read_which_worker_was_lost(file: str) -> None:
    dying = fake_worker.streaming(fake_worker.event("The"), end=False)
    for key, full in (("acme-1", False), ("ops", True)):
        async with FakeWorker(dying) as worker, running_router([worker], tenants_file=file) as router:
            worker.release.set()
            answer = await stream(router, key)
            assert "was lost while it served this request" in answer
            assert (worker.name in answer) is full


async def stream(router: RunningRouter, key: str) -> str:
    """All that comes of a stream, which may be cut."""
    request: dict[str, Any] = {
        "json": {**QUESTION, "stream": True},
        "headers": {"authorization": f"Bearer {key}"},
    }
    heard = ""
    with suppress(httpx.RemoteProtocolError):
        async with router.client.stream("POST", CHAT, **request) as answer:
            async for text in answer.aiter_text():
                heard += text
    return heard


async def test_not_found_names_the_models_of_the_tenant_only(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    entry = {"name": "acme", "keys": [hashed("acme")], "models": ["tiny", "not here"]}
    file.write_text(json.dumps({"tenants": [entry]}))
    async with (
        FakeWorker() as tiny,
        FakeWorker(model="large") as large,
        running_router([tiny, large], tenants_file=str(file)) as router,
    ):
        answer = await ask(router, "acme", model="not here")
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == "The model 'not here' does not exist. Served here: tiny."
