"""
The internal batch API: the router's endpoints for batch runners.

It holds no authoritative state. Every call carries a token for one batch and one epoch. A call that changes
data checks the ledger in the same transaction. Any replica can therefore answer it, and a runner whose lease
was taken over changes nothing. See `wire` for the calls.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qs

import msgspec

from baton_api.errors import (
    BatonError,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotReady,
    RouteNotFound,
    StaleLease,
    Unauthorized,
)
from baton_batches import runner_credentials, wire
from baton_batches.runner_credentials import PodTokens, RunnerSecret, RunnerToken
from baton_batches.runner_leases import ClaimedLines
from baton_batches.storage import Storage
from baton_batches.values import BatchRecord, BatchStatus, LineResult
from baton_batches.wire import InputLine, InputSlice, LeaseRenewal, ResultReceipt, RunnerLease, RunnerOrder
from baton_http.client_connection import ClientConnection, ClientDisconnected
from baton_http.replies import REQUEST_ID, Receive, Scope, Send, request_id, send_error
from baton_http.request_cycle import count_for

log = logging.getLogger(__name__)

BODY_LIMIT = 512 * 1024 * 1024
"""Maximum bytes of a group of results. Groups are larger than a megabyte only if one result is."""

RUNNERS = "batch runners"
"""Whose share of the memory of connections results take."""

GRACE_S = 60.0
"""Seconds for which a token outlives its lease: a lease that has run out still counts unless it was taken."""

NO_LINES_S = 1.0
"""Seconds until a runner without lines may ask again: others may die, and then it gets theirs."""


@dataclass(frozen=True, slots=True)
class RunnerTerms:
    """The parameters that runners receive with their lease."""

    lease_s: float
    line_s: float
    window: Callable[[], int]
    """Most lines of a batch under way at once, now."""


class RunnerApi:
    """Serves what begins with `wire.PATH`, as a bare ASGI callable."""

    def __init__(
        self,
        storage: Storage,
        secret: RunnerSecret,
        terms: RunnerTerms,
        recorded: Callable[[], None],
        pods: PodTokens | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        `recorded` hears of it when a batch needs no runner any more. `pods` knows runners that come with a
        token of Kubernetes. `clock`: of the Unix epoch.
        """
        self._pods = pods
        self._storage = storage
        self._recorded = recorded
        self._secret = secret
        self._terms = terms
        self._clock = clock
        self._input = ClaimedLines(storage.leases, storage.objects)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = request_id(scope["headers"])
        client = ClientConnection(scope, receive, send)
        try:
            batch, _, call = scope["path"].removeprefix(wire.PATH).partition("/")
            token_text = _bearer(scope)
            await self._secret.get()
            job = await self._pods.job(token_text) if self._pods and _is_pod_token(token_text) else ""
            token = (
                self._token(token_text, batch)
                if not job
                else RunnerToken(batch, runner_credentials.START_EPOCH, "", 0)
            )
            method = METHODS.get(call)
            if method is None:
                raise RouteNotFound(scope["method"], scope["path"])
            if scope["method"] != method:
                raise MethodNotAllowed(scope["method"], scope["path"], method)
            if (token.epoch == runner_credentials.START_EPOCH) != (call == "lease"):
                raise Unauthorized
            count_for(scope, RUNNERS)
            body = await client.body(BODY_LIMIT)
            if call == "lines":
                answer: object = await self._lines(token, scope["query_string"])
            else:
                answer = await self._storage.run(lambda: self._answer(call, token, body, job))
            if call == "results" and isinstance(answer, ResultReceipt) and answer.order is RunnerOrder.STOP:
                self._recorded()
        except ClientDisconnected:
            return
        except BatonError as error:
            await send_error(send, error, name)
        except Exception:
            log.exception("A call of batch %s's runner failed inside the router.", batch)
            await send_error(send, InternalError(), name)
        else:
            await _send(send, answer, name)

    def _token(self, token_text: str, batch: str) -> RunnerToken:
        """Raises Unauthorized, also for a token of another batch."""
        token = runner_credentials.read_token(self._secret.value, token_text, self._clock())
        if token is None or token.batch != batch:
            raise Unauthorized
        return token

    def _answer(self, call: str, token: RunnerToken, body: bytes, job: str) -> object:
        """In a thread. `job` is the BatchJob whose pod asks, if one does."""
        try:
            match call:
                case "lease":
                    runner = wire.decode_lease_request(body).runner
                    if job:
                        self._claim(token, job)
                    return self._lease(token, runner)
                case "renew":
                    return self._renew(token, body)
                case "results":
                    return self._record(token, wire.decode_results(body))
                case "give_back":
                    self._storage.leases.give_back(token.batch, token.epoch)
                    return None
                case _:
                    self._storage.leases.leave(token.batch, token.epoch)
                    return None
        except (ValueError, msgspec.MsgspecError) as error:
            raise _malformed(error) from error

    def _claim(self, token: RunnerToken, job: str) -> None:
        """Check that the BatchJob runs the batch. Raises Unauthorized, and NotReady during validation."""
        batch = self._storage.jobs.claim(token.batch, job)
        if batch.status is BatchStatus.VALIDATING:
            raise NotReady(f"{batch.id} is being validated.")

    def _lease(self, token: RunnerToken, runner: str) -> RunnerLease | None:
        """None if there is nothing to run (any more). Raises StaleLease if another has the lease."""
        terms = self._terms
        batch, now = self._storage.ledger.find(token.batch), self._clock()
        if _order(batch, now) is RunnerOrder.STOP:
            return None
        held = self._storage.leases.join(batch.id, runner, now, terms.lease_s)
        if held is None:
            raise StaleLease(batch.id, token.epoch, batch.epoch, batch.status)
        return RunnerLease(
            epoch=held.epoch,
            token=self._issue(batch, held.epoch),
            lease_s=terms.lease_s,
            endpoint=batch.endpoint,
            total=batch.total,
            done=batch.done,
            window=self._share(self._storage.leases.working(held)),
            line_s=terms.line_s,
        )

    def _renew(self, token: RunnerToken, body: bytes) -> LeaseRenewal:
        if body:
            self._storage.metrics.retried(wire.decode_progress(body).retries)
        now = self._clock()
        batch = self._storage.leases.renew(token.batch, token.epoch, now, self._terms.lease_s)
        window = self._share(self._storage.leases.working(batch))
        return LeaseRenewal(self._issue(batch, token.epoch), _order(batch, now), window)

    def _record(self, token: RunnerToken, line_results: list[LineResult]) -> ResultReceipt:
        kept = self._storage.ledger.record(token.batch, token.epoch, line_results, int(self._clock()))
        self._storage.metrics.recorded(kept.completed, kept.new - kept.completed)
        order = RunnerOrder.GO_ON if kept.status is BatchStatus.IN_PROGRESS else RunnerOrder.STOP
        return ResultReceipt(kept.new, order, self._share(kept.working))

    def _share(self, working: int) -> int:
        """The lines in flight of each runner, if so many have lines."""
        return max(1, self._terms.window() // working)

    async def _lines(self, token: RunnerToken, query: bytes) -> InputSlice:
        """Ledger and store have their own threads, so that a slow store does not delay heartbeats."""
        try:
            turn = _turn(parse_qs(query.decode("latin-1")).get("after", [""])[0])
        except ValueError as error:
            raise _malformed(error) from error
        leases, now = self._storage.leases, self._clock()
        claim = await self._storage.run(lambda: leases.claim(token.batch, token.epoch, turn, now))
        lines: list[InputLine] = []
        if claim.range is not None or claim.cut is not None:
            lines = await self._storage.transfer(lambda: self._input.claimed(claim, token.epoch, turn))
        elif not claim.whole:
            await asyncio.sleep(NO_LINES_S)
        return InputSlice(lines, str(turn + 1), claim.whole)

    def _issue(self, batch: BatchRecord, epoch: int) -> str:
        expiry = self._clock() + self._terms.lease_s + GRACE_S
        return runner_credentials.issue_token(
            self._secret.value, batch.id, epoch, batch.owner, expiry, batch.models
        )


METHODS = {
    **dict.fromkeys(("lease", "renew", "results", "give_back", "release"), "POST"),
    "lines": "GET",
}


def _bearer(scope: Scope) -> str:
    """Return the token of a call; empty without one."""
    token_text = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, text = token_text.decode("latin-1").partition(" ")
    return text.strip() if scheme.lower() == "bearer" else ""


def _is_pod_token(token: str) -> bool:
    """Whether the token is from a BatchJob, and not from a router."""
    return not token.startswith(runner_credentials.TOKEN_PREFIX)


def _turn(cursor: str) -> int:
    """The number of a request for lines; its cursor may come from a router of an earlier version."""
    turn = int(cursor.partition("-")[0] or 0)
    if turn < 0:
        raise ValueError(cursor)
    return turn


def _order(batch: BatchRecord, now: float) -> RunnerOrder:
    """Return the order for the batch's runner at that time."""
    runs = batch.status is BatchStatus.IN_PROGRESS and now < batch.expires_at
    return RunnerOrder.GO_ON if runs else RunnerOrder.STOP


def _malformed(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"Invalid call of a runner: {error}.")


async def _send(send: Send, answer: object, name: bytes) -> None:
    body = b"" if answer is None else wire.encode(answer)
    headers = [(REQUEST_ID, name)]
    if body:
        headers += [(b"content-type", wire.MSGPACK.encode()), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200 if body else 204, "headers": headers})
    await send({"type": "http.response.body", "body": body})
