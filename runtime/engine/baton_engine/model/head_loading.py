"""
Finds the draft head of a model, in its checkpoint or in one of the head's own, and loads the latter.

Each rank reads its part of a head (`model.shards`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from baton_api.errors import SetupError
from baton_engine.model import config as configuration
from baton_engine.model.checkpoint import Checkpoint, read_json
from baton_engine.model.cuts import Cut
from baton_engine.model.safetensors import SafetensorsFolder
from baton_engine.model.shards import Shard
from baton_engine.model.weights import HeadWeights, LayerWeights, Weights
from baton_engine.spec import HeadSpec, ModelSpec

SPECULATORS = "speculators_model_type"
"""Key of configurations that vLLM's library speculators writes."""

WHOLE = 1 << 30
"""Window of heads without one: above all contexts, so that heads do not differ by their model's."""

LAYERS = "eagle_aux_hidden_state_layer_ids"

WHOLE_HEAD = Shard(0, 1)

UNUSED = ("t2d", "rotary_emb.inv_freq")
"""Endings of tensors of EAGLE-3 heads that need not be read: `d2t` or the configuration says the same."""


def head_of(spec: ModelSpec, checkpoint: Checkpoint, eagle3: Checkpoint | None) -> HeadSpec:
    """Return the EAGLE-3 head in `eagle3`, or the MTP layer of the model. Raises SetupError."""
    return mtp_head(spec, checkpoint) if eagle3 is None else eagle3_head(spec, eagle3)


