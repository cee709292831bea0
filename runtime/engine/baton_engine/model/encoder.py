"""
Bidirectional encoders: BERT, RoBERTa and XLM-RoBERTa, as embedders and as scorers of pairs of texts.

An encoder attends to all tokens of a text, so a text is computed in one pass and has no KV cache. Rows of a
batch are concatenated without padding; attention sees one row at a time. Layers normalize their output
(https://arxiv.org/abs/1810.04805). Token ids from `vocab` on are those of the second text of a pair.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from baton_api.errors import SetupError
from baton_api.workers import Role
from baton_engine.batch import Batch
from baton_engine.kv.cache import KVCache
from baton_engine.model.checkpoint import Checkpoint, read_json
from baton_engine.model.config import token_ids
from baton_engine.model.embedder import Embedder, NoEmbeddings, encoder_embedder
from baton_engine.model.lora import LoraWeights
from baton_engine.model.progress import Progress
from baton_engine.model.safetensors import SafetensorsFolder
from baton_engine.model.tokenizer import Tokenizer, load_tokenizer
from baton_engine.ops import Linear
from baton_engine.ops.plain import PlainLinear
from baton_engine.settings import WorkerSettings
from baton_engine.spec import LIMITS, ModelSpec, checked

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EncoderFormat:
    """The checkpoints of one architecture."""

    prefix: str
    """Prefix of the encoder's tensors in a checkpoint with a head."""
    padded: bool
    """Whether positions begin after the id of the padding token (RoBERTa)."""
    head: tuple[str, ...] = ()
    """Names of the two linear layers of the head over the first token. Empty: an embedder."""


BERT_HEAD = ("bert.pooler.dense", "classifier")
ROBERTA_HEAD = ("classifier.dense", "classifier.out_proj")
ARCHITECTURES = {
    "BertModel": EncoderFormat("bert.", padded=False),
    "RobertaModel": EncoderFormat("roberta.", padded=True),
    "XLMRobertaModel": EncoderFormat("roberta.", padded=True),
    "BertForSequenceClassification": EncoderFormat("bert.", padded=False, head=BERT_HEAD),
    "RobertaForSequenceClassification": EncoderFormat("roberta.", padded=True, head=ROBERTA_HEAD),
    "XLMRobertaForSequenceClassification": EncoderFormat("roberta.", padded=True, head=ROBERTA_HEAD),
}
"""The supported encoders by `architectures` in `config.json`."""

ACTIVATIONS = {
    "gelu": "none",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
}
"""Approximations of GELU by `hidden_act`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    model: ModelSpec
    """The sizes that the engine reads. Its KV sizes are the least possible."""
    format: EncoderFormat
    layers: int
    types: int
    """Number of token types."""
    first_position: int
    approximation: str
    """Of GELU, as torch names it."""
    labels: int
    """Scores of a pair; 0 for an embedder."""
    raw_scores: bool = False
    """Whether scores are logits by the checkpoint's choice, instead of their sigmoid."""

    def with_types(self, tokens: Sequence[int], types: Sequence[int]) -> tuple[int, ...]:
        """Return the prompt of a pair: the tokens, with their types as multiples of the vocabulary."""
        vocab, most = self.model.vocab, self.types - 1
        return tuple(token + vocab * min(kind, most) for token, kind in zip(tokens, types, strict=True))


def encoder_spec(checkpoint: Checkpoint) -> EncoderSpec | None:
    """Read the sizes of an encoder; None for a checkpoint of another kind. Raises SetupError."""
    if checkpoint.is_gguf:
        return None
    path = checkpoint.path / "config.json"
    config = read_json(path)
    name = next(
        (architecture for architecture in config.get("architectures") or () if architecture in ARCHITECTURES),
        None,
    )
    if name is None:
        return None
    try:
        spec = _spec(config, str(name), str(path))
    except KeyError as error:
        raise SetupError(f"{path} lacks {error}.") from error
    except (TypeError, ValueError) as error:
        raise SetupError(f"{path} has a value of the wrong type: {error}") from error
    _reject_unsupported(config, str(path))
    return spec


def _spec(config: Mapping[str, Any], architecture: str, source: str) -> EncoderSpec:
    form = ARCHITECTURES[architecture]
    first = int(config.get("pad_token_id", 1)) + 1 if form.padded else 0
    labels = len(config.get("id2label") or (0, 1)) if form.head else 0
    model = ModelSpec(
        architecture=architecture,
        vocab=int(config["vocab_size"]),
        hidden=int(config["hidden_size"]),
        layers=1,
        heads=int(config["num_attention_heads"]),
        kv_heads=1,
        head_dim=2,
        intermediate=int(config["intermediate_size"]),
        context=int(config["max_position_embeddings"]) - first,
        norm_epsilon=float(config.get("layer_norm_eps", 1e-12)),
        rope_theta=10_000.0,
        tied_embeddings=True,
        headless=True,
        eos_ids=token_ids(config.get("eos_token_id")),
    )
    layers, types = int(config["num_hidden_layers"]), int(config.get("type_vocab_size", 1))
    for name, value, most in (
        ("num_hidden_layers", layers, LIMITS["layers"]),
        ("type_vocab_size", types, 16),
    ):
        if not 1 <= value <= most:
            raise SetupError(f"{source}: {name} is {value}, expected 1 to {most}.")
    if model.hidden % model.heads:
        raise SetupError(f"{source}: {model.heads} heads cannot share {model.hidden} dimensions evenly.")
    return EncoderSpec(
        model=checked(model, source),
        format=form,
        layers=layers,
        types=types,
        first_position=first,
        approximation=ACTIVATIONS.get(str(config.get("hidden_act", "gelu")), ""),
        labels=labels,
        raw_scores="Identity" in str(_activation(config)),
    )


