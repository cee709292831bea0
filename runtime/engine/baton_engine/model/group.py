"""
Collective operations of a worker's ranks, over gloo on CPUs and NCCL on GPUs.

On CPUs, a sum gathers the parts of all ranks and adds them in the order of the ranks, in fp32. An all-reduce
adds in an order that depends on the position in the buffer, so a token's result could depend on its batch. On
GPUs it depends on the batch anyway, by the libraries' matrix products. So NCCL adds there, in the dtype and
the memory of the parts: one launch.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import FileStore

from baton_api.errors import BatonError
from baton_engine.model.shards import Shard
from baton_engine.ops import Table

LOOPBACK = "127.0.0.1"
"""All ranks of a worker are on one machine."""


class Group:
    """The ranks of one worker, as rank `shard.rank` sees them. All call the same operations in order."""

    def __init__(self, shard: Shard, vocab: int, device: torch.device) -> None:
        """`vocab`: number of tokens, whose embeddings are divided among the ranks."""
        self.shard = shard
        self._device = device
        self._vocab = vocab
        self.in_order = device.type == "cpu"
        """Whether sums have the order of the ranks."""
        self.backend: Any = None
        """A `ProcessGroupGloo` or `ProcessGroupNCCL`, whose stubs lack methods. None: not connected."""

    def connect(self, path: Path, timeout_s: float) -> None:
        """
        Connect to the other ranks, which use the same file.

        An operation raises RuntimeError if a rank ends, or does not take part within `timeout_s`. One that a
        graph repeats waits forever.
        """
        rank, size, timeout = self.shard.rank, self.shard.size, timedelta(seconds=timeout_s)
        store = FileStore(str(path), size)
        store.set_timeout(timeout)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            self.backend = dist.ProcessGroupNCCL(store, rank, size, nccl)
            # NCCL connects at the first operation of a kind, with memory that is not of a captured pass.
            self.meet()
            self.broadcast(torch.zeros(1, device=self._device))
            self.joined(torch.zeros((1, len(self.shard.part(self._vocab))), device=self._device))
            return
        kind: Any = dist.ProcessGroupGloo
        gloo = kind._Options()
        gloo._timeout = timeout
        gloo._devices = [kind.create_device(hostname=LOOPBACK)]
        self.backend = kind(store, rank, size, gloo)

    def sum(self, part: Tensor) -> Tensor:
        """
        Return the sum of all ranks' parts in their dtype. May overwrite `part`.

        The bits are the same in each rank, because an all-reduce copies each result to all of them. So the
        routers of all ranks choose the same experts.
        """
        if not self.in_order:
            part = part.contiguous()
            self._connected.allreduce([part]).wait()
            return part
        gathered = part.new_empty((self.shard.size * len(part), *part.shape[1:]))
        self._connected._allgather_base(gathered, part.contiguous()).wait()
        parts = gathered.chunk(self.shard.size)
        total = parts[0].to(torch.float32)
        for other in parts[1:]:
            total = total + other
        return total.to(part.dtype)

    def mean(self, part: Tensor) -> Tensor:
        """Return the mean of all ranks' parts, as `sum`."""
        return self.sum(part).div_(self.shard.size)

    def embedded(self, embedding: Table, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the embeddings [T, N] of tokens [T] in `dtype`. `embedding` has this rank's rows."""
        rows = self.shard.part(self._vocab)
        inside = (tokens >= rows.start) & (tokens < rows.stop)
        selected = embedding[(tokens - rows.start).clamp(0, len(rows) - 1)].to(dtype)
        return self.sum(selected.masked_fill(~inside[:, None], 0))

    def joined(self, logits: Tensor, vocab: int | None = None) -> Tensor:
        """
        Return the logits [S, V] of all tokens in rank 0, from [S, tokens of this rank] in each.

        `vocab`: V of a head that has other tokens than the model.
        """
        rank, size = self.shard.rank, self.shard.size
        ranges = [Shard(other, size).part(vocab or self._vocab) for other in range(size)]
        padded = logits.new_empty((len(logits), max(map(len, ranges))))
        padded[:, : logits.shape[1]] = logits
        gathered = [torch.empty_like(padded) for _ in ranges] if rank == 0 else []
        self._connected.gather([gathered] if rank == 0 else [], [padded]).wait()
        if rank != 0:
            return logits
        return torch.cat([part[:, : len(tokens)] for part, tokens in zip(gathered, ranges, strict=True)], 1)

    def broadcast(self, values: Tensor) -> Tensor:
        """Return rank 0's values, of the same shape in each rank. Overwrites those of the others."""
        self._connected.broadcast([values]).wait()
        return values

    def meet(self) -> None:
        """Wait until all ranks have called it."""
        self.sum(torch.zeros(1, device=self._device))

    def abort(self) -> None:
        """
        End NCCL's operations on the device, those of graphs included, with undefined results. No later
        operation works. Returns when no graph of them is left. gloo does nothing: its operations end with a
        timeout or with a rank's process.
        """
        if self.backend is not None:
            self.backend.abort()

    @property
    def _connected(self) -> Any:
        if self.backend is None:
            raise RuntimeError("this rank is not connected to the others")
        return self.backend


class RankFailed(BatonError):
    """A rank ended or hangs. Only a new worker can compute again."""
