"""
A worker of the router: address, health, booked work, circuit breaker, and whether it can be chosen.

`WorkerHealth` is a value without clock or socket: an observation with its time gives the next value. Health
checks run every few seconds (`answered`, `missed`); failed requests eject a worker in between (`breaker`). If
more than half of the workers would be ejected, the fault is elsewhere, and all stay candidates.

A prompt is booked with its predicted seconds when it is sent, and released with its first token. A worker
computes prompts one after the other, so the backlog ahead of a new one is the sum of the bookings. The time
for which the first of them has been computed is subtracted. Otherwise a worker that is nearly done would look
as busy as one that has just begun.

    closed -> open, for a pause -> half open: one request decides -> closed, or open for twice as long

A breaker is a value: each method takes an outcome and its time and returns the next breaker. Only failures of
the worker count. A busy worker, or one that rejects an invalid request, is healthy. Without recent failures,
a request costs a check of two fields.
"""

from __future__ import annotations

import asyncio
import enum
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from baton_api.errors import ModelNotFound, NotReady
from baton_api.workers import EngineKind, Load, Role
from baton_http.upstream import Upstream
from baton_router.workers.discovery.listed import ListedStatus

FAILURES_IN_A_ROW = 5
"""Consecutive failures that open the breaker."""

WINDOW = 20
"""Latest outcomes, from a failure on, that open the breaker if half of them are failures."""

WINDOW_S = 10.0
"""Seconds within which these outcomes must have come."""

PAUSE_S = 2.0
"""Seconds of the first pause; each further pause is twice as long."""

PAUSE_LIMIT_S = 60.0
"""Maximum seconds of a pause. After this time without one, the next pause is a first one again."""


@dataclass(frozen=True, slots=True)
class CircuitBreaker:
    """The breaker of one worker. Requests have unique numbers > 0."""

    failures: int = 0
    """Consecutive ones."""
    recent: tuple[tuple[float, bool], ...] = ()
    """Times of outcomes and whether they were failures, from a failure on; the newest last."""
    openings: int = 0
    """Consecutive pauses, less than `PAUSE_LIMIT_S` apart."""
    opened: bool = False
    since: float = 0.0
    """When it last opened or closed."""
    probe: int = 0
    """Number of the running request that decides whether the breaker closes; 0 without one."""

    @property
    def until(self) -> float:
        """The end of the pause, if it is open."""
        return self.since + min(PAUSE_S * 2.0 ** min(self.openings - 1, 10), PAUSE_LIMIT_S)

    def refuses(self, now: float) -> bool:
        """Whether the worker should get no request now."""
        return self.opened and (now < self.until or self.probe != 0)

    def sent(self, number: int, now: float) -> CircuitBreaker:
        """A request was sent to the worker, even if the breaker refuses."""
        if not self.opened or self.refuses(now):
            return self
        return replace(self, probe=number)

    def served(self, number: int, now: float) -> CircuitBreaker:
        """A request was answered with a status that is not the worker's fault."""
        if self.opened:
            if number != self.probe:
                return self  # sent before the pause, or as a last resort: one answer proves nothing
            return CircuitBreaker(openings=self.openings, since=now)
        if not self.failures and not self.recent:
            return self
        recent = (*self.recent, (now, False))[-WINDOW:]
        return replace(self, failures=0, recent=recent if any(failed for _, failed in recent) else ())

    def failed(self, number: int, now: float) -> CircuitBreaker:
        """A request failed because of the worker."""
        if self.opened:
            return self._open(now) if number == self.probe else self
        recent = (*self.recent, (now, True))[-WINDOW:]
        half = len(recent) == WINDOW and now - recent[0][0] <= WINDOW_S
        half = half and 2 * sum(failed for _, failed in recent) >= WINDOW
        if half or self.failures + 1 >= FAILURES_IN_A_ROW:
            return self._open(now)
        return replace(self, failures=self.failures + 1, recent=recent)

    def release(self, number: int) -> CircuitBreaker:
        """A request has ended; if it was the probe and decided nothing, another one may be."""
        return replace(self, probe=0) if number and number == self.probe else self

    def _open(self, now: float) -> CircuitBreaker:
        again = self.opened or now - self.since <= PAUSE_LIMIT_S
        return CircuitBreaker(openings=self.openings + 1 if again else 1, opened=True, since=now)