def _activation(config: Mapping[str, Any]) -> object:
    """Return the activation of scores that sentence-transformers stores."""
    nested = config.get("sentence_transformers")
    nested = nested.get("activation_fn") if isinstance(nested, dict) else None
    return nested or config.get("sbert_ce_default_activation_function")


def _reject_unsupported(config: Mapping[str, Any], source: str) -> None:
    activation = config.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise SetupError(
            f"{source}: hidden_act {activation!r} is not supported. Supported: {', '.join(ACTIVATIONS)}."
        )
    positions = config.get("position_embedding_type", "absolute")
    if positions != "absolute":
        raise SetupError(f"{source}: position_embedding_type {positions!r} is not supported, only absolute.")
    for name in ("is_decoder", "add_cross_attention", "quantization_config"):
        if config.get(name):
            raise SetupError(f"{source}: an encoder with {name} is not supported.")


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """One layer. N: hidden, F: intermediate."""

    qkv: Linear
    """[3N, N]: q, k and v stacked."""
    output: Linear
    attention_norm: Norm
    up: Linear
    """[F, N]"""
    down: Linear
    norm: Norm


class Encoder:
    """Implementation of `Model` for prompts that are computed whole, in one pass each."""

    def __init__(self, spec: EncoderSpec, weights: EncoderWeights) -> None:
        self.encoder = spec
        self.spec = replace(spec.model, vocab=spec.model.vocab * spec.types)
        self._words = weights.matrix("embeddings.word_embeddings")
        self._positions = weights.matrix("embeddings.position_embeddings")
        self._types = weights.matrix("embeddings.token_type_embeddings")
        self._norm = weights.norm("embeddings.LayerNorm")
        self._layers = tuple(_layer(weights, f"encoder.layer.{number}.") for number in range(spec.layers))
        self._head = tuple(weights.linear(name, outside=True) for name in spec.format.head)

    @torch.inference_mode()
    def hidden_states(self, batch: Batch, cache: KVCache) -> Tensor:
        """Return the final states [S, N] fp32 of the wanted tokens. `cache` is not used."""
        vocab = self.encoder.model.vocab
        tokens, types = batch.tokens % vocab, batch.tokens // vocab
        positions = self._positions[batch.positions + self.encoder.first_position]
        x = self._normalized(self._words[tokens] + self._types[types] + positions, self._norm)
        spans = list(zip(batch.starts, batch.starts[1:], strict=False))
        for layer in self._layers:
            attended = self._attention(layer.qkv(x), spans)
            x = self._normalized(layer.output(attended) + x, layer.attention_norm)
            up = functional.gelu(layer.up(x), approximate=self.encoder.approximation)
            x = self._normalized(layer.down(up) + x, layer.norm)
        return x[batch.wanted_at].to(torch.float32)

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        return self.project(self.hidden_states(batch, cache))

    def interrupt(self) -> None:
        pass  # a pass computes whole prompts, and batch lines are among them with all others

    def prepare_adapter(self, weights: LoraWeights) -> None:
        raise SetupError(f"{self.spec.architecture} does not support LoRA adapters.")

    @torch.inference_mode()
    def project(self, states: Tensor) -> Tensor:
        """Return the scores [S, labels] fp32 of first tokens' states [S, N]; the states without a head."""
        if not self._head:
            return states
        dense, out = self._head
        return out(torch.tanh(dense(states.to(self._words.dtype)))).to(torch.float32)

    def _normalized(self, x: Tensor, norm: Norm) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, self.spec.norm_epsilon)

    def _attention(self, qkv: Tensor, spans: list[tuple[int, int]]) -> Tensor:
        """Attend within each row. [T, 3N] -> [T, N]."""
        heads = self.spec.heads
        result = torch.empty_like(qkv[:, : self.spec.hidden])
        for start, stop in spans:
            q, k, v = qkv[start:stop].view(stop - start, 3, heads, -1).permute(1, 2, 0, 3)[:, None]
            row = functional.scaled_dot_product_attention(q, k, v)[0]
            result[start:stop] = row.transpose(0, 1).reshape(stop - start, -1)
        return result


