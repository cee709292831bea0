"""
Weights of a decoder, built from the named tensors of a checkpoint; q, k and v, and gate and up are fused.

Sources use Hugging Face's tensor names for every file format. All names and shapes are validated before
memory is allocated. A digest of what was loaded distinguishes checkpoints.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Protocol, TypedDict

import torch
from torch import Tensor

from baton_api.errors import SetupError
from baton_api.setting_types import show_size
from baton_engine.model.families import BY_ARCHITECTURE
from baton_engine.model.family import NORM, ModelFamily, TensorNames
from baton_engine.model.family_tensors import Prefixed
from baton_engine.model.file_reader import Scratch
from baton_engine.model.progress import Progress
from baton_engine.model.shards import Shard, ShardTensors
from baton_engine.model.tensor_reader import TensorReader, TensorSource, TensorStream, samples
from baton_engine.quantized import NATIVE_FORMATS, Format, Matrix, Quantized
from baton_engine.spec import ExpertSpec, LatentSpec, ModelSpec, Quantize

log = logging.getLogger(__name__)


def latent_shapes(
    spec: ModelSpec, latent: LatentSpec, names: TensorNames
) -> dict[str, tuple[int, int, bool]]:
    """Return outputs, inputs and whether there is a bias, for each matrix of a layer's attention."""
    n, heads, rotated = spec.hidden, spec.heads, spec.rotated
    queries = heads * (latent.plain + rotated)
    shapes = {
        names.kv_latent: (latent.kv_rank + rotated, n, False),
        names.kv_expand: (heads * (latent.plain + latent.value), latent.kv_rank, False),
        names.output: (n, heads * latent.value, False),
    }
    if not latent.q_rank:
        return shapes | {names.q: (queries, n, False)}
    return shapes | {
        names.q_latent: (latent.q_rank, n, False),
        names.q_expand: (queries, latent.q_rank, False),
    }


def latent_norms(latent: LatentSpec, names: TensorNames) -> dict[str, int]:
    """Return the sizes of the norms of the latents."""
    return {names.kv_latent_norm: latent.kv_rank} | (
        {names.q_latent_norm: latent.q_rank} if latent.q_rank else {}
    )


Shape = tuple[int, int, bool]
"""Outputs, inputs, and whether there is a bias."""


class MLPWeights(TypedDict):
    """Fields of `LayerWeights`."""

    gate_up: Matrix | None
    gate_up_bias: Tensor | None
    down: Matrix | None
    down_bias: Tensor | None
    router: Tensor | None
    router_bias: Tensor | None
    router_correction: Tensor | None
    expert_gate_up: Matrix | None
    expert_gate_up_bias: Tensor | None
    expert_down: Matrix | None
    expert_down_bias: Tensor | None


class PartReader(Protocol):
    def __call__(self, present: bool, kind: str, *parts: str) -> Tensor | None:
        """Return the tensors of `kind` (weight or bias) of one layer, stacked; None if not `present`."""
        ...


def mlp_shapes(spec: ModelSpec, names: TensorNames, layer: int) -> dict[str, Shape]:
    """Return the shape of each matrix of the MLP and of the experts of `layer`."""
    n, experts = spec.hidden, spec.experts_of(layer)
    if experts is None:
        return _gated_shapes(_dense_gates(names), names.down, n, spec.intermediate, spec.mlp_bias)
    shapes = {names.router: (experts.count, n, experts.biased)}
    for expert in range(experts.count):
        gates = [names.expert_gate.format(expert), names.expert_up.format(expert)]
        down = names.expert_down.format(expert)
        shapes |= _gated_shapes(gates, down, n, experts.intermediate, experts.biased)
    if experts.shared:
        gates = [names.shared_gate, names.shared_up]
        shapes |= _gated_shapes(gates, names.shared_down, n, experts.shared, False)
    return shapes


def _gated_shapes(gates: Sequence[str], down: str, n: int, f: int, biased: bool) -> dict[str, Shape]:
    rows = 2 * f // len(gates)
    return {**dict.fromkeys(gates, (rows, n, biased)), down: (n, f, biased)}


