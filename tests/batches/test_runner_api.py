"""The internal batch API: a token opens one batch in one epoch, and a lost lease allows no change."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from sqlalchemy import text

from baton_api import headers
from baton_batches import runner_credentials, wire
from baton_batches.database import Database
from baton_batches.runner_credentials import secret_of
from baton_batches.storage import LEDGER
from baton_batches.values import BatchRecord, LineResult
from baton_batches.wire import LeaseRequest, RunnerLease, RunnerOrder
from tests.batches.serving import bearer, created, line, reaching
from tests.router.fake_worker import FakeWorker
from tests.router.running import CHAT, QUESTION, RunningRouter, running_router

GOOD = b'{"choices":[]}'


@dataclass
class Held:
    """A batch of three lines that is in progress, and what runners may ask of its router."""

    router: RunningRouter
    worker: FakeWorker
    batch: BatchRecord
    secret: bytes

    def token(self, epoch: int = 0, batch: str = "", seconds: float = 60) -> str:
        name = batch or self.batch.id
        return runner_credentials.issue_token(
            self.secret, name, epoch, self.batch.owner, time.time() + seconds
        )

    async def ask(self, call: str, token: str, body: bytes = b"", batch: str = "") -> httpx.Response:
        method = "GET" if call.startswith("lines") else "POST"
        path = f"{wire.PATH}{batch or self.batch.id}/{call}"
        return await self.router.client.request(method, path, headers=bearer(token), content=body)

    async def lease(self, runner: str = "runner 1") -> RunnerLease:
        answer = await self.ask("lease", self.token(), wire.encode(LeaseRequest(runner)))
        assert answer.status_code == 200, answer.text
        return wire.decode_lease(answer.content)

    async def record(self, token: str, *numbers: int, body: bytes = GOOD) -> httpx.Response:
        return await self.ask(
            "results", token, wire.encode([LineResult(n, 200, body, f"req_{n}") for n in numbers])
        )

    def now(self) -> BatchRecord:
        return self.router.router.storage.ledger.find(self.batch.id)


@asynccontextmanager
async def held(lease_s: float = 15, **settings: Any) -> AsyncIterator[Held]:
    async with FakeWorker() as worker:
        worker.load = msgspec.structs.replace(worker.load, free_blocks=100)  # room for what is not urgent
        async with running_router([worker], batch_poll_s=0.05, batch_lease_s=lease_s, **settings) as router:
            yield await _held(router, worker)


async def _held(router: RunningRouter, worker: FakeWorker) -> Held:
    id = await created(router, b"".join(line(f"c{number}") for number in (1, 2, 3)))
    await reaching(router, id, "in_progress")
    ledger = router.router.storage.ledger
    secret = secret_of(router.router.settings, router.router.settings.ticket_secret) or b""
    return Held(router, worker, ledger.find(id), secret)


async def test_batch_runs_from_lease_to_end() -> None:
    async with held() as batch:
        lease = await batch.lease()
        assert (lease.total, lease.done, lease.endpoint) == (3, 0, CHAT)
        part = wire.decode_slice((await batch.ask("lines?after=", lease.token)).content)
        assert [one.number for one in part.lines] == [1, 2, 3]
        rest = wire.decode_slice((await batch.ask(f"lines?after={part.cursor}", lease.token)).content)
        assert (rest.lines, rest.last) == ([], True)
        receipt = wire.decode_receipt((await batch.record(lease.token, 1, 2)).content)
        assert (receipt.new, receipt.order) == (2, RunnerOrder.GO_ON)
        renewal = wire.decode_renewal((await batch.ask("renew", lease.token)).content)
        assert renewal.order is RunnerOrder.GO_ON and batch.now().leased_until > time.time()
        receipt = wire.decode_receipt((await batch.record(renewal.token, 3)).content)
        assert receipt.order is RunnerOrder.STOP
        assert (await reaching(batch.router, batch.batch.id, "completed"))["request_counts"]["completed"] == 3
        assert (await batch.ask("lease", batch.token(), wire.encode(LeaseRequest("late")))).status_code == 204


async def test_new_runner_gets_the_remaining_lines() -> None:
    async with held() as batch:
        first = await batch.lease()
        await batch.record(first.token, 2)
        assert (await batch.ask("release", first.token)).status_code == 204
        second = await batch.lease("runner 2")
        assert (second.epoch, second.done) == (first.epoch + 1, 1)
        part = wire.decode_slice((await batch.ask("lines?after=", second.token)).content)
        assert [one.number for one in part.lines] == [1, 3]


async def test_repeated_result_counts_once_and_the_first_stays() -> None:
    async with held() as batch:
        token = (await batch.lease()).token
        assert wire.decode_receipt((await batch.record(token, 1)).content).new == 1
        again = wire.decode_receipt((await batch.record(token, 1, 2, body=b'{"other":1}')).content)
        assert again.new == 1
        kept = batch.router.router.storage.ledger.results(batch.now())
        assert [(one.line, one.body) for one in kept] == [(1, GOOD), (2, b'{"other":1}')]


async def test_line_of_one_runner_is_not_given_to_another() -> None:
    """The second runner waits without lines, and gets those of the first one when that leaves."""
    async with held() as batch:
        first, second = await batch.lease("runner 1"), await batch.lease("runner 2")
        part = wire.decode_slice((await batch.ask("lines?after=", first.token)).content)
        again = wire.decode_slice((await batch.ask("lines?after=", first.token)).content)
        assert [one.number for one in part.lines] == [1, 2, 3] and again == part
        other = wire.decode_slice((await batch.ask("lines?after=", second.token)).content)
        assert (other.lines, other.last) == ([], False)
        await batch.record(first.token, 2)
        await batch.ask("release", first.token)
        other = wire.decode_slice((await batch.ask(f"lines?after={other.cursor}", second.token)).content)
        assert [one.number for one in other.lines] == [1, 3]


async def test_suspects_that_are_given_back_go_to_one_runner() -> None:
    async with held() as batch:
        first, second = await batch.lease("runner 1"), await batch.lease("runner 2")
        await batch.ask("lines?after=", first.token)
        assert (await batch.ask("give_back", first.token)).status_code == 204
        part = wire.decode_slice((await batch.ask("lines?after=0", second.token)).content)
        assert [one.number for one in part.lines] == [1, 2, 3]


async def test_lease_waits_for_an_exclusive_one() -> None:
    async with held() as batch:
        assert batch.router.router.storage.ledger.lease(batch.batch.id, "controller", time.time(), 60)
        answer = await batch.ask("lease", batch.token(), wire.encode(LeaseRequest("runner")))
        assert answer.status_code == 409


async def test_runner_with_a_lost_lease_changes_nothing() -> None:
    async with held() as batch:
        old = await batch.lease()
        ledger = batch.router.router.storage.ledger
        assert ledger.take(batch.batch.id, "another", time.time(), 60) == old.epoch + 1
        before = batch.now()
        for call, body in (
            ("renew", b""),
            ("results", wire.encode([LineResult(1, 200, GOOD)])),
            ("lines", b""),
        ):
            assert (await batch.ask(call, old.token, body)).status_code == 409, call
        assert (await batch.ask("release", old.token)).status_code == 204
        assert batch.now() == before and ledger.counts(batch.batch.id) == (0, 0)


async def test_lease_belongs_to_the_named_runner() -> None:
    async with held() as batch:
        taken = batch.router.router.storage.ledger.lease(batch.batch.id, "mine", time.time(), 60)
        assert taken is not None and (await batch.lease("mine")).epoch == taken + 1


@pytest.mark.parametrize("call", ["lease", "renew", "lines", "results", "release"])
async def test_runner_endpoints_are_closed_to_others(call: str) -> None:
    async with held() as batch:
        epoch = 0 if call == "lease" else (await batch.lease()).epoch
        body = wire.encode([LineResult(1, 200, GOOD)] if epoch else LeaseRequest("runner 2"))
        before = batch.now()
        other = replace(batch, secret=b"another secret")
        for token in (
            "",
            "k",
            other.token(epoch),
            batch.token(epoch, batch="batch_other"),
            batch.token(epoch, seconds=-1),
            batch.token(0 if epoch else 1),
        ):
            assert (await batch.ask(call, token, body)).status_code == 401, token
        assert (await batch.ask(call, batch.token(epoch), body, batch="batch_other")).status_code == 401
        assert batch.now() == before


async def test_invalid_calls_are_refused() -> None:
    async with held() as batch:
        token = (await batch.lease()).token
        assert (await batch.ask("results", token, b"nonsense")).status_code == 400
        assert (await batch.ask("lines?after=x", token)).status_code == 400
        assert (await batch.ask("dance", token)).status_code == 404
        path = f"{wire.PATH}{batch.batch.id}/results"
        assert (await batch.router.client.get(path, headers=bearer(token))).status_code == 405


async def test_cancelled_batch_stops_its_runner_and_accepts_results() -> None:
    async with held() as batch:
        lease = await batch.lease()
        await batch.router.client.post(f"/v1/batches/{batch.batch.id}/cancel")
        assert wire.decode_renewal((await batch.ask("renew", lease.token)).content).order is RunnerOrder.STOP
        assert wire.decode_receipt((await batch.record(lease.token, 2)).content).order is RunnerOrder.STOP
        await batch.ask("release", lease.token)
        shown = await reaching(batch.router, batch.batch.id, "cancelled")
        assert shown["request_counts"] == {"total": 3, "completed": 1, "failed": 0}


async def test_runner_of_an_expired_batch_stops_and_keeps_its_results(tmp_path: Path) -> None:
    """The window passes while a runner works: it hears of it, records, and gets no other lease."""
    async with held(state=str(tmp_path)) as batch:
        lease = await batch.lease()
        await batch.record(lease.token, 1)
        passed = text("UPDATE batches SET expires_at = :now")
        with (
            closing(Database(f"sqlite:///{tmp_path}/{LEDGER}")) as database,
            database.writing() as connection,
        ):
            connection.execute(passed, {"now": int(time.time())})
        renewal = wire.decode_renewal((await batch.ask("renew", lease.token)).content)
        assert renewal.order is RunnerOrder.STOP
        assert wire.decode_receipt((await batch.record(lease.token, 2)).content).new == 1
        assert (await batch.ask("release", lease.token)).status_code == 204
        assert (await batch.ask("lease", batch.token(), wire.encode(LeaseRequest("late")))).status_code == 204
        shown = await reaching(batch.router, batch.batch.id, "expired")
        assert shown["request_counts"] == {"total": 3, "completed": 2, "failed": 0}
        assert batch.now().epoch == lease.epoch + 1


async def test_late_heartbeat_does_not_delay_the_files() -> None:
    async with held(lease_s=600) as batch:
        lease = await batch.lease()
        await batch.record(lease.token, 1, 2, 3)
        await batch.ask("renew", lease.token)
        assert (await reaching(batch.router, batch.batch.id, "completed"))["output_file_id"]


@pytest.mark.parametrize(
    ("workers", "given", "window"),
    [(1, 0, 512), (8, 0, 512), (12, 0, 768), (12, 100, 100)],
    ids=["one worker", "a few workers", "many workers", "a bound that was asked for"],
)
async def test_window_of_a_batch_grows_with_the_cluster(workers: int, given: int, window: int) -> None:
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeWorker()) for _ in range(workers)]
        settings: dict[str, Any] = {"batch_poll_s": 0.05, "batch_window": given}
        router = await stack.enter_async_context(running_router(fakes, **settings))
        batch = await _held(router, fakes[0])
        assert (await batch.lease()).window == window
        answer = await router.client.post(CHAT, json=QUESTION)
        assert answer.status_code == 200
        beside = wire.decode_renewal((await batch.ask("renew", (await batch.lease()).token)).content)
        assert beside.window == min(window, 16 * workers), "somebody else sends requests"


# --- The same tokens where lines are sent ---


async def test_runner_lines_have_the_lowest_class_and_no_token() -> None:
    async with held() as batch:
        token = (await batch.lease()).token
        answer = await batch.router.client.post(CHAT, json=QUESTION, headers=bearer(token))
        assert answer.status_code == 200
        seen = batch.worker.requests[-1].headers
        assert not any("bbt1" in value or name == "authorization" for name, value in seen)
        urgent = {**bearer(token), headers.CLASS: "interactive"}
        answer = await batch.router.client.post(CHAT, json=QUESTION, headers=urgent)
        assert answer.status_code == 403


@pytest.mark.parametrize("path", ["/v1/models", "/v1/files", "/v1/batches", "/metrics", "/flush_cache"])
async def test_runner_token_is_not_a_key(path: str) -> None:
    async with held() as batch:
        token = (await batch.lease()).token
        assert (await batch.router.client.get(path, headers=bearer(token))).status_code == 401


async def test_start_token_sends_no_lines() -> None:
    async with held() as batch:
        answer = await batch.router.client.post(CHAT, json=QUESTION, headers=bearer(batch.token()))
        assert answer.status_code == 401
