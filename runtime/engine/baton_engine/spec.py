"""
Architecture of a decoder: sizes and flags, read from the checkpoint's configuration.

One decoder computes every model family; families differ in the flags that they set.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Literal

from baton_api.errors import SetupError

MOST_EXPERTS = 4_096
MOST_INTERMEDIATE = 1_048_576
"""Upper bounds of sizes, above those of any published model. A larger number indicates a damaged file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """Experts of the layers that have them. A layer with a dense MLP beside its experts adds both."""

    count: int
    chosen: int
    """Experts that compute one token."""
    intermediate: int
    """Size of one expert's intermediate states."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Function of the router's logits whose largest values choose experts and weigh their results."""
    normalized: bool = False
    """Whether the weights of the chosen experts are divided by their sum."""
    scale: float = 1.0
    """Factor of the weights."""
    groups: int = 1
    """Number of groups of experts; a token chooses groups first."""
    chosen_groups: int = 1
    group_best: int = 1
    """Number of experts whose scores are added to a group's score."""
    corrected: bool = False
    """Whether a correction is added to scores that choose experts, but not to weights (DeepSeek-V3)."""
    weighs_inputs: bool = False
    """Whether an expert's input is weighted instead of its result (Llama 4)."""
    biased: bool = False
    """Whether the router and the experts have biases (gpt-oss)."""
    clamp: float | None = None
    """Limit of gate and up, with gate * sigmoid(slope * gate) * (up + 1). None: the MLP's activation."""
    slope: float = 1.0
    shared: int = 0
    """Intermediate size of the expert that computes all tokens, without a weight; 0 means no such expert."""
    layers: tuple[bool, ...] = ()
    """Whether each layer has experts; empty means that all layers have them."""

    def in_layer(self, layer: int) -> bool:
        return not self.layers or self.layers[layer]


def check_experts(experts: ExpertSpec, layers: int, source: str) -> None:
    """Validate the experts of a model with `layers` layers. Raises SetupError, which names `source`."""
    if not 1 <= experts.count <= MOST_EXPERTS:
        raise SetupError(f"{source}: the number of experts is {experts.count}, expected 1 to {MOST_EXPERTS}.")
    if not 1 <= experts.chosen <= experts.count:
        raise SetupError(
            f"{source}: each token uses {experts.chosen} experts, expected 1 to {experts.count}."
        )
    if not 1 <= experts.intermediate <= MOST_INTERMEDIATE:
        raise SetupError(
            f"{source}: the intermediate size of experts is {experts.intermediate}, expected 1 to "
            f"{MOST_INTERMEDIATE}."
        )
    if experts.shared < 0 or experts.shared > MOST_INTERMEDIATE:
        raise SetupError(
            f"{source}: the intermediate size of shared experts is {experts.shared}, expected 0 to "
            f"{MOST_INTERMEDIATE}."
        )
    _check_groups(experts, source)
    if experts.layers and len(experts.layers) != layers:
        raise SetupError(
            f"{source}: {len(experts.layers)} layers have or lack experts, but the model has {layers}."
        )


def _check_groups(experts: ExpertSpec, source: str) -> None:
    groups, size = experts.groups, experts.count // max(experts.groups, 1)
    if groups < 1 or experts.count % groups or experts.group_best > size:
        raise SetupError(f"{source}: {experts.count} experts cannot form {groups} groups.")
    if not 1 <= experts.chosen_groups <= groups or experts.chosen > experts.chosen_groups * size:
        raise SetupError(
            f"{source}: {experts.chosen} experts of a token cannot be in {experts.chosen_groups} of "
            f"{groups} groups."
        )


LATENT_EPSILON = 1e-6
"""Of the norms of latents in all published models, whatever the configuration has for other norms."""

MOST_RANK = 65_536
"""Upper bound of sizes, above those of any published model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Sizes of latent attention."""

    q_rank: int
    """Size of the latent of queries; 0 if queries are projected directly."""
    kv_rank: int
    """Size of the latent of keys and values."""
    plain: int
    """Dimensions of a query head that are not rotated."""
    value: int
    """Dimensions of a value head."""