PROGRESS_LIMIT = 0.95
"""Share of a booking that can have passed while it is not done: the rest is still to come."""


class PrefillBookings:
    """The prompts that one worker has to compute, in the order in which they were sent."""

    __slots__ = ("_booked", "_head_began", "_head_s", "seconds", "tokens", "waiting")

    def __init__(self) -> None:
        self._booked: OrderedDict[int, tuple[float, int]] = OrderedDict()
        """Number -> seconds, tokens."""
        self._head_began = 0.0
        self._head_s = 0.0
        """Seconds of the first one that can have passed while it is not done."""
        self.seconds = 0.0
        """Of all bookings."""
        self.tokens = 0
        self.waiting = 0
        """Number of bookings."""

    def book(self, number: int, seconds: float, tokens: int, now: float) -> None:
        """Add a prompt with `tokens` to compute in predicted `seconds`."""
        if not self._booked:
            self._head_began = now
            self._head_s = PROGRESS_LIMIT * seconds
            self.seconds = 0.0  # sums of floating point drift; an empty list is a chance to be exact
        self._booked[number] = seconds, tokens
        self.waiting += 1
        self.seconds += seconds
        self.tokens += tokens

    def release(self, number: int, now: float) -> None:
        """Remove a prompt that is computed, or never will be. Unknown numbers are ignored."""
        booked = self._booked
        if number not in booked:
            return
        was_head = next(iter(booked)) == number
        seconds, tokens = booked.pop(number)
        self.waiting -= 1
        self.seconds -= seconds
        self.tokens -= tokens
        if was_head:
            self._head_began = now
            self._head_s = PROGRESS_LIMIT * next(iter(booked.values()))[0] if booked else 0.0

    def waited_s(self, number: int, sent: float) -> float | None:
        """
        Seconds for which a prompt sent at `sent` waited until the worker began with it, by the bookings.

        None if an earlier prompt is not done: then the worker computes several at once.
        """
        if number not in self._booked or next(iter(self._booked)) != number:
            return None
        return max(0.0, self._head_began - sent)

    def backlog_s(self, now: float) -> float:
        """Seconds until the worker would begin with another prompt."""
        if not self.waiting:
            return 0.0
        progress = now - self._head_began
        left = self.seconds - (progress if progress < self._head_s else self._head_s)
        return left if left > 0.0 else 0.0


class StreamBookings:
    """The choices that one worker generates, or soon will."""

    __slots__ = ("_booked", "count", "tokens")

    def __init__(self) -> None:
        self._booked: dict[int, tuple[int, int]] = {}
        """Number of a request -> tokens, choices."""
        self.tokens = 0
        """Of all their contexts."""
        self.count = 0

    def book(self, number: int, tokens: int, choices: int = 1) -> None:
        """Add a request, whose choices share the `tokens` of its prompts."""
        self._booked[number] = tokens, choices
        self.tokens += tokens
        self.count += choices

    def release(self, number: int) -> None:
        tokens, choices = self._booked.pop(number, (0, 0))
        self.tokens -= tokens
        self.count -= choices


MODEL_GONE_S = 600.0
"""Seconds for which a model without workers gives 503 and not 404: another worker may come soon."""


class WorkerStatus(enum.StrEnum):
    STARTING = "starting"
    """No health check has succeeded yet."""
    READY = "ready"
    NOT_READY = "not_ready"
    """It responds, but cannot serve."""
    DRAINING = "draining"
    """It finishes its requests and takes no new ones."""
    EJECTED = "ejected"
    """Health checks succeed, but requests failed."""
    HALF_OPEN = "half_open"
    """Its ejection is over; the next request decides."""
    FULL = "full"
    """It rejected a request a moment ago, because it had no capacity."""
    DOWN = "down"
    """It does not respond."""


ACCEPTING = (WorkerStatus.READY, WorkerStatus.HALF_OPEN)

FULL_S = 0.5
"""Seconds for which a worker that rejected a request is used only as a last resort: it looks idle and would
get all other requests."""

_CLOSED = CircuitBreaker()


