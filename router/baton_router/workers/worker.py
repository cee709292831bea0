"""
What the router knows of each worker, and whether that makes it one to choose.

`WorkerHealth` is a value: what was seen goes in with its time, the next value comes out, and no clock or
socket is here. A worker is looked at every few seconds (`answered`, `missed`) and is judged by its
use in between: requests that fail put it aside (`breaker`) before the next look does. But never are more
than half of them put aside: then it is not they who are ill, and all are asked.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from baton_api.errors import ModelNotFound, NotReady
from baton_api.workers import Load, Role
from baton_http.upstream import Upstream
from baton_router.workers.circuit_breaker import CircuitBreaker
from baton_router.workers.discovery.listed import ListedStatus

MODEL_GONE_S = 600.0
"""Seconds for which a model whose last worker has gone is missed (503) and not unknown (404): there may well
be another worker soon."""


class WorkerStatus(enum.StrEnum):
    STARTING = "starting"
    """It has not answered yet."""
    READY = "ready"
    NOT_READY = "not_ready"
    """It answers, and says that it cannot serve."""
    DRAINING = "draining"
    """It finishes what it has and wants nothing new."""
    EJECTED = "ejected"
    """It answers when looked at, but requests failed on it."""
    ON_TRIAL = "on_trial"
    """It was ejected for long enough; the next request shows whether it is well."""
    FULL = "full"
    """It refused a request a moment ago, because it had no room for it."""
    DOWN = "down"
    """It does not answer."""


ACCEPTING = (WorkerStatus.READY, WorkerStatus.ON_TRIAL)

FULL_S = 0.5
"""Seconds for which a worker that refused one request is asked only if nobody else is there: it looks idle,
and would be given all the others."""

_CLOSED = CircuitBreaker()


@dataclass(frozen=True, slots=True, eq=False)
class WorkerHealth:
    """What was seen of one worker; equal to itself alone, so that it is cheap to see whether it changed."""

    load: Load | None = None
    """The last one it reported."""
    refusal: str = "it has not answered yet"
    """Why it takes no requests, as a clause; empty if it does."""
    misses: int = 0
    down: bool = False
    breaker: CircuitBreaker = _CLOSED
    """What requests to it came to."""
    full_until: float = 0.0

    def state(self, now: float) -> WorkerStatus:
        if self.down:
            return WorkerStatus.DOWN
        if self.load is None:
            return WorkerStatus.STARTING
        if self.load.draining:
            return WorkerStatus.DRAINING
        if self.refusal:
            return WorkerStatus.NOT_READY
        if not self.breaker.opened:
            return WorkerStatus.FULL if now < self.full_until else WorkerStatus.READY
        return WorkerStatus.EJECTED if self.breaker.refuses(now) else WorkerStatus.ON_TRIAL

    def answered(self, load: Load, refusal: str = "") -> WorkerHealth:
        """It was looked at and answered; `refusal` is why it is not ready, if it is not."""
        same_process = self.load is not None and self.load.epoch == load.epoch
        if same_process and not self.down:
            return replace(self, load=load, refusal=refusal, misses=0)
        return WorkerHealth(load=load, refusal=refusal)  # what an earlier process did is void

    def missed(self, limit: int, reason: str) -> WorkerHealth:
        """It was looked at and did not answer, for the `limit`-th time or not."""
        misses = self.misses + 1
        if misses < limit:
            return replace(self, misses=misses)
        return replace(self, misses=misses, down=True, refusal=reason)

    def judged(self, breaker: CircuitBreaker) -> WorkerHealth:
        """A request was sent to it, or ended: `breaker` is what became of its own."""
        return self if breaker is self.breaker else replace(self, breaker=breaker)

    def full(self, now: float) -> WorkerHealth:
        """It had no room for a request."""
        return replace(self, full_until=now + FULL_S)


class Worker:
    """One worker: its address, its health, and how much of its work is ours."""

    def __init__(
        self,
        upstream: Upstream,
        listed: Role,
        revision: str = "",
        standing: ListedStatus = ListedStatus.SERVING,
    ) -> None:
        self.upstream = upstream
        self.listed = listed
        """DECODE or PREFILL: what it was named for."""
        self.revision = revision
        """The generation that it belongs to."""
        self._standing = standing
        self.group = revision
        """Only workers of one group can be a pair."""
        self.expired = False
        """Whether it was to end what it had, and has had its time."""
        self.gone = False
        """Whether it is not listed any more and has ended what it had."""
        self.health = WorkerHealth()
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
        return self.state(now) in ACCEPTING

    def state(self, now: float) -> WorkerStatus:
        """As it was seen itself, unless those who listed it know worse."""
        seen = self.health.state(now)
        if (
            self.standing is ListedStatus.SERVING
            or seen is WorkerStatus.DOWN
            or seen is WorkerStatus.STARTING
        ):
            return seen
        return WorkerStatus.DRAINING if self.standing is ListedStatus.TERMINATING else WorkerStatus.NOT_READY

    @property
    def standing(self) -> ListedStatus:
        """What those who listed it say of it."""
        return self._standing

    @standing.setter
    def standing(self, standing: ListedStatus) -> None:
        self._standing = standing
        self.health = replace(self.health)  # so that whoever relies on the old one looks again

    @property
    def reason(self) -> str:
        """Why it takes no requests, as a clause; empty if it does."""
        if self.health.refusal or self.standing is ListedStatus.SERVING:
            return self.health.refusal
        return f"it is listed as {self.standing.name.lower()}"

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
        """See `WorkerHealth.answered`. A worker under the wrong flag answers, but is not ready."""
        if (load.role == Role.PREFILL) != (self.listed == Role.PREFILL):
            refusal = f"its role is {load.role}, but it is listed under {self.listed}"
        elif self.listed == Role.PREFILL and not load.control:
            refusal = "it reports no control address"
        self._in_flight_reported = self.in_flight
        self.health = self.health.answered(load, refusal)
        self.group = f"{self.revision}/{load.compatibility}"


class Workers:
    """All workers that are listed, and those that are not any more and have not ended what they had."""

    def __init__(self, decode: tuple[Worker, ...] = (), prefill: tuple[Worker, ...] = ()) -> None:
        self.decode = decode
        self.prefill = prefill
        self.leaving: tuple[Worker, ...] = ()
        self.unlisted: Callable[[], str] = lambda: "none is listed"
        """Why there is no decode worker at all, if there is none."""
        self.complete: Callable[[], bool] = lambda: True
        """Whether all who list workers have done so; until then a model may only seem to be unknown."""
        self.holding = False
        """Whether requests wait while nobody can serve them: workers are started when they are needed."""
        self.hold_models: tuple[str, ...] = ()
        """Names of the models that such workers have, as far as somebody says."""
        self._gone_models: dict[str, float] = {}
        """Names that are served no more -> since when."""
        self._changed = asyncio.Event()

    @property
    def listed(self) -> tuple[Worker, ...]:
        return self.decode + self.prefill

    @property
    def all(self) -> tuple[Worker, ...]:
        return self.decode + self.prefill + self.leaving

    def come(self, worker: Worker) -> None:
        """It is listed from now on."""
        if worker.listed is Role.PREFILL:
            self.prefill += (worker,)
        else:
            self.decode += (worker,)
        self._tell()

    def leave(self, worker: Worker, now: float) -> None:
        """It is not listed any more: it gets nothing new, and stays until it is `gone`."""
        before = set(self.models())
        worker.standing = ListedStatus.TERMINATING
        self.decode = tuple(one for one in self.decode if one is not worker)
        self.prefill = tuple(one for one in self.prefill if one is not worker)
        self.leaving += (worker,)
        self._gone_models = {name: at for name, at in self._gone_models.items() if now - at < MODEL_GONE_S}
        self._gone_models.update(dict.fromkeys(before.difference(self.models()), now))
        self._tell()

    def stay(self, worker: Worker) -> None:
        """It was leaving, and is listed again."""
        self.leaving = tuple(one for one in self.leaving if one is not worker)
        self.come(worker)

    def gone(self, worker: Worker) -> None:
        """It has ended what it had, or has had enough time for it."""
        worker.gone = True
        self.leaving = tuple(one for one in self.leaving if one is not worker)
        self._tell()

    async def changed(self) -> None:
        """Wait until another worker is there, or one less."""
        await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def models(self) -> tuple[str, ...]:
        """
        The names of models that listed workers have, whether or not one can serve them now.

        Aliases come last: tools that take the first name get one that stands in answers.
        """
        names = {name for worker in self.decode for name in worker.names} | set(self.hold_models)
        aliases = {name for worker in self.decode for name in worker.names[1:]}
        return tuple(sorted(names, key=lambda name: (name in aliases, name)))

    def context(self, model: str) -> int | None:
        """Tokens that every worker of this name has room for; None if they do not say."""
        loads = [one.health.load for one in self.decode if model in one.names]
        return min((load.max_model_len for load in loads if load and load.max_model_len), default=None)

    def refusal(self, now: float) -> str | None:
        """Why no request can be served now; None if one can."""
        if not self.decode:
            return f"There is no decode worker: {self.unlisted()}."
        if usable(self.decode, now):
            return None
        states = ", ".join(f"{worker.name} is {worker.state(now)}" for worker in self.decode)
        return f"No decode worker is ready: {states}."

    def unready(self, now: float) -> str | None:
        """Why no request is to be sent here now; None if one can be served, or will wait for a worker."""
        return None if self.holding and self.complete() else self.refusal(now)

    def serving(self, model: str | None, tried: Collection[str], now: float) -> Sequence[Worker]:
        """
        Decode workers that can take a request for `model` and are not in `tried`, by name; perhaps none.

        `model` is None if the request does not say, and then any worker may, to refuse it in its own
        words. Raises ModelNotFound, or NotReady if nobody at all can: that too while a worker has not
        said yet what it serves.
        """
        known = self.decode if model is None else [one for one in self.decode if model in one.names]
        if not known and self._surely_unknown(model, now):
            assert model is not None  # else all are known
            raise ModelNotFound(model, self.models())
        candidates = usable(known, now)
        if not candidates:
            raise NotReady(self._refusal(model, now), public="No worker that serves this model is ready.")
        if not tried:
            return candidates
        return preferred([worker for worker in known if worker.name not in tried], now)

    def prefills(self, decode: Worker, now: float) -> Sequence[Worker]:
        """Prefill workers whose blocks `decode` can take over."""
        return [worker for worker in usable(self.prefill, now) if worker.group == decode.group]

    def _surely_unknown(self, model: str | None, now: float) -> bool:
        """Whether no worker serves this, none that has yet to speak may, and none did lately."""
        if self.hold_models:
            return model is not None and model not in self.hold_models
        if not self.decode or not self.complete() or any(one.health.load is None for one in self.decode):
            return False
        return model is not None and now - self._gone_models.get(model, -MODEL_GONE_S) >= MODEL_GONE_S

    def _refusal(self, model: str | None, now: float) -> str:
        gone = self._gone_models.get(model or "")
        if gone is not None and model not in self.models():
            return f"No worker serves {model!r}: the last one that did went {now - gone:.0f} s ago."
        return self.refusal(now) or f"No worker that serves {model!r} is ready."


def usable(workers: Sequence[Worker], now: float) -> Sequence[Worker]:
    """
    Those that take requests; if more than half of those who could are put aside, these too.

    If that is nobody, those who take requests by what was seen of them, whoever has listed them as what: when
    Kubernetes has lost a node, or ends the last worker, they can still be asked.
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
    """For a request that has failed on others: those that are well, and only without one those put aside."""
    states = [(worker, worker.state(now)) for worker in workers]
    for wanted in (
        (WorkerStatus.READY,),
        (WorkerStatus.FULL,),
        (WorkerStatus.ON_TRIAL, WorkerStatus.EJECTED),
    ):
        workers_found = [worker for worker, state in states if state in wanted]
        if workers_found:
            return workers_found
    return []
