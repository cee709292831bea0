"""
A draft head: one layer that predicts the token after the next one, from the model's states.

For the token at position p, the head joins its embedding with the state of position p - 1. It attends to the
joined tokens before it, and predicts the token at p + 1. Position 0 has no state before it, so no position
attends to it. Further tokens are predicted from the head's own states.

- An MTP layer is part of the checkpoint. A state is the model's output after the final norm; embedding and
  output head are the model's. https://arxiv.org/abs/2412.19437, section 2.2
- An EAGLE-3 head is a checkpoint of its own. A state is a projection of the inputs of some layers of the
  model, mostly three. The head may have fewer tokens than the model. https://arxiv.org/abs/2503.01840

`store` computes the head's keys and values of all tokens of a pass, beside the model. So the head has those
of each block that the model has, wherever it was computed. Keys and values of position p depend on the tokens
up to p alone, as those of the model do. `forward` computes drafts.

Several ranks divide the head's layer as those of the model. Each of them has whole states in a pass, and a
part of the states in blocks. Rank 0 has the logits, and chooses the tokens of drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from baton_engine.batch import Batch
from baton_engine.kv.cache import HeadCache, KVCache
from baton_engine.model.group import Group
from baton_engine.model.layer import Layer, laid_out, mlp
from baton_engine.model.rope import Rotary
from baton_engine.model.weights import HeadWeights
from baton_engine.ops import Ops
from baton_engine.spec import HeadSpec
from baton_engine.streams import copied


class DraftHead:
    """Computes drafts for a decoder. N: its hidden size, V: the model's vocabulary."""

    def __init__(
        self,
        spec: HeadSpec,
        weights: HeadWeights,
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
        vocab: int,
        embed: Callable[[Tensor], Tensor],
        project: Callable[[Tensor], Tensor],
        group: Group | None = None,
    ) -> None:
        """
        `ops` are those of `spec.layer`. `embed` and `project` are the model's: embeddings [T, N] of tokens,
        and logits [T, V] fp32 of normalized states. `vocab` is V. With `group`, `spec` and `weights` are this
        rank's parts.
        """
        self.spec = spec
        self._group = group
        self._ops = ops
        self._dtype = dtype
        self._vocab = vocab
        self._layer: Layer = laid_out(weights.layer, spec.layer, 0, ops, device)
        self._rotary = Rotary(spec.layer, device)
        self._joint = ops.prepare(weights.joint.to(device))
        self._input_norms = [norm.to(device) for norm in weights.input_norms]
        self._embedding_norm = weights.embedding_norm.to(device)
        self._state_norm = weights.state_norm.to(device)
        self._norm = weights.norm.to(device)
        self._embed, self._project = embed, project
        if weights.embedding is not None:
            table = ops.prepare_table(weights.embedding.to(device), None)
            self._embed = lambda tokens: (
                table[tokens].to(dtype) if group is None else group.embedded(table, tokens, dtype)
            )
        if weights.head is not None:
            head, own = ops.prepare(weights.head.to(device)), spec.layer.vocab
            self._project = lambda states: (
                head(states).float() if group is None else group.joined(head(states).float(), own)
            )
        gathers = group is None or group.shard.rank == 0
        self._tokens = weights.tokens.to(device) if weights.tokens is not None and gathers else None
        replicas = 1 if group is None else group.shard.size // spec.state_parts
        rank = 0 if group is None else group.shard.rank
        first = rank // replicas * spec.stored_state
        self._stored = slice(first, first + spec.stored_state)
        """The values of states that this rank has in blocks."""
        self._adds = rank % replicas == 0
        """Whether it is the first rank with these values."""
        empty = torch.empty((0, spec.layer.hidden), dtype=dtype, device=device)
        self._states, self._results = empty, empty

    @property
    def capturable(self) -> bool:
        """Whether passes of a `StaticBatch` can be captured."""
        return self._ops.capturable

    @torch.inference_mode()
    def reserve(self, rows: int) -> None:
        """Allocate what a worker that drafts needs for passes with up to `rows` results."""
        empty = self._states
        self._states, self._results = (empty.new_zeros((rows, empty.shape[1])) for _ in range(2))

    def state_of(self, final: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Return the states [T, N] of a pass: from those after the final norm, or from inputs of layers."""
        if not inputs:
            return final
        norm, epsilon = self._ops.rms_norm, self.spec.layer.norm_epsilon
        parts = list(inputs)
        if self.spec.input_norm == "each":
            parts = [norm(part, own, epsilon) for part, own in zip(parts, self._input_norms, strict=True)]
        joined = torch.cat(parts, dim=-1)
        if self.spec.input_norm == "joined":
            joined = norm(joined, self._input_norms[0], epsilon)
        return self._joint(joined)

    def store(self, states: Tensor, batch: Batch, cache: KVCache) -> None:
        """Write the head's keys and values of all tokens of a pass, and its last states [T, N]."""
        part = _part(cache)
        x, _ = self._joined(batch.tokens, self._before(states.roll(1, 0), batch, part))
        self._ops.begin(batch)
        self._query(x, batch, part)
        part.states[batch.state_blocks[1]] = states[:, self._stored].to(part.states.dtype)
        wanted = batch.wanted_at
        if 0 < len(wanted) <= len(self._results):
            self._results[: len(wanted)] = states[wanted]

    @torch.inference_mode()
    def keep(self, rows: Sequence[int], blocks: Sequence[int], cache: KVCache) -> None:
        """Make results `rows` of the last pass the states of `blocks`: later tokens were rejected."""
        states = _part(cache).states
        places = copied(np.array([rows, blocks]), states.device)
        states[places[1]] = self._results[places[0], self._stored].to(states.dtype)
        if self._group is not None:
            self._group.meet()  # rank 0 may announce the blocks

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last `forward` for the next one."""
        kept = copied(np.array(rows), self._states.device)
        self._states[: len(rows)] = self._states[kept]

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """
        Return the logits [T, V] fp32 of the token after each row of one token, in rank 0.

        The state of a row is that of the block in `batch.state_blocks`, or the result of the same row in the
        last call where that is -1.
        """
        ops, layer, part = self._ops, self._layer, _part(cache)
        epsilon = self.spec.layer.norm_epsilon
        x, residual = self._joined(batch.tokens, self._before(self._states[: batch.size], batch, part))
        ops.begin(batch)
        x = ops.attention(self._query(x, batch, part), part, 0, batch, layer.window, layer.sinks)
        if layer.latent is not None:
            x = layer.latent.expand(x)
        assert layer.mlp_norm is not None
        x, residual = ops.add_rms_norm(self._summed(layer.output(x)), residual, layer.mlp_norm, epsilon)
        residual = residual + self._summed(mlp(layer, x, ops))
        normed = ops.rms_norm(residual, self._norm, epsilon)
        self._states[: batch.size] = normed if self.spec.normed_states else residual
        logits = self._project(normed)
        if self._tokens is None:
            return logits
        return logits.new_full((len(logits), self._vocab), -torch.inf).index_copy_(1, self._tokens, logits)

    def _summed(self, x: Tensor) -> Tensor:
        """Add the outputs of attention or MLP of all ranks."""
        return x if self._group is None else self._group.sum(x)

    def _before(self, states: Tensor, batch: Batch, part: HeadCache) -> Tensor:
        """Return the states [T, N] of the tokens before those of `batch`: `states`, or those of blocks."""
        read = batch.state_blocks[0]
        if len(batch.rows) == batch.size:
            before = torch.where((read >= 0)[:, None], self._of_blocks(read, part), states)
        else:  # only the first token of a row reads a block
            firsts = batch.first_tokens
            before = states.index_copy(0, firsts, self._of_blocks(read[firsts], part))
        return torch.where((batch.positions > 0)[:, None], before, 0)

    def _of_blocks(self, blocks: Tensor, part: HeadCache) -> Tensor:
        """Return the states [B, N] of `blocks`. Ranks add their parts, with zeros in the place of others."""
        stored = part.states[blocks.clamp(min=0)].to(self._dtype)
        if self.spec.state_parts == 1 or self._group is None:
            return stored
        whole = stored.new_zeros((len(stored), self.spec.layer.hidden))
        if self._adds:
            whole[:, self._stored] = stored
        return self._group.sum(whole)

    def _joined(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the layer's attention, and its residual."""
        norm, layer = self._ops.rms_norm, self.spec.layer
        embedded = norm(self._embed(tokens), self._embedding_norm, layer.norm_epsilon)
        normed = norm(states, self._state_norm, layer.norm_epsilon)
        joined = torch.cat((embedded, normed), dim=-1)
        if self.spec.kind == "eagle3":
            return joined, normed if self.spec.normed_residual else states
        x = self._joint(joined)
        assert self._layer.attention_norm is not None
        return norm(x, self._layer.attention_norm, layer.norm_epsilon), x

    def _query(self, x: Tensor, batch: Batch, part: HeadCache) -> Tensor:
        """Write keys and values of all tokens. Returns their queries [T, H, D]."""
        layer, rotation = self._layer, self._rotary.at(batch.positions)
        qkv = layer.qkv(x)
        if layer.latent is not None:
            return layer.latent.store(qkv, rotation, part, 0, batch)
        return self._ops.rope_and_store(qkv, rotation, layer.q_norm, layer.k_norm, part, 0, batch)


def _part(cache: KVCache) -> HeadCache:
    assert cache.head is not None, "the cache was made for a model without a head"
    return cache.head