def mlp_weights(
    spec: ModelSpec, names: TensorNames, layer: int, read: PartReader, matrix: Callable[..., Matrix]
) -> MLPWeights:
    """Read the MLP and the experts of `layer`."""
    experts = spec.experts_of(layer)
    dense, biased = experts is None, experts is None and spec.mlp_bias
    gates, down = _dense_gates(names), names.down
    if not dense:
        gates, down = [names.shared_gate, names.shared_up], names.shared_down
    has_mlp = experts is None or experts.shared > 0
    gates_of, downs_of = [names.expert_gate, names.expert_up], [names.expert_down]
    return {
        "gate_up": matrix(*gates) if has_mlp else None,
        "gate_up_bias": read(biased, "bias", *gates),
        "down": matrix(down) if has_mlp else None,
        "down_bias": read(biased, "bias", down),
        "router": read(not dense, "weight", names.router),
        "router_bias": read(experts is not None and experts.biased, "bias", names.router),
        "router_correction": read(experts is not None and experts.corrected, "bias", names.router_correction),
        "expert_gate_up": _weights_of(experts, gates_of, matrix),
        "expert_gate_up_bias": _biases_of(experts, gates_of, read),
        "expert_down": _weights_of(experts, downs_of, matrix),
        "expert_down_bias": _biases_of(experts, downs_of, read),
    }


def _weights_of(
    experts: ExpertSpec | None, parts: Sequence[str], matrix: Callable[..., Matrix]
) -> Matrix | None:
    if experts is None:
        return None
    stacked = matrix(*_of_each(experts, parts))
    return stacked.view(experts.count, -1, stacked.shape[1]) if isinstance(stacked, Tensor) else stacked


def _biases_of(experts: ExpertSpec | None, parts: Sequence[str], read: PartReader) -> Tensor | None:
    if experts is None:
        return None
    biases = read(experts.biased, "bias", *_of_each(experts, parts))
    return None if biases is None else biases.view(experts.count, -1)


def _of_each(experts: ExpertSpec, parts: Sequence[str]) -> list[str]:
    return [part.format(expert) for expert in range(experts.count) for part in parts]


def _dense_gates(names: TensorNames) -> list[str]:
    return [names.gate_up] if names.gate_up else [names.gate, names.up]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """
    Weights of one layer.

    N: hidden, H and K: query and key heads, D: head size, F: intermediate, E: experts, G: their intermediate.
    """

    attention_norm: Tensor | None
    """[N]; None without `ModelSpec.pre_norm`."""
    qkv: Matrix
    """[(H + 2K) * D, N]: q, k and v stacked."""
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    """[D], or [H * D] with `ModelSpec.qk_norm_joint`; None without `ModelSpec.qk_norm`."""
    k_norm: Tensor | None
    output: Matrix
    """[N, H * D]"""
    output_bias: Tensor | None
    attention_post_norm: Tensor | None = None
    """[N]; None without `ModelSpec.post_norm`."""
    mlp_norm: Tensor | None
    """[N]; None without `ModelSpec.pre_norm`."""
    gate_up: Matrix | None
    """[2F, N]: gate and up stacked. None if the layer has experts only."""
    gate_up_bias: Tensor | None
    down: Matrix | None
    """[N, F]"""
    down_bias: Tensor | None
    router: Tensor | None = None
    """[E, N]. None if the layer has no experts."""
    router_bias: Tensor | None = None
    router_correction: Tensor | None = None
    """[E]: added to the scores that choose experts, but not to their weights."""
    expert_gate_up: Matrix | None = None
    """[E, 2G, N]: gate and up of each expert stacked. Quantized: [E * 2G, N]."""
    expert_gate_up_bias: Tensor | None = None
    expert_down: Matrix | None = None
    """[E, N, G]. Quantized: [E * N, G]."""
    expert_down_bias: Tensor | None = None
    latent_q: Matrix | None = None
    """[H * (plain + rotated), q_rank]: expands the latent of queries. With latent attention, `qkv` has rows
    of the query (or its latent), the latent of keys and values, and the rotated part of the key. `q_norm` and
    `k_norm` are of the latents, and `output` is [N, H * value]."""
    latent_kv: Tensor | None = None
    """[H * (plain + value), kv_rank]: expands the latent of keys and values. It is not quantized: products by
    head read it."""
    sinks: Tensor | None = None
    """[H]; None without `ModelSpec.sinks`."""
    mlp_post_norm: Tensor | None = None
    """[N]; None without `ModelSpec.post_norm`."""

    @property
    def formats(self) -> Counter[str]:
        """Size in bytes by format."""
        return bytes_by_format(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWeights:
    """Weights of a draft head. N: its hidden size, V: its tokens."""

    joint: Matrix
    """mtp: [N, 2N], of an embedding and a state. eagle3: [N, I times that of the model], of I inputs."""
    input_norms: Sequence[Tensor] = ()
    """eagle3: those of `HeadSpec.input_norm`."""
    embedding_norm: Tensor
    """[N]"""
    state_norm: Tensor
    """[N]"""
    layer: LayerWeights
    """eagle3: `qkv` is of an embedding and a state, and there is no `attention_norm`."""
    norm: Tensor
    """[N]"""
    embedding: Tensor | None = None
    """None: that of the model."""
    head: Tensor | None = None
    """[V, N]; None: that of the model."""
    tokens: Tensor | None = None
    """[V] int64, the model's tokens; None: they are equal."""

    def named(self) -> Iterator[tuple[str, Matrix]]:
        """Yield all tensors with their names."""
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, LayerWeights):
                for inner in fields(value):
                    if (tensor := getattr(value, inner.name)) is not None:
                        yield f"head.layer.{inner.name}", tensor
            elif part.name == "input_norms":
                yield from ((f"head.{part.name}.{number}", norm) for number, norm in enumerate(value))
            elif value is not None:
                yield f"head.{part.name}", value


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    embedding: Matrix
    """[V, N]"""
    layers: Iterable[LayerWeights]
    """Those that `build` reads one by one can be iterated once."""
    final_norm: Tensor
    """[N]"""
    head: Matrix
    """[V, N]; the same tensor as `embedding` if they are tied."""
    draft_head: HeadWeights | None = None
    """Those of `ModelSpec.draft_head`."""
    least_bytes: int = 0
    """Size in bytes at least, which is known before the layers are read; 0 means unknown."""

    @property
    def bytes(self) -> int:
        """Size in bytes; a shared tensor counts once."""
        return sum(self.formats.values())

    @property
    def formats(self) -> Counter[str]:
        """Size in bytes by format, such as bfloat16 or Q8_0; a shared tensor counts once."""
        summary = bytes_by_format((self.embedding, self.final_norm))
        if self.head is not self.embedding:
            summary += bytes_by_format((self.head,))
        for layer in self.layers:
            summary += layer.formats
        if self.draft_head is not None:
            summary += bytes_by_format(tensor for _, tensor in self.draft_head.named())
        return summary


