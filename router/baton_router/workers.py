"""
What the router knows of each worker, and whether that makes it one to choose.

`Health` is a value: what was seen goes in with its time, the next value comes out, and no clock or
socket is here. A worker is looked at every few seconds (`answered`, `missed`) and is judged by its
use in between (`struck`, `served`): three failures in a row put it aside before the next look does.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from baton_api.errors import ModelNotFound, NotReady
from baton_api.workers import Load, Role
from baton_router.upstream import Upstream

STRIKES = 3
"""Failures in a row, without a success between, that put a worker aside."""

EJECTION_S = 2.0
"""Seconds for which it is put aside the first time; each further time is twice as long."""

EJECTION_LIMIT_S = 60.0


class State(enum.StrEnum):
    STARTING = "starting"
    """It has not answered yet."""
    READY = "ready"
    NOT_READY = "not_ready"
    """It answers, and says that it cannot serve."""
    DRAINING = "draining"
    """It finishes what it has and wants nothing new."""
    EJECTED = "ejected"
    """It answers when looked at, but requests failed on it."""
    DOWN = "down"
    """It does not answer."""


@dataclass(frozen=True, slots=True)
class Health:
    """What was seen of one worker."""

    load: Load | None = None
    """The last one it reported."""
    refusal: str = "it has not answered yet"
    """Why it takes no requests, as a clause; empty if it does."""
    misses: int = 0
    down: bool = False
    strikes: int = 0
    ejections: int = 0
    ejected_until: float = 0.0

    def state(self, now: float) -> State:
        if self.down:
            return State.DOWN
        if self.load is None:
            return State.STARTING
        if self.load.draining:
            return State.DRAINING
        if self.refusal:
            return State.NOT_READY
        return State.EJECTED if now < self.ejected_until else State.READY

    def answered(self, load: Load, refusal: str = "") -> Health:
        """It was looked at and answered; `refusal` is why it is not ready, if it is not."""
        same_process = self.load is not None and self.load.epoch == load.epoch
        if same_process and not self.down:
            return replace(self, load=load, refusal=refusal, misses=0)
        return Health(load=load, refusal=refusal)  # what an earlier process did is void

    def missed(self, limit: int, reason: str) -> Health:
        """It was looked at and did not answer, for the `limit`-th time or not."""
        misses = self.misses + 1
        if misses < limit:
            return replace(self, misses=misses)
        return replace(self, misses=misses, down=True, refusal=reason)

    def struck(self, now: float) -> Health:
        """A request failed on it: no connection, or one that broke before the answer began."""
        strikes = self.strikes + 1
        if strikes < STRIKES or now < self.ejected_until:
            return replace(self, strikes=strikes)
        pause = min(EJECTION_S * 2**self.ejections, EJECTION_LIMIT_S)
        # One more failure after the pause is enough to put it aside again.
        return replace(self, strikes=STRIKES - 1, ejections=self.ejections + 1, ejected_until=now + pause)

    def served(self) -> Health:
        """A request was answered by it, with whatever status."""
        if not self.strikes and not self.ejections:
            return self
        return replace(self, strikes=0, ejections=0, ejected_until=0.0)


class Worker:
    """One worker: its address, its health, and how much of its work is ours."""

    def __init__(self, upstream: Upstream, listed: Role) -> None:
        self.upstream = upstream
        self.listed = listed
        """DECODE or PREFILL: the flag that named it."""
        self.health = Health()
        self.in_flight = 0
        """Requests that this router has with it now."""
        self._in_flight_reported = 0

    @property
    def name(self) -> str:
        return self.upstream.name

    @property
    def model(self) -> str:
        return self.health.load.model if self.health.load else ""

    @property
    def names(self) -> tuple[str, ...]:
        """All that requests may call its model; the first one is `model`."""
        load = self.health.load
        return () if load is None or not load.model else load.names or (load.model,)

    @property
    def control(self) -> str:
        return self.health.load.control if self.health.load else ""

    @property
    def compatibility(self) -> str:
        return self.health.load.compatibility if self.health.load else ""

    def ready(self, now: float) -> bool:
        return self.health.state(now) is State.READY

    @property
    def pressure(self) -> tuple[int, int]:
        """
        How busy it is, to compare with others: requests, then prompt tokens that wait.

        Our own requests are known to the moment. Other routers' are what the worker reported beyond
        ours of that time.
        """
        load = self.health.load
        if load is None:
            return self.in_flight, 0
        others = max(0, load.running + load.queued - self._in_flight_reported)
        return self.in_flight + others, load.queued_tokens

    def answered(self, load: Load, refusal: str = "") -> None:
        """See `Health.answered`. A worker under the wrong flag answers, but is not ready."""
        if (load.role == Role.PREFILL) != (self.listed == Role.PREFILL):
            refusal = f"its role is {load.role}, but it is listed under {self.listed}"
        elif self.listed == Role.PREFILL and not load.control:
            refusal = "it reports no control address"
        self._in_flight_reported = self.in_flight
        self.health = self.health.answered(load, refusal)


@dataclass(frozen=True, slots=True)
class Workers:
    """All workers that the flags named."""

    decode: tuple[Worker, ...]
    prefill: tuple[Worker, ...]

    @property
    def all(self) -> tuple[Worker, ...]:
        return self.decode + self.prefill

    def models(self) -> tuple[str, ...]:
        """The names of models that have been served here, whether or not somebody can serve them now."""
        return tuple(sorted({name for worker in self.decode for name in worker.names}))

    def context(self, model: str) -> int | None:
        """Tokens that every worker of this name has room for; None if they do not say."""
        loads = [one.health.load for one in self.decode if model in one.names]
        return min((load.max_model_len for load in loads if load and load.max_model_len), default=None)

    def refusal(self, now: float) -> str | None:
        """Why no request can be served now; None if one can."""
        if not self.decode:
            return "No decode worker is configured: name one with --decode http://HOST:PORT."
        if usable(self.decode, now):
            return None
        states = ", ".join(f"{worker.name} is {worker.health.state(now)}" for worker in self.decode)
        return f"No decode worker is ready: {states}."

    def serving(self, model: str | None, tried: Collection[str], now: float) -> Sequence[Worker]:
        """
        Decode workers that can take a request for `model` and are not in `tried`, by name; perhaps none.

        `model` is None if the request does not say, and then any worker may, to refuse it in its own
        words. Raises ModelNotFound, or NotReady if nobody at all can: that too while a worker has not
        said yet what it serves.
        """
        known = self.decode if model is None else [one for one in self.decode if model in one.names]
        if self.decode and not known and all(one.health.load for one in self.decode):
            assert model is not None  # else all are known
            raise ModelNotFound(model, self.models())
        candidates = usable(known, now)
        if not candidates:
            raise NotReady(self.refusal(now) or f"No worker that serves {model!r} is ready.")
        return [worker for worker in candidates if worker.name not in tried]

    def prefills(self, decode: Worker, now: float) -> Sequence[Worker]:
        """Prefill workers whose blocks `decode` can take over."""
        return [
            worker
            for worker in self.prefill
            if worker.ready(now) and worker.compatibility == decode.compatibility
        ]


def usable(workers: Sequence[Worker], now: float) -> Sequence[Worker]:
    """Those that are ready; if none is, those put aside: they may fail, and nobody else would not."""
    states = [(worker, worker.health.state(now)) for worker in workers]
    ready = [worker for worker, state in states if state is State.READY]
    return ready or [worker for worker, state in states if state is State.EJECTED]