def check_latent(latent: LatentSpec, source: str) -> None:
    """Validate the sizes. Raises SetupError, which names `source`."""
    sizes = {"q_lora_rank": (latent.q_rank, 0), "kv_lora_rank": (latent.kv_rank, 1)}
    sizes |= {"qk_nope_head_dim": (latent.plain, 1), "v_head_dim": (latent.value, 1)}
    for name, (value, least) in sizes.items():
        if not least <= value <= MOST_RANK:
            raise SetupError(f"{source}: {name} is {value}, expected {least} to {MOST_RANK}.")


Quantize = Literal["keep", "off", "q8_0", "q4_0"]
"""How matrices are loaded: quantized formats as they are, expanded, or the others converted to a format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies beyond the trained context. Unused fields keep their defaults."""

    kind: Literal["none", "linear", "llama3", "yarn", "factors"] = "none"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """yarn and factors only: multiplies cosine and sine. None: 0.1 ln(factor) + 1 for yarn, 1 for factors."""
    truncate: bool = True
    """yarn only: whether the blended range ends at whole dimensions."""
    factors: tuple[float, ...] = ()
    """factors only: one divisor per pair of dimensions: LongRoPE, and llama3's scaling in GGUF files."""
    short_factors: tuple[float, ...] = ()
    """factors only: LongRoPE's divisors for contexts up to `original_context`; empty for other scalings."""

    @property
    def stretched_context(self) -> int:
        """Positions that YaRN stretches the original context to; 0 for other kinds of scaling.

        https://arxiv.org/abs/2309.00071
        Qwen's configurations keep `max_position_embeddings` at the original 32,768 when YaRN is switched on.
        """
        return int(self.factor * self.original_context) if self.kind == "yarn" else 0


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
    """Positions that the model serves: as its configuration declares, or more where YaRN stretches it."""
    norm_epsilon: float
    rope_theta: float
    rope: RopeScaling = RopeScaling()
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the attention's output projection (Llama's `attention_bias`)."""
    mlp_bias: bool = False
    pre_norm: bool = True
    """RMS norm of the inputs of attention and MLP; all families but OLMo 2."""
    post_norm: bool = False
    """RMS norm of the outputs of attention and MLP before they are added to the residual (Gemma 2)."""
    qk_norm: bool = False
    """RMS norm of each query and key head before the rotation (Qwen3)."""
    qk_norm_joint: bool = False
    """Whether `qk_norm` normalizes all query heads of a token together, and all key heads (OLMo 2)."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Function of the MLP's gate. gelu_tanh is the tanh approximation of GELU."""
    rotary_dim: int = 0
    """Dimensions of each head that are rotated, the first ones; 0 is all."""
    sliding_rope_theta: float | None = None
    """`rope_theta` of the layers with a sliding window, which then have no rope scaling (Gemma 3)."""
    unrotated_layers: tuple[bool, ...] = ()
    """Whether each layer omits the rotation (SmolLM3); empty means that no layer does."""
    attention_scale: float | None = None
    """Factor of the attention scores; None is head_dim ** -0.5."""
    attention_cap: float | None = None
    """Attention scores s become cap * tanh(s / cap) (Gemma 2)."""
    embedding_scale: float = 1.0
    """Factor of the embeddings, rounded to the dtype of the model as transformers does."""
    residual_scale: float = 1.0
    """Factor of the outputs of attention and MLP (Granite)."""
    logit_scale: float = 1.0
    """Factor of the logits (Granite)."""
    logit_cap: float | None = None
    """Logits l become cap * tanh(l / cap) (Gemma 2)."""
    sliding_window: int | None = None
    """Tokens that a position attends to, itself included; None is all."""
    sliding_layers: tuple[bool, ...] = ()
    """Whether each layer uses the window; empty means that all layers use it."""
    window_chunks: bool = False
    """Whether `sliding_window` splits the sequence into chunks; a position attends to its own (Llama 4)."""
    window_rest: bool = False
    """Whether no position but the first attends to the first, in `sliding_window` or not (draft heads)."""
    sinks: bool = False
    """Whether each head has a learned score without a value, which all positions attend to (gpt-oss)."""
    qk_norm_after: bool = False
    """RMS norm without weights of each query and key head after the rotation, in rotated layers (Llama 4)."""
    temperature: tuple[float, int] | None = None
    """Factor f and length l: at position p, queries of unrotated layers are multiplied by
    1 + f ln(1 + floor((p + 1) / l)) (Llama 4)."""
    latent: LatentSpec | None = None
    """Multi-head latent attention; `kv_heads` is then 1, and `head_dim` the size of the cached vector."""
    experts: ExpertSpec | None = None
    """None: all layers have a dense MLP."""
    draft_layers: int = 0
    """Layers after `layers` that predict further tokens (DeepSeek-V3)."""
    draft_head: HeadSpec | None = None
    """The head that computes drafts beside the model; None: there is none, or it is not used."""
    tied_embeddings: bool = False
    headless: bool = False
    """Whether the checkpoint has no language model head: it computes embeddings and cannot generate text."""
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    @property
    def window_kind(self) -> Literal["slides", "chunks", "rest"]:
        """What a position of a layer with a window attends to."""
        return "chunks" if self.window_chunks else "rest" if self.window_rest else "slides"

    @property
    def group(self) -> int:
        """Number of query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def rotated(self) -> int:
        """Number of dimensions of each head that are rotated."""
        return self.rotary_dim or self.head_dim

    @property
    def score_scale(self) -> float:
        """Factor of the attention scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def kv_values_per_token(self) -> int:
        """Number of values that one token adds to the KV cache."""
        return self.layers * self.kv_planes * self.kv_heads * self.head_dim

    @property
    def kv_planes(self) -> int:
        """Number of vectors that the cache keeps per head and token: key and value, or one latent vector."""
        return 1 if self.latent is not None else 2

    def window(self, layer: int) -> int | None:
        """Return the sliding window of `layer`, or None."""
        if self.sliding_window is None or (self.sliding_layers and not self.sliding_layers[layer]):
            return None
        return self.sliding_window

    def experts_of(self, layer: int) -> ExpertSpec | None:
        """Return the experts of `layer`, or None if it has a dense MLP only."""
        return self.experts if self.experts is not None and self.experts.in_layer(layer) else None

    def rotation(self, layer: int) -> Literal["none", "sliding", "full"]:
        """Return which rotation `layer` uses. "sliding" is that of `sliding_rope_theta`."""
        if self.unrotated_layers and self.unrotated_layers[layer]:
            return "none"
        return "full" if self.sliding_rope_theta is None or self.window(layer) is None else "sliding"

    def served_to(self, tokens: int) -> ModelSpec:
        """
        Return the spec of a worker whose longest sequence has `tokens` tokens.

        LongRoPE has two sets of rotary factors. One worker uses one of them for all requests: a cached key
        is rotated only once, and a prefix is shared by requests of any length.
        https://arxiv.org/abs/2402.13753
        """
        if not self.rope.short_factors or tokens > self.rope.original_context:
            return self
        rope = replace(self.rope, factors=self.rope.short_factors, short_factors=())
        return replace(self, rope=rope)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """A draft head: one layer that predicts the token after the next one, from states of the model."""

    kind: Literal["mtp", "eagle3"]
    """mtp: a layer of the checkpoint (DeepSeek-V3). eagle3: a checkpoint of its own."""
    layer: ModelSpec
    """The layer as a model of one layer. Its vocabulary is that of the head's logits."""
    inputs: tuple[int, ...] = ()
    """eagle3: layers of the model whose inputs make a state. mtp: empty, a state is after the final norm."""
    input_norm: Literal["none", "joined", "each"] = "none"
    """eagle3: whether these inputs are normalized together, or each of them."""
    normed_residual: bool = False
    """eagle3: whether the residual begins with the normalized state."""
    normed_states: bool = False
    """eagle3: whether the head's own states are normalized before they are states of further tokens."""
    state_parts: int = 1
    """Equal parts of the states in KV blocks, of which a rank has one. `layer` is then that of the rank."""

    @property
    def stored_state(self) -> int:
        """Number of values of a state that one rank has in a block."""
        return self.layer.hidden // self.state_parts

    def __str__(self) -> str:
        """What distinguishes heads in an error, and in the digest of `Compatibility`."""
        digest = hashlib.sha256(repr(self).encode()).hexdigest()[:8]
        return f"{self.kind} of {self.layer.hidden} ({digest})"


