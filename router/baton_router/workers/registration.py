"""
Registration: adds and removes workers as their sources list them.

The last list of every source counts. A worker that is on no list gets no new requests. When its last request
is done or its drain time is over, its state is removed: its slot in the index, bookings and connections. A
worker that is listed again before that continues unchanged.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable

from baton_http.upstream import UpstreamPool
from baton_router.workers.discovery.listed import ListedStatus, ListedWorker, list_changes, merge_lists
from baton_router.workers.worker import Worker
from baton_router.workers.worker_list import Workers
from baton_router.workers.worker_state import WorkerStates

log = logging.getLogger(__name__)

RELEASE_S = 5.0
"""Seconds after the drain time in which requests release the worker."""


class WorkerRegistration:
    """Belongs to one thread, and never waits."""

    def __init__(
        self,
        workers: Workers,
        worker_states: WorkerStates,
        upstreams: UpstreamPool,
        drain_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`drain_s`: seconds that a leaving worker has to finish its requests."""
        self._workers = workers
        self._worker_states = worker_states
        self._upstreams = upstreams
        self._drain_s = drain_s
        self._clock = clock
        self._lists: dict[str, frozenset[ListedWorker]] = {}
        """By source."""
        self._present: dict[str, ListedWorker] = {}
        self._by_name: dict[str, Worker] = {}
        """Present and leaving workers; an address belongs to one worker only."""
        self._deadlines: dict[Worker, float] = {}
        """End of the drain time of leaving workers."""

    def on_workers(self, source: str, listed: Iterable[ListedWorker]) -> None:
        """Apply the current list of a source."""
        self._lists[source] = frozenset(listed)
        desired = merge_lists(itertools.chain.from_iterable(self._lists.values()))
        change = list_changes(self._present, desired)
        self._present = desired
        for name in change.removed:
            self._remove(self._by_name[name])
        for worker in change.added:
            self._add(worker)
        for worker in change.status_changed:
            self._set_status(self._by_name[worker.name], worker.discovery_status)

    def release_expired(self) -> None:
        """Remove leaving workers that are done or whose drain time is over."""
        now = self._clock()
        for worker, end in self._deadlines.items():
            if now >= end and not worker.expired:
                worker.expired = True
                worker.upstream.fail_all("drained")  # other workers continue its streams
        for worker in self._workers.leaving:
            if not worker.in_flight or now >= self._deadlines[worker] + RELEASE_S:
                self._forget(worker)

    def _add(self, one: ListedWorker) -> None:
        worker = self._by_name.get(one.name)
        same = (one.role, one.revision, one.secure, one.engine)
        if worker is not None and same == (
            worker.listed,
            worker.revision,
            worker.upstream.secure,
            worker.engine,
        ):
            self._workers.restore(worker)
            self._set_status(worker, one.discovery_status)
            return
        if worker is not None:  # another pod has its address now, and cannot finish its requests
            self._forget(worker)
        self._upstreams.set_tls(one.name, one.secure)
        worker = Worker(self._upstreams.get(one.name), one.role, one.revision, engine=one.engine)
        self._by_name[one.name] = worker
        self._set_status(worker, one.discovery_status)
        self._workers.add(worker)
        revision = f" of revision {worker.revision}" if worker.revision else ""
        log.info("The %s worker %s%s is listed.", worker.listed, worker.name, revision)

    def _set_status(self, worker: Worker, discovery_status: ListedStatus) -> None:
        if worker.discovery_status is not discovery_status:
            log.info("The worker %s is listed as %s.", worker.title, discovery_status.name.lower())
            worker.discovery_status = discovery_status
        if discovery_status is ListedStatus.TERMINATING:
            self._deadlines.setdefault(worker, self._clock() + self._drain_s)
        else:
            self._deadlines.pop(worker, None)
            worker.expired = False

    def _remove(self, worker: Worker) -> None:
        now = self._clock()
        self._deadlines.setdefault(worker, now + self._drain_s)
        self._workers.start_draining(worker, now)
        log.info("The worker %s is not listed any more; it has %d requests.", worker.title, worker.in_flight)

    def _forget(self, worker: Worker) -> None:
        del self._by_name[worker.name], self._deadlines[worker]
        self._workers.remove(worker)
        self._worker_states.forget(worker)
        self._upstreams.drop(worker.name)
