"""Decoders of any sizes with random weights, without a folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from baton_engine.model.weights import LayerWeights, Weights
from baton_engine.spec import ModelSpec

TINY: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "vocab": 97,
    "hidden": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "intermediate": 96,
    "context": 4096,
    "norm_epsilon": 1e-5,
    "rope_theta": 10_000.0,
    "tied_embeddings": True,
}


def tiny_spec(**changes: Any) -> ModelSpec:
    return ModelSpec(**{**TINY, **changes})


def random_weights(spec: ModelSpec, dtype: torch.dtype, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def matrix(outputs: int, inputs: int) -> Tensor:
        values: Tensor = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
        return values.to(dtype)

    def vector(size: int, around: float = 1.0) -> Tensor:
        return (around + 0.1 * torch.randn(size, generator=generator)).to(dtype)

    def stacked(count: int, outputs: int, inputs: int) -> Tensor:
        return torch.stack([matrix(outputs, inputs) for _ in range(count)])

    def attention() -> dict[str, Tensor | None]:
        latent, heads = spec.latent, spec.heads
        if latent is None:
            joint = spec.qk_norm_joint
            return {
                "qkv": matrix((heads + 2 * spec.kv_heads) * spec.head_dim, spec.hidden),
                "q_norm": vector(spec.head_dim * (heads if joint else 1)) if spec.qk_norm else None,
                "k_norm": vector(spec.head_dim * (spec.kv_heads if joint else 1)) if spec.qk_norm else None,
                "output": matrix(spec.hidden, heads * spec.head_dim),
            }
        queries = heads * (latent.plain + spec.rotated)
        return {
            "qkv": matrix((latent.q_rank or queries) + spec.head_dim, spec.hidden),
            "q_norm": vector(latent.q_rank) if latent.q_rank else None,
            "k_norm": vector(latent.kv_rank),
            "output": matrix(spec.hidden, heads * latent.value),
            "latent_q": matrix(queries, latent.q_rank) if latent.q_rank else None,
            "latent_kv": matrix(heads * (latent.plain + latent.value), latent.kv_rank),
        }

    def layer(number: int) -> LayerWeights:
        experts = spec.experts_of(number)
        parts: dict[str, Any] = attention()
        return LayerWeights(
            **parts,
            attention_norm=vector(spec.hidden) if spec.pre_norm else None,
            qkv_bias=vector(len(parts["qkv"]), 0.0) if spec.qkv_bias else None,
            output_bias=vector(spec.hidden, 0.0) if spec.output_bias else None,
            attention_post_norm=vector(spec.hidden) if spec.post_norm else None,
            mlp_norm=vector(spec.hidden) if spec.pre_norm else None,
            gate_up=matrix(2 * spec.intermediate, spec.hidden) if experts is None else None,
            gate_up_bias=vector(2 * spec.intermediate, 0.0) if spec.mlp_bias else None,
            down=matrix(spec.hidden, spec.intermediate) if experts is None else None,
            down_bias=vector(spec.hidden, 0.0) if spec.mlp_bias else None,
            mlp_post_norm=vector(spec.hidden) if spec.post_norm else None,
            router=matrix(experts.count, spec.hidden) if experts else None,
            expert_gate_up=(
                stacked(experts.count, 2 * experts.intermediate, spec.hidden) if experts else None
            ),
            expert_down=stacked(experts.count, spec.hidden, experts.intermediate) if experts else None,
        )

    embedding = matrix(spec.vocab, spec.hidden)
    return Weights(
        embedding=embedding,
        layers=tuple(layer(number) for number in range(spec.layers)),
        final_norm=vector(spec.hidden),
        head=embedding if spec.tied_embeddings else matrix(spec.vocab, spec.hidden),
    )
