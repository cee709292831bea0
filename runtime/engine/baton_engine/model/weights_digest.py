"""The digest and the sizes of loaded weights."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace

import torch
from torch import Tensor

from baton_engine.model.tensor_reader import samples
from baton_engine.model.weights import LayerWeights, Weights, bytes_by_format
from baton_engine.quantized import Format, Matrix, Quantized


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
