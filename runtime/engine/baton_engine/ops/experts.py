"""
Experts with torch operations: the router's choice for each token, and the chosen experts' results.

Tokens are grouped by expert, so that only weights of chosen experts are read. The results of a token are
added in the order of its own choice, whatever the batch is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton_engine.model.experts import ExpertSpec
from baton_engine.ops import Linear, Ops


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of one layer. E: experts, C: chosen ones, N: hidden."""

    spec: ExpertSpec
    router: Tensor
    """[E, N] fp32"""
    router_bias: Tensor | None
    """[E] fp32"""
    correction: Tensor | None
    """[E] fp32, if `spec.corrected`."""
    gate_up: Sequence[Linear]
    down: Sequence[Linear]
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [T, N] -> [T, N], in x's dtype."""
        logits = functional.linear(x.to(torch.float32), self.router, self.router_bias)
        chosen, shares = choose(self.spec, logits, self.correction)
        by_expert = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.spec.count).tolist()
        results = torch.empty((chosen.numel(), x.shape[-1]), dtype=x.dtype, device=x.device)
        for expert, positions in enumerate(torch.split(by_expert, counts)):
            if len(positions):
                rows = x[positions // self.spec.chosen]
                if self.spec.weighs_inputs:
                    rows = (rows * shares.flatten()[positions, None]).to(x.dtype)
                results[positions] = self.down[expert](self._gated(self.gate_up[expert](rows)))
        return _sum(results.view(*chosen.shape, -1), None if self.spec.weighs_inputs else shares).to(x.dtype)

    def _gated(self, gate_up: Tensor) -> Tensor:
        limit = self.spec.clamp
        if limit is None:
            return self.ops.gated(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(gate * self.spec.slope) * (up.clamp(-limit, limit) + 1)


def _sum(results: Tensor, shares: Tensor | None) -> Tensor:
    """Sum [T, C, N], weighted by shares [T, C], in the order of C. Returns [T, N] fp32."""
    parts = [part.to(torch.float32) for part in results.unbind(1)]
    if shares is not None:
        parts = [part * share[:, None] for part, share in zip(parts, shares.unbind(1), strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def choose(spec: ExpertSpec, logits: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the chosen experts [T, C] and their weights (fp32), from the router's logits [T, E] fp32."""
    scores = logits.sigmoid() if spec.scoring == "sigmoid" else logits.softmax(-1)
    ranked = scores if correction is None else scores + correction
    if spec.groups > 1:
        ranked = _in_best_groups(spec, ranked)
    chosen = ranked.topk(spec.chosen, dim=-1).indices
    shares = scores.gather(-1, chosen)
    if spec.normalized:
        shares = shares / shares.sum(-1, keepdim=True)
    return chosen, shares * spec.scale


def _in_best_groups(spec: ExpertSpec, ranked: Tensor) -> Tensor:
    """Return the scores [T, E] with -inf for experts outside the chosen groups."""
    grouped = ranked.view(len(ranked), spec.groups, -1)
    best = grouped.topk(spec.group_best, dim=-1).values.sum(-1).topk(spec.chosen_groups, dim=-1).indices
    outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(outside[..., None], -torch.inf).view_as(ranked)
