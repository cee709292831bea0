"""
A worker of the router: its address, its health, and what it serves.

`WorkerHealth` is a value without clock or socket: an observation with its time gives the next value. Health
checks run every few seconds (`answered`, `missed`); failed requests eject a worker in between (`breaker`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from baton_api.workers import EngineKind, Load, Role
from baton_http.upstream import Upstream
from baton_router.workers.circuit_breaker import CircuitBreaker
from baton_router.workers.discovery.listed import ListedStatus


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
        return replace(self, breaker=breaker)

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