def _layer(weights: EncoderWeights, prefix: str) -> EncoderLayer:
    parts = [f"{prefix}attention.self.{part}" for part in ("query", "key", "value")]
    return EncoderLayer(
        qkv=weights.linear(*parts),
        output=weights.linear(f"{prefix}attention.output.dense"),
        attention_norm=weights.norm(f"{prefix}attention.output.LayerNorm"),
        up=weights.linear(f"{prefix}intermediate.dense"),
        down=weights.linear(f"{prefix}output.dense"),
        norm=weights.norm(f"{prefix}output.LayerNorm"),
    )


class EncoderWeights:
    """The tensors of an encoder's checkpoint, converted for one device."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: EncoderSpec,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress,
    ) -> None:
        """Validates all names and shapes. Raises SetupError."""
        self._source = SafetensorsFolder(checkpoint.path)
        self._device, self._dtype, self._progress = device, dtype, progress
        marker = f"{spec.format.prefix}embeddings.word_embeddings.weight"
        self._prefix = spec.format.prefix if marker in self._source.shapes else ""
        shapes = self._shapes(spec)
        for name, shape in shapes.items():
            stored_shape = self._source.shapes.get(name)
            if stored_shape != shape:
                present = "no such tensor" if stored_shape is None else f"shape {list(stored_shape)}"
                raise SetupError(
                    f"{checkpoint.path}: the configuration of {spec.model.architecture} requires the tensor "
                    f"{name} of shape {list(shape)}, but the checkpoint has {present}."
                )
        self.bytes = sum(self._source.stored_bytes(name) for name in shapes)
        progress.start(f"Loading {checkpoint.name}", self.bytes)

    def matrix(self, name: str) -> Tensor:
        return self._read(f"{self._prefix}{name}.weight")

    def norm(self, name: str) -> Norm:
        return Norm(self._read(f"{self._prefix}{name}.weight"), self._read(f"{self._prefix}{name}.bias"))

    def linear(self, *names: str, outside: bool = False) -> Linear:
        """Return linear layers with a bias, stacked. `outside`: `names` are those of the whole checkpoint."""
        prefix = "" if outside else self._prefix
        weights = [self._read(f"{prefix}{name}.weight") for name in names]
        biases = [self._read(f"{prefix}{name}.bias") for name in names]
        return PlainLinear(torch.cat(weights), torch.cat(biases))

    def _read(self, name: str) -> Tensor:
        tensor = self._source.read(name).to(self._device, self._dtype, copy=True)
        self._progress.advance(self._source.stored_bytes(name))
        return tensor

    def _shapes(self, spec: EncoderSpec) -> dict[str, tuple[int, ...]]:
        """Return the tensors that the model needs, with their shapes."""
        n, f, model = spec.model.hidden, spec.model.intermediate, spec.model
        shapes: dict[str, tuple[int, ...]] = {
            "embeddings.word_embeddings.weight": (model.vocab, n),
            "embeddings.position_embeddings.weight": (model.context + spec.first_position, n),
            "embeddings.token_type_embeddings.weight": (spec.types, n),
        }
        linears: dict[str, tuple[int, int]] = {}
        norms = ["embeddings.LayerNorm"]
        for number in range(spec.layers):
            layer = f"encoder.layer.{number}."
            linears |= {f"{layer}attention.self.{part}": (n, n) for part in ("query", "key", "value")}
            linears |= {f"{layer}attention.output.dense": (n, n), f"{layer}intermediate.dense": (f, n)}
            linears[f"{layer}output.dense"] = (n, f)
            norms += [f"{layer}attention.output.LayerNorm", f"{layer}output.LayerNorm"]
        for name, (rows, columns) in linears.items():
            shapes |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
        for name in norms:
            shapes |= {f"{name}.weight": (n,), f"{name}.bias": (n,)}
        named = {f"{self._prefix}{name}": shape for name, shape in shapes.items()}
        for name, rows in zip(spec.format.head, (n, spec.labels), strict=False):
            named |= {f"{name}.weight": (rows, n), f"{name}.bias": (rows,)}
        return named


def load_encoder(
    settings: WorkerSettings,
    checkpoint: Checkpoint,
    encoder: EncoderSpec,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
) -> tuple[ModelSpec, Tokenizer, Embedder | NoEmbeddings, EncoderSpec, Encoder, str, int]:
    """Load an encoder as `worker` needs it: the last two are its digest and its bytes. Raises SetupError."""
    if settings.role is not Role.BOTH:
        raise SetupError(
            f"{checkpoint.name} is an encoder, which generates no text and has no KV cache to transfer. "
            "Start it with `baton serve`."
        )
    if settings.dtype == "auto" and device.type == "cpu":
        dtype = torch.float32  # a vector then depends on no other row of its batch beyond 1e-5
    tokenizer = load_tokenizer(checkpoint, encoder.model)
    embedder = encoder_embedder(checkpoint, settings.pooling, labels=encoder.labels)
    log.info("%s is an encoder: %s, %d scores", checkpoint.name, embedder, encoder.labels)
    weights = EncoderWeights(checkpoint, encoder, device, dtype, progress)
    model = Encoder(encoder, weights)
    progress.done()
    return model.spec, tokenizer, embedder, encoder, model, checkpoint.name, weights.bytes