@dataclass(frozen=True, slots=True, eq=False)
class WorkerHealth:
    """Observations of one worker; compared by identity, so that a change is cheap to detect."""

    load: Load | None = None
    """The last reported load."""
    unavailable_reason: str = "it has not answered yet"
    """Why it takes no requests, as a clause; empty if it does."""
    misses: int = 0
    down: bool = False
    breaker: CircuitBreaker = _CLOSED
    """Outcome of its requests."""
    full_until: float = 0.0

    def state(self, now: float) -> WorkerStatus:
        if self.down:
            return WorkerStatus.DOWN
        if self.load is None:
            return WorkerStatus.STARTING
        if self.load.draining:
            return WorkerStatus.DRAINING
        if self.unavailable_reason:
            return WorkerStatus.NOT_READY
        if not self.breaker.opened:
            return WorkerStatus.FULL if now < self.full_until else WorkerStatus.READY
        return WorkerStatus.EJECTED if self.breaker.refuses(now) else WorkerStatus.HALF_OPEN

    def answered(self, load: Load, unavailable_reason: str = "") -> WorkerHealth:
        """A health check succeeded; `unavailable_reason` is why the worker is not ready, if it is not."""
        same_process = self.load is not None and self.load.epoch == load.epoch
        if same_process and not self.down:
            return replace(self, load=load, unavailable_reason=unavailable_reason, misses=0)
        # The history of an earlier process does not count.
        return WorkerHealth(load=load, unavailable_reason=unavailable_reason)

    def missed(self, limit: int, reason: str) -> WorkerHealth:
        """A health check failed; after `limit` failures in a row the worker is down."""
        misses = self.misses + 1
        if misses < limit:
            return replace(self, misses=misses)
        return replace(self, misses=misses, down=True, unavailable_reason=reason)

    def judged(self, breaker: CircuitBreaker) -> WorkerHealth:
        """`breaker` is the state after a request was sent or ended."""
        return self if breaker is self.breaker else replace(self, breaker=breaker)

    def full(self, now: float) -> WorkerHealth:
        """It had no capacity for a request."""
        return replace(self, full_until=now + FULL_S)


class Worker:
    """One worker: address, health, and the requests of this router."""

    def __init__(
        self,
        upstream: Upstream,
        listed: Role,
        revision: str = "",
        discovery_status: ListedStatus = ListedStatus.SERVING,
        engine: EngineKind | None = None,
    ) -> None:
        """`engine` as its source reports; None if the router must find out."""
        self.upstream = upstream
        self.engine = engine
        self.listed = listed
        """DECODE or PREFILL: the role under which it is listed."""
        self.revision = revision
        """Its revision."""
        self._discovery_status = discovery_status
        self.group = revision
        """Only workers of one group can be a pair."""
        self.expired = False
        """Whether its drain time is over."""
        self.removed = False
        """Whether it is no longer listed and has no requests."""
        self.health = WorkerHealth()
        self.warnings: tuple[str, ...] = ()
        """Why it serves with less than it was listed for, as clauses: see `workers.pairing`."""
        self.in_flight = 0
        """Requests of this router at the worker."""

    @property
    def name(self) -> str:
        """Its address, `host:port`."""
        return self.upstream.name

    @property
    def own_name(self) -> str:
        """Its name in its own log, such as prefill-0. Empty: unknown."""
        return self.health.load.name if self.health.load else ""

    @property
    def title(self) -> str:
        """Its own name and its address, for people."""
        return f"{self.own_name} ({self.name})" if self.own_name else self.name

    @property
    def model(self) -> str:
        return self.health.load.model if self.health.load else ""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its model; the first one is `model`."""
        load = self.health.load
        if load is None or not load.model:
            return ()
        return (*(load.names or (load.model,)), *load.adapters)

    def is_adapter(self, model: str | None) -> bool:
        """Whether `model` is an adapter of the worker's model."""
        load = self.health.load
        return load is not None and model in load.adapters

    @property
    def engine_kind(self) -> EngineKind:
        """Its engine, as last reported."""
        return self.health.load.engine if self.health.load else EngineKind.BATON

    @property
    def computes_prompts(self) -> bool:
        """Whether it can serve a request without a prefill worker."""
        load = self.health.load
        return load is None or load.local_prefill

    @property
    def control(self) -> str:
        return self.health.load.control if self.health.load else ""

    @property
    def compatibility(self) -> str:
        return self.health.load.compatibility if self.health.load else ""

    def ready(self, now: float) -> bool:
        return self.state(now) in ACCEPTING

    def state(self, now: float) -> WorkerStatus:
        """As observed, unless its source reports worse."""
        seen = self.health.state(now)
        if (
            self.discovery_status is ListedStatus.SERVING
            or seen is WorkerStatus.DOWN
            or seen is WorkerStatus.STARTING
        ):
            return seen
        return (
            WorkerStatus.DRAINING
            if self.discovery_status is ListedStatus.TERMINATING
            else WorkerStatus.NOT_READY
        )

    @property
    def discovery_status(self) -> ListedStatus:
        """The status that its source reports."""
        return self._discovery_status

    @discovery_status.setter
    def discovery_status(self, discovery_status: ListedStatus) -> None:
        self._discovery_status = discovery_status
        self.health = replace(self.health)  # a new value invalidates caches that compare it

    @property
    def reason(self) -> str:
        """Why it takes no requests, as a clause; empty if it does."""
        if self.health.unavailable_reason or self.discovery_status is ListedStatus.SERVING:
            return self.health.unavailable_reason
        return f"it is listed as {self.discovery_status.name.lower()}"

    def answered(self, load: Load, unavailable_reason: str = "") -> None:
        """See `WorkerHealth.answered`. A worker with the wrong role responds, but is not ready."""
        if (load.role == Role.PREFILL) != (self.listed == Role.PREFILL):
            unavailable_reason = f"its role is {load.role}, but it is listed under {self.listed}"
        elif self.listed == Role.PREFILL and not load.control and not unavailable_reason:
            unavailable_reason = "it reports no control address"
        self.health = self.health.answered(load, unavailable_reason)
        self.group = f"{self.revision}/{load.compatibility}"


