"""
The workers of a router, and which of them can be chosen for a request.

If more than half of the workers would be ejected, the fault is elsewhere, and all stay candidates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from baton_api.errors import ModelNotFound, NotReady
from baton_api.workers import Role
from baton_router.workers.discovery.listed import ListedStatus
from baton_router.workers.worker import ACCEPTING, Worker, WorkerStatus

MODEL_GONE_S = 600.0
"""Seconds for which a model without workers gives 503 and not 404: another worker may come soon."""


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