def mscale(factor: float, scale: float) -> float:
    """Return YaRN's factor of attention for a stretch by `factor`. https://arxiv.org/abs/2309.00071"""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


LIMITS = {
    "vocab": 4_194_304,
    "hidden": 131_072,
    "layers": 1_024,
    "heads": 2_048,
    "kv_heads": 2_048,
    "head_dim": 2_048,
    "intermediate": 1_048_576,
    "context": 1 << 27,
}
"""Upper bounds of sizes, above those of any published model. A larger number indicates a damaged file."""


def checked(spec: ModelSpec, source: str) -> ModelSpec:
    """Return `spec` after validation. `source` is the file's name in a SetupError."""
    for name, limit in LIMITS.items():
        value = getattr(spec, name)
        if not 1 <= value <= limit:
            raise SetupError(f"{source}: {name} is {value}, expected 1 to {limit}.")
    if spec.heads % spec.kv_heads:
        raise SetupError(f"{source}: {spec.heads} query heads cannot share {spec.kv_heads} key heads evenly.")
    if spec.head_dim % 2:
        raise SetupError(f"{source}: head_dim is {spec.head_dim}, but rotary embeddings need an even number.")
    if not 0 <= spec.norm_epsilon < 1:
        raise SetupError(f"{source}: the epsilon of the norm is {spec.norm_epsilon}, expected 0 to 1.")
    if not spec.rope_theta > 1:
        raise SetupError(f"{source}: rope_theta is {spec.rope_theta}; it must be above 1.")
    if spec.sliding_window is not None and spec.sliding_window < 1:
        raise SetupError(f"{source}: sliding_window is {spec.sliding_window}; it must be at least 1.")
    if spec.experts is not None:
        check_experts(spec.experts, spec.layers, source)
    if spec.latent is not None:
        check_latent(spec.latent, source)
    for name, listed in (("layer_types", spec.sliding_layers), ("no_rope_layers", spec.unrotated_layers)):
        if listed and len(listed) != spec.layers:
            raise SetupError(f"{source}: {name} lists {len(listed)} layers, but the model has {spec.layers}.")
    _check_factors(spec, source)
    _check_rope(spec, source)
    return spec.served_to(spec.context)