def bytes_by_format(matrices: Iterable[Matrix | None]) -> Counter[str]:
    """Return the size in bytes by format, such as bfloat16 or Q8_0."""
    sizes: Counter[str] = Counter()
    for matrix in matrices:
        if isinstance(matrix, Quantized):
            for part in matrix.parts:
                sizes[part.format.name] += part.rows.nbytes
        elif matrix is not None:
            sizes[str(matrix.dtype).removeprefix("torch.")] += matrix.nbytes
    return sizes


def show_formats(sizes: Counter[str]) -> str:
    """Return the sizes of formats as text, the largest first: 4.1 GiB in FP8, 1.0 GiB in bfloat16."""
    return ", ".join(f"{show_size(size)} in {form}" for form, size in sizes.most_common())


EMBEDDING_NORM, STATE_NORM, HEAD_NORM, JOINT = "enorm", "hnorm", "shared_head.norm", "eh_proj"
"""Tensors of an MTP layer beside those of other layers. Copies of embedding and head are not read."""

NAMED_AT_MOST = 5
"""Maximum number of tensors that an error lists by name."""


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of all tensors of a checkpoint of `spec`."""
    names = BY_ARCHITECTURE[spec.architecture].tensors
    n, d = spec.hidden, spec.head_dim
    q, k = spec.heads * d, spec.kv_heads * d
    shapes: dict[str, tuple[int, ...]] = {
        f"{names.embedding}.weight": (spec.vocab, n),
        f"{names.final_norm}.weight": (n,),
    }
    if not spec.tied_embeddings:
        shapes[f"{names.head}.weight"] = (spec.vocab, n)
    projections = {names.q: q, names.k: k, names.v: k} if not names.qkv else {names.qkv: q + 2 * k}
    matrices = {
        **{name: (rows, n, spec.qkv_bias) for name, rows in projections.items()},
        names.output: (n, q, spec.output_bias),
    }
    norms = {names.attention_norm: n, names.mlp_norm: n} if spec.pre_norm else {}
    if spec.latent is not None:
        matrices, norms = latent_shapes(spec, spec.latent, names), norms | latent_norms(spec.latent, names)
    if spec.sinks:
        norms |= {names.sinks: spec.heads}
    if spec.post_norm:
        norms |= {names.attention_post_norm: n, names.mlp_post_norm: n}
    if spec.qk_norm:
        norms |= (
            {names.q_norm: q, names.k_norm: k} if spec.qk_norm_joint else {names.q_norm: d, names.k_norm: d}
        )
    layers = [(spec, number, names.layer.format(number)) for number in range(spec.layers)]
    if (head := spec.draft_head) is not None and head.kind == "mtp":
        layer = names.layer.format(spec.layers)
        layers.append((head.layer, 0, layer))
        shapes |= {f"{layer}{name}.weight": (n,) for name in (EMBEDDING_NORM, STATE_NORM, HEAD_NORM)}
        shapes[f"{layer}{JOINT}.weight"] = (n, 2 * n)
    for each, number, layer in layers:
        shapes |= {f"{layer}{name}.weight": (size,) for name, size in norms.items()}
        for name, (rows, columns, biased) in (matrices | mlp_shapes(each, names, number)).items():
            shapes[f"{layer}{name}.weight"] = (rows, columns)
            if biased:
                shapes[f"{layer}{name}.bias"] = (rows,)
        if (experts := each.experts_of(number)) is not None and experts.corrected:
            shapes[f"{layer}{names.router_correction}.bias"] = (experts.count,)
    return shapes


def check(source: TensorSource, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the expected shapes. Raises SetupError if the source's tensors differ."""
    wanted, present = expected_shapes(spec), source.shapes
    if missing := [name for name in wanted if name not in present]:
        of_head = BY_ARCHITECTURE[spec.architecture].tensors.layer.format(spec.layers)
        if missing == [name for name in wanted if name.startswith(of_head)]:
            raise SetupError(
                f"{source.name} has no tensors of its MTP layer, although config.json declares one. Use "
                "--speculation ngram or off."
            )
        raise SetupError(
            f"{source.name}: {_listed(missing)} missing, of {len(wanted)} tensors that "
            f"{spec.architecture} with {spec.layers} layers requires. Download the checkpoint again."
        )
    if extra := [name for name in present if name not in wanted and not _is_harmless(name, spec)]:
        raise SetupError(
            f"{source.name}: {_listed(extra)} not part of {spec.architecture} with this configuration. The "
            "results would be wrong. Use a checkpoint of this architecture."
        )
    for name, shape in wanted.items():
        if present[name] != shape:
            raise SetupError(
                f"{source.name}: tensor {name} has shape {list(present[name])}, "
                f"but the configuration requires {list(shape)}."
            )
    return wanted


