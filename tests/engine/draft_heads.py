"""Tiny models with draft heads: an MTP layer in the checkpoint, or an EAGLE-3 head in a folder of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton_engine.batch import Batch
from baton_engine.kv.cache import KVCache
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.decoder import Decoder
from baton_engine.model.group import Group
from baton_engine.model.head_loading import head_of, with_eagle3
from baton_engine.model.shards import Shard
from baton_engine.ops import Ops
from baton_engine.ops.plain import PlainOps
from baton_engine.spec import ModelSpec
from tests.engine.greedy import CPU
from tests.engine.models import SIZES, VOCAB, make_model

FILE = "model.safetensors"

HEAD_VOCAB = 200
"""Tokens of the EAGLE-3 head, fewer than the model's."""


def make_mtp(folder: Path, variant: str = "deepseek-v3", *, right: bool = False, **overrides: Any) -> Path:
    """
    Return a model with an MTP layer of random weights.

    `right`: the model's next token depends on the last one only, and the layer knows the function.
    """
    make_model(folder, variant, **overrides)
    tensors, generator = load_file(folder / FILE), torch.Generator().manual_seed(5)
    layers = mtp_layer(folder)
    before, prefix = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    for name in [name for name in tensors if name.startswith(before)]:
        tensors[prefix + name.removeprefix(before)] = _like(tensors[name], generator)
    n = tensors["model.norm.weight"].shape[0]
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}{norm}.weight"] = _around_one(n, generator)
    tensors[f"{prefix}eh_proj.weight"] = torch.randn(n, 2 * n, generator=generator) * 0.1
    for name, copied in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        tensors[f"{prefix}{name}.weight"] = tensors[f"{copied}.weight"].clone()
    if right:
        forget_context(tensors)
        tensors[f"{prefix}enorm.weight"] = torch.ones(n)
        tensors[f"{prefix}eh_proj.weight"] = torch.cat((torch.eye(n), torch.zeros(n, n)), dim=1)
        tensors[f"{prefix}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / FILE, {"format": "pt"})
    change_config(folder, num_nextn_predict_layers=1)
    return folder


def make_eagle3(
    folder: Path, model: Path, *, right: bool = False, speculators: bool = False, **config: Any
) -> Path:
    """
    Return an EAGLE-3 head for `model`, of 7 layers or more, with random weights.

    `right`: both predict the token with the next number. The head does so from the last state, so that only
    the first token of its drafts is right. `speculators`: with the names and the configuration of vLLM's
    library.
    """
    of_model, generator = load_file(model / FILE), torch.Generator().manual_seed(6)
    n, f, heads, kv_heads = SIZES["hidden_size"], 80, 4, 2
    d = n // heads

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.3

    tokens = torch.randperm(VOCAB, generator=generator)[:HEAD_VOCAB].sort().values
    if right:
        tokens = torch.arange(VOCAB)
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[tokens] = True
    tensors = {
        "fc.weight": matrix(n, 3 * n),
        "midlayer.input_layernorm.weight": _around_one(n, generator),
        "midlayer.hidden_norm.weight": _around_one(n, generator),
        "midlayer.post_attention_layernorm.weight": _around_one(n, generator),
        "midlayer.self_attn.q_proj.weight": matrix(heads * d, 2 * n),
        "midlayer.self_attn.k_proj.weight": matrix(kv_heads * d, 2 * n),
        "midlayer.self_attn.v_proj.weight": matrix(kv_heads * d, 2 * n),
        "midlayer.self_attn.o_proj.weight": matrix(n, heads * d),
        "midlayer.mlp.gate_proj.weight": matrix(f, n),
        "midlayer.mlp.up_proj.weight": matrix(f, n),
        "midlayer.mlp.down_proj.weight": matrix(n, f),
        "norm.weight": _around_one(n, generator),
        "lm_head.weight": matrix(len(tokens), n),
        "d2t": tokens - torch.arange(len(tokens)),
        "t2d": t2d,
    }
    if right:
        count_upwards(of_model)
        save_file(of_model, model / FILE, {"format": "pt"})
        forget_context(tensors)
        tensors["fc.weight"] = torch.cat((torch.eye(n), torch.zeros(n, 2 * n)), dim=1)
        tensors["norm.weight"] = torch.ones(n)
        tensors["lm_head.weight"] = of_model["model.embed_tokens.weight"].roll(2, 0)
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = _around_one(3 * n, generator)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{number}.weight": _around_one(n, generator) for number in range(3)}
    if speculators:
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    folder.mkdir()
    save_file(tensors, folder / FILE, {"format": "pt"})
    settings: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": VOCAB,
        "draft_vocab_size": len(tokens),
        "hidden_size": n,
        "intermediate_size": f,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000.0,
    }
    if speculators:
        drafted = settings.pop("draft_vocab_size")
        settings = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": drafted,
            "transformer_layer_config": settings | {"model_type": "llama"},
        }
    (folder / "config.json").write_text(json.dumps(settings | config))
    return folder


