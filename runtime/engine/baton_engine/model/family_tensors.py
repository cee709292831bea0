"""The tensors of a safetensors checkpoint under the names, and with the values, that the decoder needs."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from baton_engine.model.cuts import Cut, outputs_in_order
from baton_engine.model.families import BY_ARCHITECTURE
from baton_engine.model.family import NORM
from baton_engine.model.file_reader import LocatedSource, Location
from baton_engine.model.rope import in_order, reordered
from baton_engine.model.tensor_reader import TensorSource
from baton_engine.quantized import Quantized
from baton_engine.spec import ModelSpec

log = logging.getLogger(__name__)

PREFIX = "model."
"""Prefix that tensor names lack in a checkpoint without a head."""


class Prefixed:
    """Tensors of a checkpoint without a head, renamed as in a checkpoint with one."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.name = source.name
        self.shapes = {PREFIX + name: shape for name, shape in source.shapes.items()}

    def stored_bytes(self, tensor: str) -> int:
        return self._source.stored_bytes(tensor.removeprefix(PREFIX))

    def read(self, tensor: str) -> Tensor:
        return self._source.read(tensor.removeprefix(PREFIX))

    def location(self, tensor: str) -> Location | None:
        source = self._source
        return source.location(tensor.removeprefix(PREFIX)) if isinstance(source, LocatedSource) else None

    def format(self, tensor: str) -> str:
        return self._source.format(tensor.removeprefix(PREFIX))

    def read_quantized(self, tensor: str, cut: Cut | None = None) -> Quantized | None:
        return self._source.read_quantized(tensor.removeprefix(PREFIX), cut)


TEXT_PARTS = {
    "language_model.model.": PREFIX,
    "model.language_model.": PREFIX,
    "language_model.lm_head.": "lm_head.",
}
"""Prefixes of the text tensors of a multimodal checkpoint, and those of a checkpoint with text only."""


class FamilyTensors:
    """Tensors of a safetensors checkpoint as the decoder needs them: norms with offset, halves rotated."""

    def __init__(self, source: TensorSource, spec: ModelSpec) -> None:
        self._source = source
        self._spec = spec
        self._family = BY_ARCHITECTURE[spec.architecture]
        self.name = source.name
        self._stored = {name: name for name in source.shapes}
        if self._family.multimodal and any(name.startswith(tuple(TEXT_PARTS)) for name in self._stored):
            self._stored = _text_only(self._stored)
            log.info(
                "%s: only text is served. %d tensors for other inputs are not loaded.",
                self.name,
                len(source.shapes) - len(self._stored),
            )
        self.shapes = {name: source.shapes[stored] for name, stored in self._stored.items()}

    def stored_bytes(self, tensor: str) -> int:
        return self._source.stored_bytes(self._stored[tensor])

    def location(self, tensor: str) -> Location | None:
        base = tensor.rpartition(".")[0]
        computed = (self._family.norm_offset and base.endswith(NORM)) or self._is_reordered(base)
        if computed or not isinstance(self._source, LocatedSource):
            return None
        return self._source.location(self._stored[tensor])

    def format(self, tensor: str) -> str:
        return self._source.format(self._stored[tensor])

    def read_quantized(self, tensor: str, cut: Cut | None = None) -> Quantized | None:
        read, base = partial(self._source.read_quantized, self._stored[tensor]), tensor.rpartition(".")[0]
        if not self._is_reordered(base):
            return read(cut)
        numbers = torch.arange(self.shapes[tensor][0])
        order = in_order(numbers, base, self._spec, self._family.tensors)
        return outputs_in_order(order if cut is None else cut.of(order), read)

    def read(self, tensor: str) -> Tensor:
        values = self._source.read(self._stored[tensor])
        base = tensor.rpartition(".")[0]
        if self._family.norm_offset and base.endswith(NORM):
            return values.to(torch.float32) + self._family.norm_offset
        return (
            in_order(values, base, self._spec, self._family.tensors) if self._is_reordered(base) else values
        )

    def _is_reordered(self, base: str) -> bool:
        """Return whether the decoder has the rows of the weight or bias `base` in another order."""
        return self._family.interleaved and base.endswith(reordered(self._spec, self._family.tensors))


def _text_only(names: Iterable[str]) -> dict[str, str]:
    """Return the stored names of the text tensors, by their names in a checkpoint with text only."""
    chosen = {name: name for name in names if name.startswith("lm_head.")}
    for name in names:
        for prefix, replacement in TEXT_PARTS.items():
            if name.startswith(prefix):
                chosen[replacement + name.removeprefix(prefix)] = name
    return chosen
