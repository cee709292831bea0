"""
A Picker whose scheduler is another process: asked over a Unix socket, and done without while it is away.

The scheduler has a few milliseconds to say that it heard; a request that it then lets wait, waits. If it
says nothing, or is not there, this front chooses by load alone (`roster`), which costs cache hits and
nothing else. A front comes back to its scheduler by itself, whichever of them was started anew.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from baton_api.reports import PromptReport
from baton_router import link
from baton_router.asks import Ask, Grant
from baton_router.link import (
    Began,
    Failed,
    Family,
    FromScheduler,
    Full,
    Granted,
    Held,
    LetGo,
    Measured,
    Pick,
    Wire,
)
from baton_router.roster import Entry, by_load
from baton_router.upstreams import Upstreams

log = logging.getLogger(__name__)

RECONNECT_S = 0.1
RECONNECT_LIMIT_S = 1.0

_decoder = msgspec.msgpack.Decoder(FromScheduler)


class RemotePicker:
    """Belongs to one event loop. `keep` holds the connection."""

    def __init__(
        self,
        path: str,
        upstreams: Upstreams,
        patience_s: float,
        rng: random.Random,
        unasked: Callable[[str], None],
    ) -> None:
        """`unasked` counts the requests that were chosen for by load: because it was "away" or "late"."""
        self._path = path
        self._upstreams = upstreams
        self._patience_s = patience_s
        self._rng = rng
        self._unasked = unasked
        self._numbers = itertools.count(1)
        self._wire: _SchedulerWire | None = None
        self._waiting: dict[int, _Waiting] = {}
        self._granted: set[int] = set()
        """Numbers of which the scheduler that we are connected with wants to hear."""
        self.busy: Counter[str] = Counter()
        """Requests with each worker, by name."""
        self._left: set[str] = set()
        """Names of workers that the scheduler does not tell of any more."""
        self.workers: tuple[Entry, ...] = ()
        """As the scheduler last told them."""
        self.met_scheduler = asyncio.Event()
        """Set once it has told them for the first time."""

    @property
    def connected(self) -> bool:
        return self._wire is not None

    async def keep(self) -> None:
        """Be connected with the scheduler, again and again, until cancelled."""
        loop = asyncio.get_running_loop()
        pause = RECONNECT_S
        while True:
            try:
                _, wire = await loop.create_unix_connection(lambda: _SchedulerWire(self), self._path)
            except OSError:
                await asyncio.sleep(pause)
                pause = min(RECONNECT_LIMIT_S, 2 * pause)
                continue
            pause = RECONNECT_S
            try:
                await wire.closed
            finally:
                wire.transport.abort()
            log.warning("The router's scheduler is away; requests go by load alone until it is back.")

    def measured(self, families: Sequence[Family]) -> None:
        """Tell the scheduler what this front has counted."""
        if self._wire is not None:
            self._wire.send(Measured(list(families)))

    # What `picker.Picker` wants.

    async def pick(self, ask: Ask) -> Grant:
        number = next(self._numbers)
        wire = self._wire
        if wire is None:
            return self._by_load(number, ask, "away")
        waiting = _Waiting(wire, self._patience_s, number)
        self._waiting[number] = waiting
        self._granted.add(number)
        wire.send(Pick(number, ask))
        try:
            grant = await waiting.outcome
        except asyncio.CancelledError:
            self._forget(number)
            if waiting.outcome.done() and not waiting.outcome.cancelled():
                waiting.outcome.exception()  # it came too late to be anybody's
            raise
        except BaseException:
            self._granted.discard(number)
            raise
        finally:
            waiting.timer.cancel()
            del self._waiting[number]
        if grant is None:
            self._forget(number)
            return self._by_load(number, ask, "late" if self._wire is wire else "away")
        return self._gave(grant)

    def began(self, grant: Grant, report: PromptReport | None) -> None:
        if grant.number in self._granted:
            self._tell(Began(grant.number, report))

    def failed(self, grant: Grant, *, crashed: bool = False) -> None:
        if grant.number in self._granted:
            self._tell(Failed(grant.number, crashed))

    def full(self, grant: Grant) -> None:
        if grant.number in self._granted:
            self._tell(Full(grant.number))

    def let_go(self, grant: Grant, *, complete: bool, tokens: int | None = None) -> None:
        self.busy[grant.decode] -= 1
        if grant.prefill:
            self.busy[grant.prefill] -= 1
        if grant.number in self._granted:
            self._granted.discard(grant.number)
            self._tell(LetGo(grant.number, complete, tokens))
        if self._left:
            self._forget_left()

    # What the connection calls.

    def met(self, wire: _SchedulerWire) -> None:
        self._wire = wire

    def left(self, wire: _SchedulerWire) -> None:
        """Whatever it had granted, another one will not know of it."""
        self._wire = None
        self._granted.clear()
        for waiting in self._waiting.values():
            waiting.give_up()

    def heard(self, message: FromScheduler) -> None:
        if isinstance(message, link.Roster):
            self._enrolled(message.workers)
            return
        number = message.grant.number if isinstance(message, Granted) else message.number
        waiting = self._waiting.get(number)
        if waiting is None or waiting.outcome.done():
            return  # it was let go, and the scheduler will hear so
        if isinstance(message, Held):
            waiting.timer.cancel()
        elif isinstance(message, Granted):
            waiting.outcome.set_result(message.grant)
        else:
            waiting.outcome.set_exception(link.raised(message))

    def _enrolled(self, workers: tuple[Entry, ...]) -> None:
        before = {one.name: one for one in self.workers}
        self.workers = workers
        self.met_scheduler.set()
        for one in workers:
            known = before.pop(one.name, None)
            self._upstreams.meet(one.name, one.secure)
            if one.down_since and not (known and known.down_since):
                self._upstreams.of(one.name).fail_silent(one.down_since)
            if one.expired and not (known and known.expired):
                self._upstreams.of(one.name).fail_all("drained")
        self._left.update(before)
        self._left.difference_update(one.name for one in workers)
        self._forget_left()

    def _forget_left(self) -> None:
        """Once nothing of theirs runs here: a scheduler that began anew may know of them in a moment."""
        for name in [name for name in self._left if not self.busy[name]]:
            self._left.discard(name)
            del self.busy[name]
            self._upstreams.drop(name)

    def _by_load(self, number: int, ask: Ask, reason: str) -> Grant:
        grant = by_load(self.workers, self.busy, ask, number, self._rng)
        self._unasked(reason)
        return self._gave(grant)

    def _gave(self, grant: Grant) -> Grant:
        self.busy[grant.decode] += 1
        if grant.prefill:
            self.busy[grant.prefill] += 1
        return grant

    def _forget(self, number: int) -> None:
        """The scheduler shall not keep what nobody waits for."""
        if number in self._granted:
            self._granted.discard(number)
            self._tell(LetGo(number, False))

    def _tell(self, message: link.FromFront) -> None:
        if self._wire is not None:
            self._wire.send(message)


class _Waiting:
    """One request that was asked for."""

    __slots__ = ("outcome", "timer")

    def __init__(self, wire: Wire, patience_s: float, number: int) -> None:
        loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[Grant | None] = loop.create_future()
        """The grant; None if it was not to be waited for any longer."""
        self.timer = loop.call_later(patience_s, self.give_up)

    def give_up(self) -> None:
        if not self.outcome.done():
            self.outcome.set_result(None)


class _SchedulerWire(Wire):
    """The front's end."""

    def __init__(self, picker: RemotePicker) -> None:
        super().__init__()
        self._picker = picker
        self.closed: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._picker.met(self)

    def took(self, frame: memoryview) -> None:
        self._picker.heard(_decoder.decode(frame))

    def ended(self) -> None:
        self._picker.left(self)
        if not self.closed.done():
            self.closed.set_result(None)
