"""
Definition of a model family: everything that distinguishes its checkpoints from those of other families.

One decoder computes all families. A family reads its own options from the configuration, names its tensors,
and lists its parsers. The modules of `baton_engine.model.families` define them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from baton_engine.spec import ExpertSpec, ModelSpec

Refine = Callable[[ModelSpec, Mapping[str, Any]], ModelSpec]
"""Returns a spec with the options of the family, read from the configuration (or the metadata of GGUF)."""

Normalize = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Returns a configuration with Llama's keys: nested parts flattened, and omitted values filled in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """
    Names of the decoder's tensors in a file format, without `.weight` and `.bias`. Defaults: Llama's.

    An empty name means that the format does not have the tensor.
    """

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}."
    """Prefix of the tensors of a layer. The following names have it."""
    attention_norm: str = "input_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str = ""
    """q, k and v stacked in one tensor; then `q`, `k` and `v` are not read."""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    output: str = "self_attn.o_proj"
    attention_post_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str = ""
    """gate and up stacked in one tensor; then `gate` and `up` are not read."""
    down: str = "mlp.down_proj"
    q_latent: str = "self_attn.q_a_proj"
    q_latent_norm: str = "self_attn.q_a_layernorm"
    q_expand: str = "self_attn.q_b_proj"
    kv_latent: str = "self_attn.kv_a_proj_with_mqa"
    kv_latent_norm: str = "self_attn.kv_a_layernorm"
    kv_expand: str = "self_attn.kv_b_proj"
    sinks: str = "self_attn.sinks"
    router: str = "mlp.gate"
    router_correction: str = "mlp.gate.e_score_correction"
    expert_gate: str = "mlp.experts.{}.gate_proj"
    """With the expert's number in place of {}. A name without {} is of all experts stacked, as in GGUF."""
    expert_up: str = "mlp.experts.{}.up_proj"
    expert_down: str = "mlp.experts.{}.down_proj"
    shared_gate: str = "mlp.shared_experts.gate_proj"
    shared_up: str = "mlp.shared_experts.up_proj"
    shared_down: str = "mlp.shared_experts.down_proj"
    mlp_post_norm: str = ""

    def translate(self, name: str, target: TensorNames) -> str:
        """Return the name in `target` of the tensor `name`; an unknown name stays as it is."""
        base, _, kind = name.rpartition(".")
        for part in fields(self):
            ours, theirs = getattr(self, part.name), getattr(target, part.name)
            if not ours or not theirs:
                continue
            if part.name in OUTSIDE_LAYERS:
                if base == ours:
                    return f"{theirs}.{kind}"
            elif part.name != "layer" and (number := self._layer_number(base, ours)) is not None:
                return f"{target.layer.format(number)}{theirs}.{kind}"
        return name

    def _layer_number(self, base: str, part: str) -> str | None:
        start, end = self.layer.split("{}")
        middle = base.removeprefix(start).removesuffix(end + part)
        return middle if middle.isdecimal() and base == f"{start}{middle}{end}{part}" else None


NORM = "norm"
"""The names of all norms end with it, in every format."""

OUTSIDE_LAYERS = frozenset({"embedding", "final_norm", "head"})

