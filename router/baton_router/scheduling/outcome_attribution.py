"""
Outcome attribution: which worker a failure counts against, and which requests crash workers.

A decode worker that broke off, failed or timed out has failed itself. Failures of a prefill worker come from
the decode worker's report of the prompt, which has the reason why it computed the prompt itself. A broken
prefill worker is to blame for that. If a transfer of blocks failed, either end may be at fault, so only this
pair is not used for a while. A full worker is healthy, and so is one that rejects an invalid request.

A single lost worker proves nothing, so its requests go to other workers. A request that has lost two
workers, whatever their roles, is rejected for as long as it is remembered. Clients retry under a new id, so a
request is recognized by its tenant and a digest of the body. A complete answer clears it. Batch runners send
a suspicious line alone before they give it up, and are rejected only where a runner would have given up. A
broken stream may lose a third worker, because several workers may fail while it lasts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from baton_api import metrics
from baton_api.errors import PoisonRequest
from baton_api.metrics.counters import LabeledCounter, LabeledHistogram
from baton_api.prompt_report import Fallback, PromptReport
from baton_router.scheduling.candidates import WorkerPair
from baton_router.workers.circuit_breaker import CircuitBreaker
from baton_router.workers.costs import TransferCost
from baton_router.workers.worker import Worker

BAD_PAIR_S = 30.0
"""Seconds for which two workers do not form a pair after a failed transfer between them."""

_PREFILL_FAULTS = frozenset(
    (Fallback.UNREACHABLE, Fallback.LOST, Fallback.FAILED, Fallback.MISMATCH, Fallback.PROTOCOL)
)
_PAIR_FAULTS = frozenset((Fallback.REFUSED, Fallback.TRANSPORT, Fallback.CHECKSUM, Fallback.DEADLINE))


class OutcomeAttribution:
    """Updates the health of workers by the outcomes of requests. Belongs to one thread; time is passed in."""

    def __init__(self, transfer: Callable[[str, str], TransferCost]) -> None:
        """`transfer` returns the transfer costs of two workers, by their names."""
        self._transfer = transfer
        self._failed: set[int] = set()
        """Requests whose decode worker has failed, until they are released."""
        self.revision_requests = LabeledCounter(metrics.ROUTER_REVISION_REQUESTS)
        self.revision_first_tokens = LabeledHistogram(metrics.ROUTER_REVISION_FIRST_TOKEN)

    def sent(self, number: int, pair: WorkerPair, now: float) -> None:
        for worker in (pair.decode, pair.prefill):
            if worker is not None and worker.health.breaker.opened:
                _update(worker, worker.health.breaker.sent(number, now))

    def answered(self, number: int, pair: WorkerPair, report: PromptReport | None, now: float) -> None:
        """The decode worker has begun to answer."""
        decode, prefill = pair.decode, pair.prefill
        _update(decode, decode.health.breaker.served(number, now))
        if prefill is None or report is None:
            return
        if report.remote:
            _update(prefill, prefill.health.breaker.served(number, now))
        elif report.fallback in _PREFILL_FAULTS:
            _update(prefill, prefill.health.breaker.failed(number, now))
        elif report.fallback in _PAIR_FAULTS:
            self._transfer(prefill.name, decode.name).apart_until = now + BAD_PAIR_S

    def first_byte(self, pair: WorkerPair, seconds: float) -> None:
        """Observe the seconds from the choice of the pair to the first byte of a stream."""
        if pair.decode.revision:
            self.revision_first_tokens.observe(seconds, pair.decode.revision)

    def failed(self, number: int, pair: WorkerPair, now: float) -> None:
        """The decode worker is to blame for an answer that did not come, or not to its end."""
        self._failed.add(number)
        _update(pair.decode, pair.decode.health.breaker.failed(number, now))

    def prefill_failed(self, number: int, prefill: Worker, now: float) -> None:
        """The prefill worker is to blame for an answer that did not come."""
        self._failed.add(number)
        _update(prefill, prefill.health.breaker.failed(number, now))

    def full(self, pair: WorkerPair, now: float) -> None:
        """The decode worker had no room for the request."""
        pair.decode.health = pair.decode.health.full(now)

    def release(self, number: int, pair: WorkerPair) -> None:
        failed = number in self._failed
        self._failed.discard(number)
        if pair.decode.revision:
            self.revision_requests.add(pair.decode.revision, "failed" if failed else "passed")
        for worker in (pair.decode, pair.prefill):
            if worker is not None and worker.health.breaker.probe == number:
                _update(worker, worker.health.breaker.release(number))


def _update(worker: Worker, breaker: CircuitBreaker) -> None:
    if breaker is not worker.health.breaker:  # a new health makes the candidates be computed again
        worker.health = worker.health.judged(breaker)


LOSSES_LIMIT = 2
"""Workers that one request may lose."""

BACKGROUND_LOSSES_LIMIT = 8
"""The same for a class of the background."""

REMEMBERED_S = 600.0
"""Seconds after its last loss for which a request is remembered."""

REMEMBERED_LIMIT = 4096
"""Requests that are remembered. The one whose last loss is oldest is dropped first."""

Key = tuple[str, int]
"""Tenant, and digest of the body."""


@dataclass(slots=True)
class _WorkerLosses:
    last: float
    workers: set[tuple[str, str]] = field(default_factory=set)
    """Name and epoch: a restarted worker is another one."""


class CrashHistory:
    """Belongs to one thread. Times are of the router's clock."""

    def __init__(self) -> None:
        self._lost: OrderedDict[Key, _WorkerLosses] = OrderedDict()
        """The request whose last loss is oldest first."""

    def __len__(self) -> int:
        return len(self._lost)

    def lost(self, key: Key, worker: str, epoch: str, now: float) -> None:
        """A worker died or stopped while it had the request. Requests without a digest are not remembered."""
        if not key[1]:
            return
        self._expire(now)
        losses = self._lost.setdefault(key, _WorkerLosses(now))
        losses.last = now
        if len(losses.workers) < BACKGROUND_LOSSES_LIMIT:
            losses.workers.add((worker, epoch))
        self._lost.move_to_end(key)
        while len(self._lost) > REMEMBERED_LIMIT:
            self._lost.popitem(last=False)

    def answered(self, key: Key) -> None:
        """A worker gave the whole answer: the request is not what kills workers."""
        self._lost.pop(key, None)

    def check(self, key: Key, now: float, *, background: bool) -> None:
        """Raise PoisonRequest if a request has lost as many workers as it may. `background`: of its class."""
        self._expire(now)
        losses = self._lost.get(key)
        limit = BACKGROUND_LOSSES_LIMIT if background else LOSSES_LIMIT
        if losses is not None and len(losses.workers) >= limit:
            raise PoisonRequest(len(losses.workers))

    def _expire(self, now: float) -> None:
        while self._lost and now - next(iter(self._lost.values())).last >= REMEMBERED_S:
            self._lost.popitem(last=False)