def mtp_head(spec: ModelSpec, checkpoint: Checkpoint) -> HeadSpec:
    """Return the head in the checkpoint of a model of `spec`. Raises SetupError if there is none."""
    if not spec.draft_layers or checkpoint.is_gguf:
        why = "is a GGUF file, of which it is not read" if checkpoint.is_gguf else "has none"
        raise SetupError(
            f"--speculation mtp needs a layer that predicts a further token, and {checkpoint.name} "
            f"({spec.architecture}) {why}. Use a checkpoint with num_nextn_predict_layers, such as "
            "DeepSeek-V3's, or --speculation ngram."
        )
    experts = None if spec.experts is None else replace(spec.experts, layers=())
    return HeadSpec(kind="mtp", layer=_alone(replace(spec, experts=experts)))


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` is that of an EAGLE-3 head."""
    names = " ".join(map(str, config.get("architectures") or ())).lower()
    return "eagle3" in names or "draft_vocab_size" in config or config.get(SPECULATORS) == "eagle3"


def eagle3_head(spec: ModelSpec, checkpoint: Checkpoint) -> HeadSpec:
    """Return the head in a checkpoint of its own. Raises SetupError if it does not fit a model of `spec`."""
    if checkpoint.is_gguf:
        raise SetupError(f"{checkpoint.name} is a GGUF file. An EAGLE-3 head is a folder with safetensors.")
    path = checkpoint.path / "config.json"
    config = read_json(path)
    if not is_eagle3(config):
        raise SetupError(
            f"{path} is not that of an EAGLE-3 head: it has neither such an architecture nor "
            "draft_vocab_size. Use --speculation draft for a smaller model."
        )
    config = _flat(config)
    layer = configuration.spec_of(config, str(path))
    if layer.architecture != "LlamaForCausalLM" or layer.layers != 1:
        raise SetupError(
            f"{path}: a head of {layer.layers} layers of {layer.architecture} is not supported. Supported: "
            "one layer of LlamaForCausalLM."
        )
    _compare(path.parent.name, "a vocabulary of {} tokens", layer.vocab, spec.vocab)
    width = int(config.get("target_hidden_size") or layer.hidden)
    _compare(path.parent.name, "a target of hidden size {}", width, spec.hidden)
    layer = replace(layer, vocab=int(config.get("draft_vocab_size") or layer.vocab))
    norms = {"joined": config.get("norm_before_fc"), "each": config.get("fc_norm")}
    chosen: list[Any] = [name for name, is_set in norms.items() if is_set]
    if len(chosen) > 1 or config.get("use_aux_hidden_state") is False:
        raise SetupError(
            f"{path}: a head without inputs of layers (use_aux_hidden_state false), or with both "
            "norm_before_fc and fc_norm, is not supported. Use another head."
        )
    return HeadSpec(
        kind="eagle3",
        layer=_alone(layer, _window(config, str(path))),
        inputs=_inputs(config, spec.layers, str(path)),
        input_norm=chosen[0] if chosen else "none",
        normed_residual=bool(config.get("norm_before_residual", False)),
        normed_states=bool(config.get("norm_output", False)),
    )


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return a configuration with Llama's keys and all options at the top, for the three kinds that there are.

    That of EAGLE's authors has them there. SGLang's and NVIDIA's have some in `eagle_config`, where a layer's
    number is that of its output. speculators' have the layer in `transformer_layer_config`.
    """
    flat = {**config, **(config.get("transformer_layer_config") or {})}
    if config.get(SPECULATORS):
        flat = {"norm_before_residual": True} | flat
    nested = dict(config.get("eagle_config") or {})
    if ids := nested.pop(LAYERS, None):
        flat[LAYERS] = [int(number) + 1 for number in ids]
    names = [str(name).replace("Eagle3", "") for name in config.get("architectures") or ()]
    if config.get(SPECULATORS) and flat.get("model_type") == "llama":
        names = ["LlamaForCausalLM"]
    return flat | nested | {"architectures": names}


def _compare(name: str, what: str, head: int, model: int) -> None:
    if head != model:
        raise SetupError(
            f"The EAGLE-3 head {name} is for {what.format(head)}, and the model has {model}. Use a head that "
            "was trained for this model."
        )


def _inputs(config: Mapping[str, Any], layers: int, source: str) -> tuple[int, ...]:
    """Return the layers whose inputs make a state: given, or the choice of EAGLE-3's authors."""
    inputs = tuple(int(number) for number in config.get(LAYERS) or (2, layers // 2, layers - 3))
    ascending = all(one < following for one, following in pairwise(inputs))
    if not ascending or inputs[0] < 0 or inputs[-1] >= layers:
        raise SetupError(
            f"{source}: the head needs inputs of layers {list(inputs)}, but the model has layers 0 to "
            f"{layers - 1}. Different ones are expected, in ascending order."
        )
    return inputs


def _window(config: Mapping[str, Any], source: str) -> int:
    """Return the window of a head's layer: `WHOLE` without `layer_types`, whatever `sliding_window` is."""
    kind = (config.get("layer_types") or ["full_attention"])[0]
    window = WHOLE if kind == "full_attention" else int(config.get("sliding_window") or WHOLE)
    if kind not in ("full_attention", "sliding_attention") or window < 1:
        raise SetupError(f"{source}: a head with {kind} and a window of {window} tokens is not supported.")
    return window


def _alone(layer: ModelSpec, window: int = WHOLE) -> ModelSpec:
    """Return the spec of a head's layer, which attends to no state of position 0."""
    if layer.sliding_window is not None or layer.post_norm or layer.residual_scale != 1 or not layer.pre_norm:
        raise SetupError(f"A draft head with the options of {layer.architecture} is not supported.")
    return replace(
        layer,
        layers=1,
        sliding_window=window,
        window_rest=True,
        unrotated_layers=(),
        draft_layers=0,
        draft_head=None,
        # Workers pair whose models differ in these: `handshake.BYTES_DO_NOT_DEPEND_ON`.
        context=WHOLE,
        tied_embeddings=False,
        headless=False,
        eos_ids=(),
        bos_id=None,
    )


def with_eagle3(
    weights: Weights,
    checkpoint: Checkpoint | None,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = WHOLE_HEAD,
) -> Weights:
    """Return the weights of a model of `spec` with those of its head in `checkpoint`, if there is one."""
    if checkpoint is None or spec.draft_head is None:
        return weights
    head = load_eagle3(checkpoint, spec.draft_head, spec, dtype, device, shard)
    return replace(weights, draft_head=head)


def load_eagle3(
    checkpoint: Checkpoint,
    head: HeadSpec,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = WHOLE_HEAD,
) -> HeadWeights:
    """
    Load the weights of a head for a model of `spec`, in `dtype`, or the part of them of one rank.

    `head` and `spec` are of all ranks. Raises SetupError.
    """
    source = _Tensors(checkpoint, dtype, device)
    layer, attention = head.layer, "midlayer.self_attn."
    n, d, vocab = layer.hidden, layer.head_dim, layer.vocab
    q, k = layer.heads * d, layer.kv_heads * d
    heads, kv_heads = (
        range(part.start * d, part.stop * d)
        for part in (shard.part(layer.heads), shard.kv_heads(layer.kv_heads))
    )
    inner = shard.part(layer.intermediate)
    rows = {"q_proj": (q, heads), "k_proj": (k, kv_heads), "v_proj": (k, kv_heads)}

    def part(name: str, count: int, kept: range, *inputs: int) -> Tensor:
        return source.read(name, count, *inputs, cut=Cut(0, (kept,)))

    def columns(name: str, kept: range, count: int) -> Tensor:
        return source.read(name, n, count, cut=Cut(1, (kept,))).contiguous()

    def once(present: bool, name: str) -> Tensor | None:
        """Return the bias of a partial sum, which only rank 0 adds."""
        bias = source.read(name, n) if present else None
        return bias if bias is None or shard.rank == 0 else torch.zeros_like(bias)

    def qkv(kind: str, *inputs: int) -> Tensor:
        return torch.cat([part(f"{attention}{name}.{kind}", *row, *inputs) for name, row in rows.items()])

    def gates(kind: str, *inputs: int) -> Tensor:
        names = ("gate_proj", "up_proj")
        return torch.cat([part(f"midlayer.mlp.{name}.{kind}", f, inner, *inputs) for name in names])

    def rows_of(name: str, tokens: int) -> Tensor:
        return part(name, tokens, shard.part(tokens), n)

    f, count = layer.intermediate, len(head.inputs)
    norms = {
        "none": {},
        "joined": {"input_norm": count * spec.hidden},
        "each": {f"fc_norm.{number}": spec.hidden for number in range(count)},
    }[head.input_norm]
    shared = vocab == spec.vocab and n == spec.hidden
    has_head = source.has("lm_head.weight") or not shared
    has_embedding = source.has("embed_tokens.weight") or n != spec.hidden
    weights = HeadWeights(
        joint=source.read("fc.weight", n, count * spec.hidden),
        input_norms=[source.read(f"{name}.weight", size) for name, size in norms.items()],
        embedding_norm=source.read("midlayer.input_layernorm.weight", n),
        state_norm=source.read("midlayer.hidden_norm.weight", n),
        layer=LayerWeights(
            attention_norm=None,
            qkv=qkv("weight", 2 * n),
            qkv_bias=qkv("bias") if layer.qkv_bias else None,
            q_norm=None,
            k_norm=None,
            output=columns(f"{attention}o_proj.weight", heads, q),
            output_bias=once(layer.output_bias, f"{attention}o_proj.bias"),
            mlp_norm=source.read("midlayer.post_attention_layernorm.weight", n),
            gate_up=gates("weight", n),
            gate_up_bias=gates("bias") if layer.mlp_bias else None,
            down=columns("midlayer.mlp.down_proj.weight", inner, f),
            down_bias=once(layer.mlp_bias, "midlayer.mlp.down_proj.bias"),
        ),
        norm=source.read("norm.weight", n),
        embedding=rows_of("embed_tokens.weight", spec.vocab) if has_embedding else None,
        head=rows_of("lm_head.weight", vocab) if has_head else None,
        tokens=source.tokens(vocab, spec.vocab),
    )
    source.check_rest()
    return weights


class _Tensors:
    """The tensors of an EAGLE-3 head, by the names of its first release."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._source = SafetensorsFolder(checkpoint.path)
        self._dtype, self._device = dtype, device
        self._stored = {
            name.removeprefix("model.").replace("layers.0.", "midlayer."): name
            for name in self._source.shapes
        }
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._stored

    def read(self, name: str, *shape: int, cut: Cut | None = None) -> Tensor:
        """Return a tensor, which must have `shape`, or a part of it. Other parts take no memory."""
        self._check(name, shape)
        stored = self._source.read(self._stored[name])
        return (stored if cut is None else cut.of(stored)).to(self._device, self._dtype)

    def tokens(self, count: int, vocab: int) -> Tensor | None:
        """Return the model's tokens [count] of the head's. None: they are equal."""
        if "d2t" not in self._stored and count == vocab:
            return None
        self._check("d2t", (count,))
        offsets = self._source.read_raw(self._stored["d2t"])
        tokens = (torch.arange(count) + offsets.to(torch.int64)).to(self._device)
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
            raise SetupError(
                f"{self._source.name}: d2t has tokens {int(tokens.min())} to {int(tokens.max())}, and the "
                f"model has a vocabulary of {vocab}. The head is for another model, or damaged."
            )
        return tokens

    def check_rest(self) -> None:
        """Raise SetupError if there are tensors that were not read, and change what the head computes."""
        rest = [name for name in self._stored if name not in self._read and not name.endswith(UNUSED)]
        if rest:
            raise SetupError(
                f"{self._source.name}: tensor {rest[0]}, one of {len(rest)}, is not part of an EAGLE-3 head "
                "with this configuration. Its drafts would be wrong. Use another head."
            )

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        self._read.add(name)
        if name not in self._stored:
            raise SetupError(
                f"{self._source.name} has no tensor {name}, which an EAGLE-3 head needs. Download it again."
            )
        if (present := self._source.shapes[self._stored[name]]) != shape:
            raise SetupError(
                f"{self._source.name}: tensor {name} has shape {list(present)}, but the configurations of "
                f"head and model require {list(shape)}."
            )