def build(
    source: TensorSource,
    spec: ModelSpec,
    dtype: torch.dtype,
    progress: Progress,
    choice: Quantize = "off",
    shard: Shard | None = None,
    sampled: bool = False,
    formats: Collection[Format] = NATIVE_FORMATS,
    device: torch.device | None = None,
    streamed: bool = False,
    lazy: bool = False,
) -> Weights:
    """
    Build all weights in `dtype`, reading each tensor once. Raises SetupError.

    `lazy`: each layer is read when the iteration reaches it. A model that copies it then needs memory for one
    more layer. `streamed`: also to memory that the next layer uses again, so it is invalid from then on.

    Norms are fp32 in families that add an offset to them: bfloat16 would round the sum. `choice` applies to
    matrices: keep those of the checkpoint's formats that are in `formats`, or also convert the other ones to
    a quantized format. With `shard`, only that part is read. `sampled`: read only what the digest needs,
    without `shard`. With `device`, each tensor is stored (and converted) there before the next one is
    read, except for those that are quantized in the checkpoint.
    """
    source = Prefixed(source) if spec.headless else source
    family = BY_ARCHITECTURE[spec.architecture]
    names = family.tensors
    shapes = check(source, spec)
    progress.start(f"Loading {source.name}", sum(source.stored_bytes(name) for name in shapes))
    if shard is not None:
        source = ShardTensors(source, spec, shard)
        shapes = {name: source.shapes[name] for name in shapes}

    dtype_of = partial(_dtype_of, family=family, dtype=dtype)
    reader = TensorReader(
        source, shapes, dtype_of, progress, choice, formats, sampled, device, divided=shard is not None
    )
    embedding = reader.matrix([f"{names.embedding}.weight"])
    layers = _streamed(spec, names, reader) if streamed else _one_by_one(spec, names, reader)
    weights = Weights(
        embedding=embedding,
        layers=layers,
        final_norm=reader.stacked([f"{names.final_norm}.weight"]),
        head=embedding if spec.tied_embeddings else reader.matrix([f"{names.head}.weight"]),
        draft_head=_mtp(spec, names, reader),
        least_bytes=sum(map(reader.least_bytes, shapes)),
    )
    return weights if streamed or lazy else replace(weights, layers=tuple(layers))


