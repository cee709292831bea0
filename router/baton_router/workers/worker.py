"""
The workers of the router: address, health, and whether they can be chosen.

`WorkerHealth` is a value without clock or socket: an observation with its time gives the next value. Health
checks run every few seconds (`answered`, `missed`); failed requests eject a worker in between (`breaker`). If
more than half of the workers would be ejected, the fault is elsewhere, and all stay candidates.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from baton_api.engines import EngineKind
from baton_api.errors import ModelNotFound, NotReady
from baton_api.workers import Load, Role
from baton_http.upstream import Upstream
from baton_router.workers.circuit_breaker import CircuitBreaker
from baton_router.workers.discovery.listed import ListedStatus

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
        self.decode = tuple(one for one in self.decode if one is not worker)
        self.prefill = tuple(one for one in self.prefill if one is not worker)
        self.leaving += (worker,)
        self._gone_models = {name: at for name, at in self._gone_models.items() if now - at < MODEL_GONE_S}
        self._gone_models.update(dict.fromkeys(before.difference(self.models()), now))
        self._tell()

    def restore(self, worker: Worker) -> None:
        """List a leaving worker again."""
        self.leaving = tuple(one for one in self.leaving if one is not worker)
        self.add(worker)

    def remove(self, worker: Worker) -> None:
        """Remove a leaving worker."""
        worker.removed = True
        self.leaving = tuple(one for one in self.leaving if one is not worker)
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
        loads = [one.health.load for one in self.decode if model in one.names]
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
        matching = self.decode if model is None else [one for one in self.decode if model in one.names]
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
        if not self.decode or not self.complete() or any(one.health.load is None for one in self.decode):
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