def _check_factors(spec: ModelSpec, source: str) -> None:
    names = (
        "attention_scale",
        "attention_cap",
        "embedding_scale",
        "residual_scale",
        "logit_scale",
        "logit_cap",
    )
    for name in names:
        value = getattr(spec, name)
        if value is not None and not 0 < value < math.inf:
            raise SetupError(f"{source}: the {name.replace('_', ' ')} is {value}; it must be above 0.")


def _check_rope(spec: ModelSpec, source: str) -> None:
    rope = spec.rope
    if rope.kind in ("linear", "llama3", "yarn") and not rope.factor > 0:
        raise SetupError(f"{source}: the rope factor is {rope.factor}; it must be above 0.")
    if rope.kind in ("llama3", "yarn") and rope.original_context < 1:
        raise SetupError(f"{source}: original_max_position_embeddings is {rope.original_context}.")
    if rope.kind == "llama3" and not 0 < rope.low_freq_factor < rope.high_freq_factor:
        raise SetupError(
            f"{source}: low_freq_factor {rope.low_freq_factor} must be between 0 and "
            f"high_freq_factor {rope.high_freq_factor}."
        )
    if rope.kind == "yarn" and not 0 < rope.beta_slow < rope.beta_fast:
        raise SetupError(
            f"{source}: beta_slow {rope.beta_slow} must be between 0 and beta_fast {rope.beta_fast}."
        )
    if spec.rotated % 2 or not 0 < spec.rotated <= spec.head_dim:
        raise SetupError(
            f"{source}: {spec.rotated} of {spec.head_dim} dimensions are rotated; expected an even number."
        )
    if spec.sliding_rope_theta is not None and not spec.sliding_rope_theta > 1:
        raise SetupError(f"{source}: the local rope theta is {spec.sliding_rope_theta}; it must be above 1.")
    for factors in (rope.factors, rope.short_factors or rope.factors):
        if rope.kind == "factors" and len(factors) != spec.rotated // 2:
            raise SetupError(
                f"{source}: {len(factors)} rope factors for {spec.rotated} rotated dimensions; expected half "
                "as many."
            )
    if rope.kind == "factors" and not all(factor > 0 for factor in (*rope.factors, *rope.short_factors)):
        raise SetupError(f"{source}: a rope factor is not above 0.")
