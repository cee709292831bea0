"""
Compatibility of the KV blocks of two workers: a digest of everything that determines the bytes of a block.

Two workers compare digests before they exchange other data. The labels of the digest are sent with it, so
that an error can name the differences with both values.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from baton_api.messages import PROTOCOL
from baton_engine.kv.cache import BLOCK_SIZE, FLOAT8_CACHE
from baton_engine.model.quantized import Format, Matrix, Quantized
from baton_engine.model.spec import ModelSpec
from baton_engine.model.tensor_reader import samples
from baton_engine.model.weights import LayerWeights, Weights, bytes_by_format

LAYOUT = "block, layer, key/value, kv head, slot, dim"
"""The order of `KVCache.kv`'s dimensions."""

LATENT_LAYOUT = "block, layer, latent, slot, dim"
"""The order for latent attention, whose blocks have neither keys and values nor heads."""

BYTES_DO_NOT_DEPEND_ON = frozenset(
    {"context", "eos_ids", "bos_id", "tied_embeddings", "headless", "draft_layers"}
)
"""Fields of a spec that do not affect the bytes of blocks."""


@dataclass(frozen=True, slots=True)
class Compatibility:
    """Everything that determines the bytes of a worker's KV blocks."""

    labels: Mapping[str, str]
    """Readable names and values. Equal labels have equal digests."""

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        dtype: torch.dtype,
        weights: str,
        block_size: int = BLOCK_SIZE,
        kv_dtype: torch.dtype | None = None,
    ) -> Compatibility:
        """
        Create it from the model. `weights` is `weights_digest`.

        `dtype` is of weights, and of the KV cache without `kv_dtype`.
        """
        model = {
            field.name.replace("_", " "): str(getattr(spec, field.name))
            for field in fields(spec)
            if field.name not in BYTES_DO_NOT_DEPEND_ON
        }
        kind, kept = (str(each).removeprefix("torch.") for each in (dtype, kv_dtype or dtype))
        return cls(
            {
                "protocol": str(PROTOCOL),
                **model,
                "weights": weights,
                "dtype": kind,
                "kv dtype": "fp8" if kv_dtype == FLOAT8_CACHE else kept,
                "block size": str(block_size),
                "layout": LAYOUT if spec.latent is None else LATENT_LAYOUT,
            }
        )

    @property
    def digest(self) -> str:
        """32 hexadecimal digits, equal on all machines for equal labels."""
        hasher = hashlib.sha256(b"baton-compatibility")
        for name, value in sorted(self.labels.items()):
            for text in (name.encode(), value.encode()):
                hasher.update(len(text).to_bytes(4) + text)
        return hasher.hexdigest()[:32]

    def differences(self, theirs: Mapping[str, str]) -> str:
        """
        Return the differing labels with both values, for an error message.

        >>> Compatibility({"dtype": "float32"}).differences({"dtype": "bfloat16"})
        'dtype is float32 here and bfloat16 there'
        """
        names = dict.fromkeys((*self.labels, *theirs))
        return ", ".join(
            f"{name} is {self.labels.get(name, 'unknown')} here and {theirs.get(name, 'unknown')[:200]} there"
            for name in names
            if self.labels.get(name) != theirs.get(name)
        )


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
        kept = sorted(form for form in self._formats if form in Format.__members__)
        return f"{self._hasher.hexdigest()[:16]}{' with ' if kept else ''}{', '.join(kept)}"

    def _add(self, place: str, matrix: Matrix, counted: bool = True) -> None:
        if counted:
            self._formats += bytes_by_format((matrix,))
        for kind, tensor in _tensors(matrix):
            self._hasher.update(f"{place} {tuple(tensor.shape)} {kind}\n".encode())
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