class Workers:
    """All listed workers, and those that are leaving."""

    def __init__(self, decode: tuple[Worker, ...] = (), prefill: tuple[Worker, ...] = ()) -> None:
        self.decode = decode
        self.prefill = prefill
        self.leaving: tuple[Worker, ...] = ()
        self.unlisted: Callable[[], str] = lambda: "none is listed"
        """The reason for an empty list of decode workers."""
        self.complete: Callable[[], bool] = lambda: True
        """Whether every source has reported; before that a model may only seem unknown."""
        self.holding = False
        """Whether requests wait while no worker can serve them, because workers start on demand."""
        self.hold_models: tuple[str, ...] = ()
        """Names of the models of such workers, if known."""
        self._gone_models: dict[str, float] = {}
        """Names that are no longer served, with the time of the change."""
        self._changed = asyncio.Event()

    @property
    def listed(self) -> tuple[Worker, ...]:
        return self.decode + self.prefill

    @property
    def all(self) -> tuple[Worker, ...]:
        return self.decode + self.prefill + self.leaving

    def add(self, worker: Worker) -> None:
        """Add a listed worker."""
        if worker.listed is Role.PREFILL:
            self.prefill += (worker,)
        else:
            self.decode += (worker,)
        self._tell()

    def start_draining(self, worker: Worker, now: float) -> None:
        """Remove a worker from the list: it gets no new requests and stays until `remove`."""
        before = set(self.models())
        worker.discovery_status = ListedStatus.TERMINATING
        self.decode = tuple(listed for listed in self.decode if listed is not worker)
        self.prefill = tuple(listed for listed in self.prefill if listed is not worker)
        self.leaving += (worker,)
        self._gone_models = {name: at for name, at in self._gone_models.items() if now - at < MODEL_GONE_S}
        self._gone_models.update(dict.fromkeys(before.difference(self.models()), now))
        self._tell()

    def restore(self, worker: Worker) -> None:
        """List a leaving worker again."""
        self.leaving = tuple(listed for listed in self.leaving if listed is not worker)
        self.add(worker)

    def remove(self, worker: Worker) -> None:
        """Remove a leaving worker."""
        worker.removed = True
        self.leaving = tuple(listed for listed in self.leaving if listed is not worker)
        self._tell()

    async def changed(self) -> None:
        """Wait until a worker is added or removed."""
        await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def models(self) -> tuple[str, ...]:
        """Names of the models of listed workers, whether or not they can serve now; aliases last."""
        names = {name for worker in self.decode for name in worker.names} | set(self.hold_models)
        aliases = {name for worker in self.decode for name in worker.names[1:]}
        return tuple(sorted(names, key=lambda name: (name in aliases, name)))

    def context(self, model: str) -> int | None:
        """Context length that every worker of this model supports; None if unknown."""
        loads = [worker.health.load for worker in self.decode if model in worker.names]
        return min((load.max_model_len for load in loads if load and load.max_model_len), default=None)

    def unavailable_reason(self, now: float) -> str | None:
        """Why no request can be served now; None if one can."""
        if not self.decode:
            return f"There is no decode worker: {self.unlisted()}."
        if usable(self.decode, now):
            return None
        states = ", ".join(f"{worker.name} is {worker.state(now)}" for worker in self.decode)
        return f"No decode worker is ready: {states}."

    def unready_reason(self, now: float) -> str | None:
        """Why no request should be sent here now; None if one can be served or may wait."""
        return None if self.holding and self.complete() else self.unavailable_reason(now)

    def serving(self, model: str | None, excluded: Collection[str], now: float) -> Sequence[Worker]:
        """
        Decode workers that can take a request for `model` and are not in `excluded`; may be empty.

        Without a `model`, any worker may take it, to reject it in its own words. Raises ModelNotFound, or
        NotReady if no worker can serve it, also while a worker has not reported its model yet.
        """
        matching = (
            self.decode if model is None else [listed for listed in self.decode if model in listed.names]
        )
        if not matching and self._surely_unknown(model, now):
            assert model is not None  # else every worker matches
            raise ModelNotFound(model, self.models())
        candidates = usable(matching, now)
        if not candidates:
            raise NotReady(
                self._unserved_reason(model, now), public="No worker that serves this model is ready."
            )
        if not excluded:
            return candidates
        return preferred([worker for worker in matching if worker.name not in excluded], now)

    def prefills(self, decode: Worker, now: float, model: str | None = None) -> Sequence[Worker]:
        """Prefill workers whose blocks `decode` can take over; for an adapter, those that have it."""
        matching = [worker for worker in usable(self.prefill, now) if worker.group == decode.group]
        if decode.is_adapter(model):
            return [worker for worker in matching if worker.is_adapter(model)]
        return matching

    def _surely_unknown(self, model: str | None, now: float) -> bool:
        """Whether no worker serves this model, did so lately, or might after its first report."""
        if self.hold_models:
            return model is not None and model not in self.hold_models
        if (
            not self.decode
            or not self.complete()
            or any(worker.health.load is None for worker in self.decode)
        ):
            return False
        return model is not None and now - self._gone_models.get(model, -MODEL_GONE_S) >= MODEL_GONE_S

    def _unserved_reason(self, model: str | None, now: float) -> str:
        gone = self._gone_models.get(model or "")
        if gone is not None and model not in self.models():
            return f"No worker serves {model!r}: the last one that did went {now - gone:.0f} s ago."
        return self.unavailable_reason(now) or f"No worker that serves {model!r} is ready."


