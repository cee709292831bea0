"""
A model that believes only what it reads back from the KV cache.

The pass writes each token's id and position to its slot. Logits come from what the row's blocks hold, read
through the block table: the prefix before any write of this pass, the rest after. A wrong block, or one that
is published too early or reused too soon, gives other positions (an error) or other tokens.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from baton_engine.batch import Batch, PassInterrupted
from baton_engine.kv.cache import KVCache
from baton_engine.model.lora import LoraWeights
from baton_engine.spec import ModelSpec

SPEC = ModelSpec(
    architecture="FakeForCausalLM",
    vocab=97,
    hidden=2,
    layers=1,
    heads=1,
    kv_heads=1,
    head_dim=2,
    intermediate=2,
    context=4096,
    norm_epsilon=1e-5,
    rope_theta=10_000.0,
)


def make_cache(blocks: int, block_size: int = 4) -> KVCache:
    """A cache with room for `blocks` - 1 blocks of `block_size` tokens."""
    return KVCache(SPEC, blocks, torch.float32, torch.device("cpu"), block_size)


class FakeModel:
    """Logits are a fixed function of the tokens and positions that the cache holds for a row."""

    def __init__(self, spec: ModelSpec = SPEC, seed: int = 7) -> None:
        self.spec = spec
        generator = torch.Generator().manual_seed(seed)
        self._table = torch.randn((1009, spec.vocab), generator=generator) * 2
        self._weights = torch.randint(1, 1 << 30, (spec.context,), generator=generator)
        self.passes = 0
        self.sizes: list[int] = []
        """Tokens of each pass."""
        self.fail_on: int | None = None
        """A token id at which a pass raises, as a broken kernel would."""
        self.failure: Exception = RuntimeError("a kernel failed")
        """The error that such a pass raises."""
        self.nan_on: int | None = None
        """A last token whose row's logits are NaN."""
        self.go = threading.Event()
        """Cleared, the next pass stops in its middle until it is set."""
        self.go.set()
        self.stops_at = 0
        """Number of the pass that clears `go` as it begins, until `resume`; 0: none does."""
        self._gate = threading.Lock()
        self.inside = threading.Event()
        """Set while a pass is under way."""
        self.interruptions = 0
        self._interrupted = threading.Event()

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        self._interrupted.clear()
        self.inside.set()
        self.passes += 1
        with self._gate:
            if self.passes == self.stops_at:
                self.go.clear()
        self.sizes.append(batch.size)
        memory = cache.kv.view(cache.blocks, 2, cache.block_size, 2)
        before = [self._read(memory, batch, row, batch.rows[row].start) for row in range(len(batch.rows))]
        while not self.go.wait(0.001):
            if self._interrupted.is_set():
                self.end_early(batch, cache)
        if self.fail_on is not None and bool((batch.tokens == self.fail_on).any()):
            raise self.failure
        slots = batch.slots
        assert len(set(slots.tolist())) == len(slots), "two tokens share a slot"
        assert int(slots.min()) >= cache.block_size, "block 0 is written"
        # Touch only its own slots: a transfer may be writing other blocks at this moment.
        block, offset = slots // cache.block_size, slots % cache.block_size
        memory[block, 0, offset] = torch.stack((batch.tokens, batch.positions), dim=1).float()
        logits = []
        for row, prefix in enumerate(before):
            wanted = batch.rows[row].wanted
            if not wanted:
                continue
            tokens = self._read(memory, batch, row, batch.contexts[row])
            assert torch.equal(tokens[: len(prefix)], prefix), "a prefix was written during the pass"
            before_all = [] if batch.rows[row].adapter is None else [batch.rows[row].adapter]
            logits += [
                self.logits(before_all + tokens[: len(tokens) - back].tolist())
                for back in reversed(range(wanted))
            ]
        self.inside.clear()
        return torch.stack(logits) if logits else torch.empty((0, self.spec.vocab))

    def resume(self) -> None:
        """Let all passes end, also one that `stops_at` names and that has not begun."""
        with self._gate:
            self.stops_at = 0
            self.go.set()

    def interrupt(self) -> None:
        self._interrupted.set()

    def end_early(self, batch: Batch, cache: KVCache) -> None:
        """Write wrong values into the slots of the pass, and end it."""
        memory = cache.kv.view(cache.blocks, 2, cache.block_size, 2)
        memory[batch.slots // cache.block_size, 0, batch.slots % cache.block_size] = -1.0
        self.interruptions += 1
        self.inside.clear()
        raise PassInterrupted

    def hidden_states(self, batch: Batch, cache: KVCache) -> Tensor:
        """This model has no head: its states are its logits."""
        return self.forward(batch, cache)

    def project(self, states: Tensor) -> Tensor:
        return states.clone()

    def prepare_adapter(self, weights: LoraWeights) -> int:
        """An adapter is a token before all others."""
        return int(weights.digest[:4], 16) % self.spec.vocab

    def logits(self, tokens: list[int]) -> Tensor:
        """[V] for the token after these."""
        ids = torch.tensor(tokens)
        state = int(((ids + 1) * self._weights[: len(ids)]).sum()) % len(self._table)
        row = self._table[state].clone()
        if self.nan_on is not None and tokens[-1] == self.nan_on:
            row.fill_(float("nan"))
        return row

    def greedy(self, prompt: list[int] | tuple[int, ...], count: int) -> list[int]:
        """Return the tokens that a request with temperature 0 must get."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens).argmax()))
        return tokens[len(prompt) :]

    def _read(self, memory: Tensor, batch: Batch, row: int, count: int) -> Tensor:
        entries = memory[batch.block_table[row].long(), 0].reshape(-1, 2)[:count]
        assert torch.equal(entries[:, 1].long(), torch.arange(count)), (
            f"row {row} reads positions {entries[:, 1].long().tolist()}"
        )
        return entries[:, 0].long()