def forget_context(tensors: dict[str, Tensor]) -> None:
    """Remove the results of all attentions and MLPs: a logit then depends on its token only."""
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()


def count_upwards(tensors: dict[str, Tensor]) -> None:
    """Let a model predict the token with the next number."""
    forget_context(tensors)
    embedding = torch.nn.functional.normalize(tensors["model.embed_tokens.weight"], dim=-1) * 8
    tensors["model.embed_tokens.weight"] = embedding
    tensors["lm_head.weight"] = embedding.roll(1, 0)
    tensors["model.norm.weight"] = torch.ones(embedding.shape[1])


def drop_config(folder: Path, *names: str) -> None:
    """Remove entries of `config.json`."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in config.items() if name not in names}))


def mtp_layer(folder: Path) -> int:
    """Return the number of the MTP layer of a model: that after its own."""
    return int(json.loads((folder / "config.json").read_text())["num_hidden_layers"])


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return random values of the shape, around 1 for norms."""
    if tensor.dim() == 1:
        return _around_one(len(tensor), generator)
    return torch.randn(tensor.shape, generator=generator) * 0.3


def _around_one(size: int, generator: torch.Generator) -> Tensor:
    return 0.5 + torch.rand(size, generator=generator)


Folders = dict[str, tuple[Path, Path | None]]
"""By kind of head, the folder of a model, and that of the head if it has its own."""

LAYERS = (1, 3, 5)
"""Layers whose inputs make a state of the EAGLE-3 head of `make_heads`."""


def make_heads(root: Path) -> Folders:
    """Return a model with random weights for each kind of head."""
    model = make_model(root / "llama", num_hidden_layers=6)
    auxiliary = "eagle_aux_hidden_state_layer_ids"
    outputs = {auxiliary: [number - 1 for number in LAYERS]}
    inputs: dict[str, Any] = {auxiliary: list(LAYERS), "speculators": True}
    window: dict[str, Any] = {"layer_types": ["sliding_attention"], "sliding_window": 9}
    return {
        "mtp": (make_mtp(root / "deepseek"), None),
        "mtp of glm": (make_mtp(root / "glm", "glm4 with experts"), None),
        "eagle3": (model, make_eagle3(root / "eagle3", model, eagle_config=outputs)),
        "eagle3 with a norm of its inputs": (
            model,
            make_eagle3(root / "joined", model, norm_before_fc=True, norm_output=True, **inputs),
        ),
        "eagle3 with norms of its inputs": (
            model,
            make_eagle3(root / "each", model, fc_norm=True, norm_before_residual=False, **inputs),
        ),
        "eagle3 with a window": (
            model,
            make_eagle3(root / "window", model, norm_before_fc=True, **window, **inputs),
        ),
    }


class CountingDecoder(Decoder):
    """A decoder that counts its passes: the clock of engines that always draft as much as possible."""

    passes = 0

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        self.passes += 1
        return super().forward(batch, cache)


def spec_of(model: Path, head: Path | None) -> ModelSpec:
    """Return the spec of a model with its head."""
    checkpoint = Checkpoint(model, model.name)
    spec = load_spec(checkpoint)
    own = None if head is None else Checkpoint(head, head.name)
    return replace(spec, draft_head=head_of(spec, checkpoint, own))


def decoder_of(
    model: Path,
    head: Path | None,
    ops_of: Callable[[ModelSpec], Ops] = PlainOps,
    device: torch.device = CPU,
    group: Group | None = None,
) -> CountingDecoder:
    """Return the model in fp32 with its head, or the part of one rank."""
    spec, shard = spec_of(model, head), None if group is None else group.shard
    own = None if head is None else Checkpoint(head, head.name)
    weights = load_weights(Checkpoint(model, model.name), spec, torch.float32, shard=shard)
    weights = with_eagle3(weights, own, spec, torch.float32, CPU, shard or Shard(0, 1))
    part = spec if shard is None else shard.spec(spec)
    return CountingDecoder(part, weights, ops_of(part), device, group, ops_of=ops_of)