def usable(workers: Sequence[Worker], now: float) -> Sequence[Worker]:
    """
    Workers that take requests; ejected ones too if more than half are ejected.

    Without any, the workers whose requests and health checks succeed: when Kubernetes has lost a node or
    terminates the last worker, they can still serve.
    """
    states = [(worker, worker.state(now)) for worker in workers]
    taking = [worker for worker, state in states if state in ACCEPTING]
    if len(taking) == len(workers):
        return taking
    aside = sum(state is WorkerStatus.EJECTED for _, state in states)
    full = [worker for worker, state in states if state is WorkerStatus.FULL]
    if 2 * aside > len(taking) + len(full) + aside:
        return [worker for worker, state in states if state in ACCEPTING or state is WorkerStatus.EJECTED]
    return taking or full or [worker for worker in workers if worker.health.state(now) in ACCEPTING]


def preferred(workers: Sequence[Worker], now: float) -> Sequence[Worker]:
    """For a retry: healthy workers, and ejected ones only without them."""
    states = [(worker, worker.state(now)) for worker in workers]
    for wanted in (
        (WorkerStatus.READY,),
        (WorkerStatus.FULL,),
        (WorkerStatus.HALF_OPEN, WorkerStatus.EJECTED),
    ):
        workers_found = [worker for worker, state in states if state in wanted]
        if workers_found:
            return workers_found
    return []