def _one_by_one(spec: ModelSpec, names: TensorNames, reader: TensorReader) -> Iterator[LayerWeights]:
    """Read layer by layer, after all other tensors."""
    for number in range(spec.layers):
        yield _layer(spec, names, number, reader)
    reader.progress.done()
    if not reader.sampled:
        reader.report()


def _streamed(spec: ModelSpec, names: TensorNames, reader: TensorReader) -> Iterator[LayerWeights]:
    """Read layer by layer to the same memory."""
    prefix, _, end = names.layer.partition("{}")
    of_layers: dict[int, list[str]] = {number: [] for number in range(spec.layers)}
    for name in reader.shapes:
        if name.startswith(prefix) and (number := name.removeprefix(prefix).partition(end)[0]).isdecimal():
            of_layers[int(number)].append(name)
    scratch = Scratch(max(sum(map(reader.most_bytes, of_layer)) for of_layer in of_layers.values()))
    stream = TensorStream(reader.source, itertools.chain.from_iterable(of_layers.values()), scratch)
    try:
        for layer in range(spec.layers):
            scratch.begin()
            yield _layer(spec, names, layer, replace(reader, stream=stream))
    finally:
        stream.close()
    reader.progress.done()
    reader.report()


def _mtp(spec: ModelSpec, names: TensorNames, reader: TensorReader) -> HeadWeights | None:
    """Build the head that is the first layer after those of the model, if it is used."""
    head, layer = spec.draft_head, names.layer.format(spec.layers)
    if head is None or head.kind != "mtp":
        return None

    def norm(name: str) -> Tensor:
        return reader.stacked([f"{layer}{name}.weight"])

    return HeadWeights(
        joint=reader.matrix([f"{layer}{JOINT}.weight"]),
        embedding_norm=norm(EMBEDDING_NORM),
        state_norm=norm(STATE_NORM),
        layer=_layer(head.layer, names, 0, reader, layer),
        norm=norm(HEAD_NORM),
    )


def _layer(
    spec: ModelSpec, names: TensorNames, number: int, reader: TensorReader, prefix: str = ""
) -> LayerWeights:
    """Build the weights of one layer, whose tensors have `prefix` if it is not that of its number."""
    prefix = prefix or names.layer.format(number)
    qkv: tuple[str, ...] = (names.qkv,) if names.qkv else (names.q, names.k, names.v)
    latent = spec.latent
    q_norm, k_norm = names.q_norm, names.k_norm
    if latent is not None:
        qkv = (names.q_latent if latent.q_rank else names.q, names.kv_latent)
        q_norm, k_norm = names.q_latent_norm, names.kv_latent_norm

    def read(present: bool, kind: str, *parts: str) -> Tensor | None:
        return reader.stacked([f"{prefix}{part}.{kind}" for part in parts]) if present else None

    def norm(present: bool, part: str) -> Tensor | None:
        return reader.stacked([f"{prefix}{part}.weight"]) if present else None

    def matrix(*parts: str, paired: bool = False) -> Matrix:
        return reader.matrix([f"{prefix}{part}.weight" for part in parts], paired)

    def bias(present: bool, *parts: str) -> Tensor | None:
        return reader.stacked([f"{prefix}{part}.bias" for part in parts]) if present else None

    return LayerWeights(
        attention_norm=norm(spec.pre_norm, names.attention_norm),
        qkv=matrix(*qkv),
        qkv_bias=bias(spec.qkv_bias, *qkv),
        q_norm=norm(spec.qk_norm if latent is None else latent.q_rank > 0, q_norm),
        k_norm=norm(spec.qk_norm or latent is not None, k_norm),
        latent_q=matrix(names.q_expand) if latent is not None and latent.q_rank else None,
        latent_kv=norm(latent is not None, names.kv_expand),
        output=matrix(names.output),
        output_bias=bias(spec.output_bias, names.output),
        attention_post_norm=norm(spec.post_norm, names.attention_post_norm),
        mlp_norm=norm(spec.pre_norm, names.mlp_norm),
        mlp_post_norm=norm(spec.post_norm, names.mlp_post_norm),
        sinks=norm(spec.sinks, names.sinks),
        **mlp_weights(spec, names, number, read, partial(matrix, paired=True)),
    )