GGUF_NAMES = TensorNames(
    embedding="token_embd",
    final_norm="output_norm",
    head="output",
    layer="blk.{}.",
    attention_norm="attn_norm",
    q="attn_q",
    k="attn_k",
    v="attn_v",
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    output="attn_output",
    attention_post_norm="post_attention_norm",
    mlp_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
    q_latent="attn_q_a",
    q_latent_norm="attn_q_a_norm",
    q_expand="attn_q_b",
    kv_latent="attn_kv_a_mqa",
    kv_latent_norm="attn_kv_a_norm",
    kv_expand="attn_kv_b",
    sinks="attn_sinks",
    router="ffn_gate_inp",
    router_correction="exp_probs_b",
    expert_gate="ffn_gate_exps",
    expert_up="ffn_up_exps",
    expert_down="ffn_down_exps",
    shared_gate="ffn_gate_shexp",
    shared_up="ffn_up_shexp",
    shared_down="ffn_down_shexp",
    mlp_post_norm="post_ffw_norm",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFormat:
    """The family's GGUF files."""

    architecture: str
    """Value of `general.architecture`, and prefix of the metadata."""
    refine: Refine
    """Called with the metadata without the prefix."""
    tensors: TensorNames = GGUF_NAMES
    interleaved: bool = False
    """Whether llama.cpp rotates adjacent pairs of this family. It then reorders the rows of q and k."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportedModels:
    """A row of the documentation's table of models."""

    name: str
    tool_parsers: tuple[str, ...] = ()
    reasoning_parsers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """One architecture of Hugging Face's transformers."""

    architecture: str
    """Value of `architectures` in `config.json`."""
    refine: Refine
    """Called with `config.json`."""
    models: tuple[SupportedModels, ...]
    normalize: Normalize = dict
    """Called with `config.json` before anything is read from it."""
    multimodal: str = ""
    """Architecture of checkpoints with images whose text part is this family; only text is served."""
    partial_rotary: bool = False
    """Whether the configuration's `partial_rotary_factor` applies."""
    interleaved: bool = False
    """Whether safetensors checkpoints rotate adjacent pairs of dimensions instead of halves."""
    fused_experts: Literal["", "halves", "interleaved"] = ""
    """Order of gate and up in safetensors checkpoints with one tensor for all experts of a layer."""
    quantizations: tuple[str, ...] = ()
    """`quant_method`s of safetensors checkpoints that the family's own tensors read, instead of `schemes`."""
    norm_offset: float = 0.0
    """Added to the weights of norms of safetensors checkpoints. GGUF files contain the sums."""
    gguf: GGUFFormat | None = None
    """None if GGUF files of the family use the architecture of another one."""
    tensors: TensorNames = field(default_factory=TensorNames)
    tool_parser_aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names for `--tool-call-parser`, with the parser that they select."""
    reasoning_parser_aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names for `--reasoning-parser`, with the parser that they select."""

    @property
    def headless(self) -> str:
        """Architecture of the family's checkpoints without a language model head (embedding models)."""
        return self.architecture.replace("ForCausalLM", "Model")


def expert_count(config: Mapping[str, Any]) -> int:
    """Return the number of experts of a `config.json`. transformers renamed it. Raises KeyError."""
    for name in ("num_local_experts", "n_routed_experts"):
        if config.get(name) is not None:
            return int(config[name])
    return int(config["num_experts"])


def gguf_experts(metadata: Mapping[str, Any], intermediate: int) -> ExpertSpec | None:
    """
    Return the experts of a GGUF file whose weights are normalized, or None for a dense model.

    `intermediate` is the experts' size if the file has no `expert_feed_forward_length`.
    """
    count = int(metadata.get("expert_count", 0))
    if not count:
        return None
    return ExpertSpec(
        count=count,
        chosen=int(metadata["expert_used_count"]),
        intermediate=int(metadata.get("expert_feed_forward_length", intermediate)),
        normalized=True,
    )


def layer_windows(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """Read `sliding_window`, and the layers that use it, from a `config.json`."""
    window = config.get("sliding_window")
    if window is None or not config.get("use_sliding_window", False):
        return spec
    if kinds := config.get("layer_types"):
        slides = _slides(kinds)
    else:
        first = int(config.get("max_window_layers", 28))
        slides = tuple(number >= first for number in range(spec.layers))
    return replace(spec, sliding_window=int(window), sliding_layers=slides) if any(slides) else spec


def alternating_windows(spec: ModelSpec, config: Mapping[str, Any], period: int) -> ModelSpec:
    """Read the window; without `layer_types`, all layers use it except each `period`-th one."""
    window = config.get("sliding_window")
    if window is None:
        return spec
    slides = _slides(config.get("layer_types") or ()) or every(spec.layers, period)
    return replace(spec, sliding_window=int(window), sliding_layers=slides)


def rope_by_window(
    config: Mapping[str, Any], theta: float, sliding_theta: float | None = None
) -> dict[str, Any]:
    """
    Return the configuration with one set of rotary parameters, and those of layers with a window beside it.

    transformers 5 nests the parameters by kind of layer. Layers with a window have only `sliding_rope_theta`.
    `theta` and `sliding_theta` are the family's defaults; without the second one, `rope_theta` is.
    """
    nested = config.get("rope_parameters") or {}
    flat = nested if "rope_type" in nested else {}
    full, sliding = nested.get("full_attention") or flat, nested.get("sliding_attention") or {}
    if (kind := sliding.get("rope_type", "default")) != "default":
        raise ValueError(f"rope scaling {kind!r} of layers with a window is not supported.")
    base = full.get("rope_theta") or config.get("rope_theta") or theta
    local = sliding.get("rope_theta") or config.get("rope_local_base_freq") or sliding_theta or base
    return {**config, "rope_parameters": full, "rope_theta": base, "sliding_rope_theta": local}


def every(layers: int, period: int) -> tuple[bool, ...]:
    """
    Return True for all layers except each `period`-th one.

    >>> every(6, 3)
    (True, True, False, True, True, False)
    """
    return tuple((number + 1) % period != 0 for number in range(layers))


def _slides(kinds: Iterable[str]) -> tuple[bool, ...]:
    if others := set(kinds) - {"sliding_attention", "full_attention"}:
        raise ValueError(f"layer_types has {sorted(others)}. Supported: sliding_attention, full_attention.")
    return tuple(kind == "sliding_attention" for kind in kinds)


def gguf_pattern(spec: ModelSpec, metadata: Mapping[str, Any], period: int) -> ModelSpec:
    """Read the window, if there is one, and its layers: listed, or all but each `period`-th one."""
    window = metadata.get("attention.sliding_window")
    if not window:
        return spec
    pattern = metadata.get("attention.sliding_window_pattern", period)
    slides = tuple(map(bool, pattern)) if isinstance(pattern, list) else every(spec.layers, int(pattern))
    return replace(spec, sliding_window=int(window), sliding_layers=slides)


def gguf_window(spec: ModelSpec, metadata: Mapping[str, Any]) -> ModelSpec:
    """Read the window of all layers from the metadata of a GGUF file."""
    window = metadata.get("attention.sliding_window")
    return replace(spec, sliding_window=int(window)) if window else spec
