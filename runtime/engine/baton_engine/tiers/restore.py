"""
Reads of blocks from a tier into the pool, on a thread of its own.

A restore reports to the engine exactly once, at the latest at its deadline. After its report it writes no
block of the pool, even if the tier's read is still stuck: so its blocks need no quarantine.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from dataclasses import dataclass

from baton_api.prompt_report import Fallback
from baton_engine.requests import Fetch, FetchResult
from baton_engine.streams import Event
from baton_engine.tiers.slab import Bytes
from baton_engine.tiers.store import PoolBytes, TierThread

log = logging.getLogger(__name__)

Blocks = Callable[[], Generator[tuple[Bytes, int]]]
"""Reads blocks one by one, each with its sum. Raises OSError. Bytes are valid until the next block."""


@dataclass(frozen=True, slots=True)
class Restored:
    """How a restore ended."""

    result: FetchResult
    wait_s: float
    """Until the first block was read, without the restores before it."""
    read_s: float
    queued: bool = False
    """Whether it ended behind another restore, before its read began."""
    corrupt: int | None = None
    """Position of a block whose sum was wrong."""


class Restores:
    """The restores of one tier, one after the other."""

    def __init__(self, name: str, pool: PoolBytes, clock: Callable[[], float] = time.monotonic) -> None:
        """`name` is that of the tier."""
        self._name = name
        self._pool = pool
        self._clock = clock
        self._thread = TierThread(f"restore-{name}")
        self._running: dict[str, _Restore] = {}
        """By request id, until their report. Belongs to the engine's thread, but for deletions."""

    def start(
        self,
        fetch: Fetch,
        blocks: Blocks,
        unused: Event,
        report: Callable[[Restored], None],
        short: Fallback = Fallback.REJECTED,
    ) -> None:
        """
        Restore `blocks` to the first blocks of `fetch`. `report` is called once, on any thread.

        `short` is the reason if there are less than `fetch` has.
        """
        behind = bool(self._running)
        restore = _Restore(fetch, blocks, unused, self._clock, report, self._running, behind, short)
        self._running[fetch.request_id] = restore
        restore.timer.start()
        self._thread.submit(lambda: restore.run(self._name, self._pool))

    def cancel(self, request_id: str) -> None:
        restore = self._running.get(request_id)
        if restore is not None:
            restore.end(Fallback.CANCELLED)

    def close(self, within_s: float) -> bool:
        """End all restores. Returns whether the thread has ended too: a read may be stuck."""
        for restore in list(self._running.values()):
            restore.end(Fallback.CANCELLED)
        return self._thread.close(within_s)


class _Restore:
    def __init__(
        self,
        fetch: Fetch,
        blocks: Blocks,
        unused: Event,
        clock: Callable[[], float],
        report: Callable[[Restored], None],
        running: dict[str, _Restore],
        behind: bool,
        short: Fallback,
    ) -> None:
        """`behind`: another restore is under way."""
        self._fetch = fetch
        self._blocks = blocks
        self._short = short
        self._unused = unused
        self._clock = clock
        self._report = report
        self._running = running
        self._behind = behind
        self._lock = threading.Lock()
        """Held while a block of the pool is written, and by the end."""
        self._over = False
        self._arrived = 0
        self._began = clock()
        self._reading: float | None = None
        """When the read began."""
        self.timer = threading.Timer(fetch.within_s, self.end, (Fallback.DEADLINE,))
        self.timer.daemon = True

    def run(self, name: str, pool: PoolBytes) -> None:
        """On the tier's thread."""
        try:
            if self._behind:
                self._began = self._clock()
            self._unused.wait()
            self._reading = self._clock()
            with contextlib.closing(self._blocks()) as blocks:
                for data, expected in blocks:
                    with self._lock:
                        if self._over:
                            return
                        good = pool.write(self._fetch.blocks[self._arrived], data, expected)
                        self._arrived += good
                    if not good:
                        self.end(Fallback.CHECKSUM)
                        return
            self.end(None if self._arrived == len(self._fetch.blocks) else self._short)
        except TimeoutError:
            self.end(Fallback.DEADLINE)
        except OSError as error:
            log.warning("Cannot restore KV blocks from the tier %s: %s", name, error)
            self.end(Fallback.TRANSFER_FAILED)
        except CancelledError:
            self.end(Fallback.CANCELLED)
        except Exception:  # without a report the request would hang
            log.exception("Cannot restore KV blocks from the tier %s.", name)
            self.end(Fallback.TRANSFER_FAILED)

    def end(self, reason: Fallback | None) -> None:
        """Report what has arrived, unless that was done. Any thread."""
        with self._lock:
            if self._over:
                return
            self._over = True
            arrived = self._arrived
        self.timer.cancel()
        self._running.pop(self._fetch.request_id, None)
        now, reading = self._clock(), self._reading
        queued = self._behind and reading is None
        reading = now if reading is None else reading
        result = FetchResult(
            self._fetch.request_id, arrived=arrived, reason="" if reason is None else reason.value
        )
        corrupt = arrived if reason is Fallback.CHECKSUM else None
        self._report(Restored(result, reading - self._began, now - reading, queued, corrupt))
