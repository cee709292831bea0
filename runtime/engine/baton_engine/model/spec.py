"""
What kind of decoder a checkpoint is: sizes and flags, read from its configuration.

One functional decoder serves every family; a family is nothing but the flags that it sets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context; unused fields stay at 0."""

    kind: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """yarn only: multiplies cosine and sine; None means 0.1 ln(factor) + 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes and flags of a Llama-like decoder."""

    architecture: str
    """The name in the checkpoint, such as `LlamaForCausalLM`."""
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context: int
    """Positions that the model was made for."""
    norm_epsilon: float
    rope_theta: float
    rope: RopeScaling = RopeScaling()
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the attention's output projection (Llama's `attention_bias`)."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm of each query and key head before the rotation (Qwen3)."""
    sliding_window: int | None = None
    """Tokens that a position attends to, itself included; None is all."""
    sliding_layers: tuple[bool, ...] = ()
    """Which layers slide; empty means all of them if there is a window."""
    tied_embeddings: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    @property
    def kv_values_per_token(self) -> int:
        """Numbers, not bytes, that one token adds to the KV cache."""
        return self.layers * 2 * self.kv_heads * self.head_dim

    def window(self, layer: int) -> int | None:
        """The sliding window of `layer`, or None."""
        if self.sliding_window is None or (self.sliding_layers and not self.sliding_layers[layer]):
            return None
        return self.sliding_window