def rounded(factor: float, dtype: torch.dtype) -> float:
    """Return `factor` rounded to `dtype`, as transformers rounds the factor of embeddings."""
    return float(torch.tensor(factor, dtype=dtype))


def _dtype_of(name: str, *, family: ModelFamily, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the tensor is kept: fp32 if rounding to `dtype` would change the results."""
    base, names = name.rpartition(".")[0], family.tensors
    exact = (family.norm_offset and base.endswith(NORM)) or base.endswith(names.router_correction)
    return torch.float32 if exact else dtype


def _is_harmless(name: str, spec: ModelSpec) -> bool:
    """Return whether `name` is redundant: rotary frequencies, a copy of a tied head, a draft layer."""
    names = BY_ARCHITECTURE[spec.architecture].tensors
    drafts = [names.layer.format(spec.layers + number) for number in range(spec.draft_layers)]
    return (
        name.startswith(tuple(drafts))
        or name.endswith("rotary_emb.inv_freq")
        or (name == f"{names.head}.weight" and spec.tied_embeddings)
    )


def _listed(names: Sequence[str]) -> str:
    named = ", ".join(names[:NAMED_AT_MOST])
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return f"tensor{'s' if len(names) > 1 else ''} {named}{more} {'are' if len(names) > 1 else 'is'}"


def weights_digest(weights: Weights) -> str:
    """
    Return a fast digest of `weights`: names, shapes, types and some bytes of each tensor.

    It distinguishes checkpoints, but does not prove that all bytes are equal. Call it before an `Ops` changes
    the layout of the weights. Formats that are kept follow it, for the error that names a difference.
    """
    summary = WeightsSummary(weights)
    for _ in summary.weights.layers:
        pass
    return summary.digest


class WeightsSummary:
    """The digest and the sizes of weights, whose layers are read one by one."""

    def __init__(self, weights: Weights) -> None:
        self._hasher = hashlib.sha256(b"baton-weights")
        self._formats: Counter[str] = Counter()
        self._head, self._final_norm = weights.head, weights.final_norm
        self._tied = weights.head is weights.embedding
        self._add("embedding", weights.embedding)
        for name, tensor in () if weights.draft_head is None else weights.draft_head.named():
            self._add(name, tensor)
        self.weights = replace(weights, layers=self._seen(weights.layers))
        """The same weights. The summary is complete after one iteration over their layers."""

    def _seen(self, layers: Iterable[LayerWeights]) -> Iterator[LayerWeights]:
        for number, layer in enumerate(layers):
            for field in fields(layer):
                if (tensor := getattr(layer, field.name)) is not None:
                    self._add(f"{number}.{field.name}", tensor)
            yield layer
        self._add("final_norm", self._final_norm)
        self._add("head", self._head, counted=not self._tied)

    @property
    def formats(self) -> Counter[str]:
        """As `Weights.formats`."""
        return self._formats

    @property
    def digest(self) -> str:
        """As `weights_digest`."""
        formats = sorted(form for form in self._formats if form in Format.__members__)
        return f"{self._hasher.hexdigest()[:16]}{' with ' if formats else ''}{', '.join(formats)}"

    def _add(self, name: str, matrix: Matrix, counted: bool = True) -> None:
        if counted:
            self._formats += bytes_by_format((matrix,))
        for kind, tensor in _tensors(matrix):
            self._hasher.update(f"{name} {tuple(tensor.shape)} {kind}\n".encode())
            flat = tensor.detach().reshape(-1)
            for sample in samples(flat.numel(), tensor.dtype.itemsize):
                piece = flat[sample.start : sample.stop].cpu().contiguous()
                self._hasher.update(piece.view(torch.uint8).numpy().tobytes())


def _tensors(matrix: Matrix) -> Iterator[tuple[str, Tensor]]:
    """Yield format and bytes of each tensor. A kept format computes otherwise than an expanded one."""
    if isinstance(matrix, Quantized):
        yield from ((part.format.name, part.rows) for part in matrix.parts)
    else:
        yield str(matrix.dtype), matrix
