"""A tier on a disk, behind the one in memory. The worker's next start finds its blocks again."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from baton_api.errors import SetupError
from baton_api.kv_events import STORAGE
from baton_api.setting_types import show_size
from baton_engine.machine import trusted
from baton_engine.tiers.index import Place
from baton_engine.tiers.slab import HEADERS, Bytes, Header, Slab, slots_of
from baton_engine.tiers.store import Copy, Read

log = logging.getLogger(__name__)


class DiskStore:
    """A `Store` in a folder. One that cannot be used has no slots, and says why in the log."""

    name = "disk"
    medium = STORAGE
    first_bytes_per_s = 250e6

    def __init__(self, folder: Path, size: int, block_bytes: int, namespace: bytes) -> None:
        """
        Open the folder, and find the blocks of this namespace. Raises SlabLocked.

        Raises SetupError if not one block fits into `size`.
        """
        if not slots_of(size, block_bytes):
            raise SetupError(
                f"--kv-disk-tier-size {show_size(size)} is less than one KV block of "
                f"{show_size(block_bytes)} and its header."
            )
        self._namespace = namespace
        self._slab: Slab | None = None
        self._order = 0
        self.slots = 0
        self.found: list[tuple[bytes, Place]] = []
        self.free: list[int] = []
        try:
            if not trusted(folder / HEADERS):
                raise PermissionError(f"another user can modify {folder / HEADERS}, and so the answers")
            self._slab = Slab.open(folder, size, block_bytes)
            self.slots = self._slab.slots
            if self.slots < slots_of(size, block_bytes):
                log.warning(
                    "%s has room for %d KV blocks only, instead of %s.", folder, self.slots, show_size(size)
                )
            self._find(self._slab)
        except OSError as error:
            self.close()
            self.slots = 0
            log.error("The disk tier is not used: cannot open %s: %s.", folder, error)
        self._row: Bytes = np.empty(block_bytes, dtype=np.uint8)
        self._written: Bytes = np.empty(block_bytes, dtype=np.uint8)

    def _find(self, slab: Slab) -> None:
        headers = slab.headers()
        self._order = max((header.order for header in headers.values()), default=0)
        latest: dict[bytes, Place] = {}  # a block that was dropped and copied again may be in two slots
        others: list[int] = []  # with the blocks of other models, which may come back, and with those copies
        for slot, header in sorted(headers.items(), key=lambda each: each[1].order, reverse=True):
            if header.namespace != self._namespace or header.name in latest:
                others.append(slot)
            else:
                latest[header.name] = Place(slot, header.sum, header.parent)
        self.found = list(latest.items())[::-1]
        self.free = [slot for slot in range(slab.slots) if slot not in headers] + others[::-1]

    def write(self, copies: Sequence[Copy], read: Read) -> list[int | None]:
        if self._slab is None:
            raise OSError("the folder could not be opened")
        sums: list[int | None] = []

        def verified() -> Iterator[tuple[int, Header, Bytes]]:
            for copy in copies:
                good = read(copy.block, self._written) == copy.sum  # else it is another block by now
                sums.append(copy.sum if good else None)
                if good:
                    assert copy.sum is not None
                    self._order += 1
                    header = Header(self._namespace, copy.name, copy.parent, copy.sum, self._order)
                    yield copy.slot, header, self._written

        self._slab.write(verified())
        return sums

    def expect(self, slots: Sequence[int]) -> None:
        if self._slab is not None:
            self._slab.expect(slots)

    def read(self, slot: int) -> Bytes:
        if self._slab is None:
            raise OSError("the folder could not be opened")
        self._slab.read(slot, self._row)
        return self._row

    def prepare(self) -> bool:
        return False

    def clear(self) -> None:
        if self._slab is not None:
            self._slab.clear()

    def close(self) -> None:
        if self._slab is not None:
            self._slab.close()
        self._slab = None
