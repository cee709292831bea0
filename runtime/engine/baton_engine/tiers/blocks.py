"""The bytes of the pool's blocks, for the threads of tiers."""

from __future__ import annotations

import numpy as np
import torch

from baton_engine.kv.cache import KVCache
from baton_engine.streams import Streams
from baton_engine.tiers.slab import Bytes, sum_of


class PoolBytes:
    """Reads and writes whole blocks. Any thread may use it; copies of large blocks release the GIL."""

    def __init__(self, cache: KVCache) -> None:
        self.block_bytes = cache.block_bytes
        self._streams: Streams = cache.streams
        self._rows = cache.kv.view(cache.blocks, -1).view(torch.uint8)
        self._on_host = cache.kv.device.type == "cpu"
        self._host: Bytes | None = self._rows.numpy() if self._on_host else None

    def read(self, block: int, out: Bytes) -> int:
        """Copy a block, which its device has written, to `out`. Returns its sum."""
        if self._host is not None:
            row = self._host[block]
            value = sum_of(row)
            np.copyto(out, row)
            return value
        self._streams.use()
        with self._streams.side_stream():
            np.copyto(out, self._rows[block].cpu().numpy())
        return sum_of(out)

    def write(self, block: int, data: Bytes, expected: int) -> bool:
        """Copy `data` to a block that nothing else uses. Returns whether its sum is right."""
        if self._host is not None:
            row = self._host[block]
            np.copyto(row, data)
            return sum_of(row) == expected
        if sum_of(data) != expected:
            return False
        self._streams.use()
        with self._streams.side_stream():
            self._rows[block].copy_(torch.from_numpy(data))
            self._streams.record().wait()
        return True
