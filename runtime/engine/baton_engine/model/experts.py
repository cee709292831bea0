"""
Experts: the router's choice for each token, and the sum of the chosen experts' results.

A pair is a token and one of the experts that it chose. Pairs are grouped by expert, so that only weights of
chosen experts are read. The results of a token are added in the order of its own choice, in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton_engine.ops import ExpertLinear, Ops
from baton_engine.spec import ExpertSpec


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
    gate_up: ExpertLinear
    down: ExpertLinear
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [T, N] -> [T, N], in x's dtype."""
        logits = functional.linear(x.to(torch.float32), self.router, self.router_bias)
        chosen, shares = choose(self.spec, logits, self.correction)
        groups = self.ops.group_by_expert(chosen, self.spec.count)
        if self.spec.weighs_inputs:
            x = (x[:, None] * shares[..., None]).to(x.dtype).flatten(0, 1)
        results = self.down(self._gated(self.gate_up(x, groups)), groups).view(*chosen.shape, -1)
        return self.ops.sum_experts(results, None if self.spec.weighs_inputs else shares)

    def _gated(self, gate_up: Tensor) -> Tensor:
        limit = self.spec.clamp
        if limit is None:
            return self.ops.gated(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(gate * self.spec.slope) * (up.clamp(-limit, limit) + 1)


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
