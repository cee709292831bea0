"""
The decoder in C: one native call computes all layers of a forward pass.

On a CPU, a step of a small model takes a few milliseconds. torch's operator calls and thread hand-overs
double that time, and torch has no attention over KV blocks. `baton_engine.ops.native` therefore computes
whole passes of decode rows and prefill chunks. It releases the interpreter lock. The weights are packed and
stored once; tied embeddings are read from the packed head. Each row of a pass has its own LoRA adapter, or
none (`lora.h`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from baton_api.errors import SetupError
from baton_api.setting_types import show_size
from baton_engine import machine
from baton_engine.batch import Batch, PassInterrupted
from baton_engine.kv.cache import KVCache
from baton_engine.lending import Cores, Seat
from baton_engine.model.lora import FUSED, LoraWeights, low_rank_linears, projection_shapes
from baton_engine.model.native_weights import WeightLoader
from baton_engine.model.rope import Rotary
from baton_engine.model.stored_weights import (
    HEADER_BYTES,
    PIECE_BYTES,
    Damaged,
    Header,
    StoredWeights,
    WeightsFile,
)
from baton_engine.model.weights import Weights, rounded
from baton_engine.ops.native import library, support
from baton_engine.ops.native.products import CLASSES, ONE_ORDER, Products, products_of
from baton_engine.ops.native.support import KINDS, open_library, supports
from baton_engine.spec import ModelSpec

log = logging.getLogger(__name__)

LANES = 16
"""Values per vector of the kernels. Rows of states are padded with zeros to a multiple."""
FIRST_POSITIONS = 1024
"""Initial number of positions in the rotary tables, which grow with longer contexts."""
PROBED_BYTES = 64 * 1024 * 1024
"""Bytes of stored weights that are mapped to find out whether the system maps files in huge pages."""
ROTATIONS = ("none", "full", "sliding")
"""Values of `ModelSpec.rotation`, by their number in the kernels."""


class _Spec(ctypes.Structure):
    """`struct spec` of decoder.c."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                "kind", "threads", "vocab", "hidden", "layers", "heads", "kv_heads", "head_dim",
                "intermediate", "tied", "nodes", "rotated", "gelu", "joint_norm", "post_norm",
                "experts", "chosen", "expert_intermediate", "expert_layers", "sigmoid", "normalized",
                "spare", "seats", "seat_count", "seat",
            )
        ),
        ("ways", ctypes.c_int64 * (2 * len(CLASSES))),
        *(
            (name, ctypes.c_double)
            for name in (
                "epsilon", "embedding_scale", "residual_scale", "logit_scale", "logit_cap", "score_scale",
                "score_cap", "expert_scale", "rest",
            )
        ),
    )  # fmt: skip


class _Pass(ctypes.Structure):
    """`struct pass` of decoder.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "rows", "wanted")),
        *((name, ctypes.c_void_p) for name in ("ids", "positions", "slots", "starts", "blocks")),
        ("width", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("wanted_at", "cosines", "sines")),
        *((name, ctypes.c_void_p) for name in ("sliding_cosines", "sliding_sines", "cache")),
        *((name, ctypes.c_int64) for name in ("cache_slots", "block_size")),
        *((name, ctypes.c_void_p) for name in ("logits", "states")),
        ("states_stride", ctypes.c_int64),
        ("adapters", ctypes.c_void_p),
    )


class NativeDecoder:
    """Implementation of `Model` in C. Runs one pass at a time. Rows of a pass are independent."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights | StoredWeights,
        dtype: torch.dtype,
        kernel_library: ctypes.CDLL,
        cores: Cores,
        products: Products,
    ) -> None:
        """
        Copy the weights, so that the caller can release its own, or use those of a file.

        Raises MemoryError, SetupError if the machine is too small for them, and Damaged for a file.
        """
        if isinstance(weights, Weights):
            check_memory(weights.least_bytes, machine.total_memory())
        self.spec = spec
        self.dtype = dtype
        self.exact_rows = dtype != torch.bfloat16 or products.exact_rows
        """Whether a token has the same bits in a row of several tokens as alone, and in any batch."""
        self.sums = products.sums if dtype == torch.bfloat16 else ONE_ORDER
        """How products sum: see `Compatibility`."""
        self._rotary = Rotary.of_layers(spec, torch.device("cpu"))
        self._rotations: dict[str, tuple[Tensor, Tensor]] = {}
        self._positions = 0
        self._turn_to(FIRST_POSITIONS // 2)
        self._kernels = kernel_library
        self._cores = cores
        handle = kernel_library.baton_create(
            ctypes.byref(_sizes(spec, dtype, _tied(weights), cores, products))
        )
        if not handle:
            raise MemoryError("no memory for the packed weights")
        self._handle = ctypes.c_void_p(handle)
        freed = weakref.finalize(self, kernel_library.baton_destroy, self._handle)
        freed.atexit = False  # the thread that writes packed weights reads them as long as the process lives
        for number in range(spec.layers):
            window, rotation = spec.window(number) or 0, ROTATIONS.index(spec.rotation(number))
            kernel_library.baton_set_attention(
                self._handle, ctypes.c_int64(number), ctypes.c_int64(window), ctypes.c_int64(rotation)
            )
        loader = WeightLoader(kernel_library, self._handle, dtype)
        self.mapped_bytes = 0
        if isinstance(weights, StoredWeights):
            self.mapped_bytes = self._use(weights, loader)
        else:
            loader.load(weights)
        self._loads = tuple(loader.loads)

    def _use(self, stored: StoredWeights, loader: WeightLoader) -> int:
        """Use the weights of a file. Returns the size of the memory that is shared. Raises Damaged."""
        header = stored.header
        if not loader.reserve(header.loads, self.spec) or self.bytes != header.size:
            raise Damaged("it does not fit the model's sizes")
        # The kernel interleaves anonymous memory over nodes, and the pages of files it does not.
        nodes, probed = machine.memory_nodes(), min(header.size, PROBED_BYTES)
        mapped = (
            not nodes & (nodes - 1)
            and self._use_file(stored, probed, mapped=True) is not None
            and machine.in_huge_pages(self._kernels.baton_arena(self._handle), probed)
        )
        sums = self._use_file(stored, header.size, mapped=mapped)
        if sums is None:
            raise Damaged("it cannot be read")
        if sums != header.sums:
            raise Damaged("its checksums differ")
        return header.size if mapped else 0

    def _use_file(self, stored: StoredWeights, size: int, *, mapped: bool) -> tuple[int, ...] | None:
        """Use the first `size` bytes of the file's weights. Returns their checksums. None: an error."""
        sums = (ctypes.c_uint64 * -(-size // PIECE_BYTES))()
        read = self._kernels.baton_use_file(
            self._handle,
            ctypes.c_int(stored.file),
            ctypes.c_int64(HEADER_BYTES),
            ctypes.c_int64(size),
            ctypes.c_int64(mapped),
            ctypes.byref(sums),
        )
        return tuple(sums) if read else None

    def store(self, file: WeightsFile, digest: str, loaded_bytes: int) -> None:
        """Write the packed weights to a file, while the model may compute. Raises OSError."""
        header = Header(self._loads, self.bytes, (), digest, loaded_bytes)
        file.write(self._kernels.baton_arena(self._handle), header, self._kernels)

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        logits = torch.empty((len(batch.wanted_at), self.spec.vocab), dtype=torch.float32)
        self._pass(batch, cache, logits=logits.data_ptr())
        return logits

    def hidden_states(self, batch: Batch, cache: KVCache) -> Tensor:
        states = self._rows(len(batch.wanted_at))
        self._pass(batch, cache, states=states.data_ptr(), states_stride=states.shape[1])
        return states[:, : self.spec.hidden]

    def project(self, states: Tensor) -> Tensor:
        logits = torch.empty((len(states), self.spec.vocab), dtype=torch.float32)
        if not len(states):
            return logits
        rows = self._rows(len(states))
        rows[:, : self.spec.hidden] = states
        task = _Pass(
            wanted=len(rows),
            logits=logits.data_ptr(),
            states=rows.data_ptr(),
            states_stride=rows.shape[1],
        )
        if self._kernels.baton_project(self._handle, ctypes.byref(task)):
            raise MemoryError(f"no memory for the activations of {len(rows)} tokens")
        return logits

    def interrupt(self) -> None:
        self._kernels.baton_interrupt(self._handle)

    def prepare_adapter(self, weights: LoraWeights) -> NativeAdapter:
        return NativeAdapter(self.spec, weights, self.dtype, self._kernels, self._handle)

    def _rows(self, count: int) -> Tensor:
        return torch.zeros((count, -(-self.spec.hidden // LANES) * LANES), dtype=torch.float32)

    def _pass(self, batch: Batch, cache: KVCache, **results: int) -> None:
        if cache.kv.dtype != self.dtype:
            raise TypeError(f"the cache holds {cache.kv.dtype}, the model computes in {self.dtype}")
        self._turn_to(max(batch.contexts))
        blocks, slots = batch.block_table, batch.slots
        full, sliding = self._rotations["full"], self._rotations.get("sliding")
        starts = (ctypes.c_int64 * len(batch.starts))(*batch.starts)
        adapters = adapter_pointers([row.adapter for row in batch.rows])
        task = _Pass(
            tokens=batch.size,
            rows=len(batch.rows),
            wanted=len(batch.wanted_at),
            ids=batch.tokens.data_ptr(),
            positions=batch.positions.data_ptr(),
            slots=slots.data_ptr(),
            starts=ctypes.addressof(starts),
            blocks=blocks.data_ptr(),
            width=blocks.shape[1],
            wanted_at=batch.wanted_at.data_ptr(),
            cosines=full[0].data_ptr(),
            sines=full[1].data_ptr(),
            sliding_cosines=sliding[0].data_ptr() if sliding else None,
            sliding_sines=sliding[1].data_ptr() if sliding else None,
            cache=cache.kv.data_ptr(),
            cache_slots=cache.blocks * cache.block_size,
            block_size=cache.block_size,
            adapters=None if adapters is None else ctypes.addressof(adapters),
            **results,
        )
        match self._kernels.baton_forward(self._handle, ctypes.byref(task)):
            case 0:
                return
            case 1:
                raise MemoryError(f"no memory for the activations of {batch.size} tokens")
            case 3:
                raise PassInterrupted
            case _:
                raise IndexError(f"a token id is not below {self.spec.vocab}, or a slot not in the cache")

    def _turn_to(self, positions: int) -> None:
        """
        Extend the rotary tables to `positions`.

        The tables are cached between passes, because a parallel torch operation leaves OpenMP threads
        spinning for milliseconds on the cores that the pass needs.
        """
        if positions > self._positions:
            self._positions = 2 * positions
            table = torch.arange(self._positions)
            self._rotations = {kind: rotary.at(table) for kind, rotary in self._rotary.items()}

    @property
    def bytes(self) -> int:
        """Size of the packed weights in bytes, a multiple of 64."""
        size: int = self._kernels.baton_bytes(self._handle)
        return size


def check_memory(needed: int, total: int | None) -> None:
    """Raise SetupError if weights of at least `needed` bytes cannot fit in `total` bytes; None: unknown."""
    if total is not None and needed > total:
        raise SetupError(
            f"The weights need {show_size(needed)}, but the machine has {show_size(total)} of memory and "
            "swap. Use --quantize q4_0, a checkpoint with quantized weights, or a smaller model."
        )


def _tied(weights: Weights | StoredWeights) -> bool:
    if isinstance(weights, StoredWeights):
        return all(load.name != "embedding" for load in weights.header.loads)
    return weights.head is weights.embedding


def _sizes(spec: ModelSpec, dtype: torch.dtype, tied: bool, cores: Cores, products: Products) -> _Spec:
    return _Spec(
        kind=KINDS[dtype],
        vocab=spec.vocab,
        hidden=spec.hidden,
        layers=spec.layers,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        intermediate=spec.intermediate,
        tied=tied,
        nodes=machine.memory_nodes(),
        rotated=spec.rotated,
        gelu=spec.activation == "gelu_tanh",
        joint_norm=spec.qk_norm_joint,
        post_norm=spec.post_norm,
        epsilon=spec.norm_epsilon,
        embedding_scale=rounded(spec.embedding_scale, dtype),
        residual_scale=spec.residual_scale,
        logit_scale=spec.logit_scale,
        logit_cap=spec.logit_cap or 0,
        score_scale=spec.score_scale,
        score_cap=spec.attention_cap or 0,
        ways=(ctypes.c_int64 * (2 * len(CLASSES)))(*products.numbers),
        **support.expert_sizes(spec),
        **cores.sizes(),
    )


def native_decoder(
    spec: ModelSpec,
    weights: Weights | StoredWeights,
    dtype: torch.dtype,
    environment: Mapping[str, str] = os.environ,
    threads: int = 0,
    seat: Seat | None = None,
) -> NativeDecoder | None:
    """
    Create the native model, or return None if kernels are unavailable. 0 threads: torch's number.

    Raises Damaged if the file of stored weights is, and SetupError if BATON_PRODUCTS is no way of products or
    if the machine is too small for the weights.
    """
    if not supports(spec, dtype):
        return None
    try:
        kernel_library = open_library(environment)
    except library.Unavailable as reason:
        log.warning("native kernels are unavailable, using slower torch operations: %s", reason)
        return None
    cores = Cores(threads or torch.get_num_threads(), seat)
    return NativeDecoder(
        spec, weights, dtype, kernel_library, cores, products_of(kernel_library, environment)
    )


MOST_PARTS = 3


class _Part(ctypes.Structure):
    """`struct low_rank_part` of lora.h."""

    _fields_ = (
        ("b", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("start", "outputs", "first_rank", "rank")),
    )


class _Source(ctypes.Structure):
    """`struct low_rank_source` of lora.h."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rank", "inputs", "outputs", "parts")),
        ("part", _Part * MOST_PARTS),
    )


class NativeAdapter:
    """A packed adapter. Its memory is freed with the last reference."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: LoraWeights,
        dtype: torch.dtype,
        kernel_library: ctypes.CDLL,
        model: ctypes.c_void_p,
    ) -> None:
        """`model` is the handle of the decoder. Raises MemoryError."""
        sizes = {part: size for _, part, _, size in projection_shapes(spec).values()}
        outputs = [
            sizes[linear] if linear in sizes else sum(sizes[part] for part in parts)
            for linear, parts in FUSED.items()
        ]
        sources = (_Source * (spec.layers * len(FUSED)))()
        tensors = []  # referenced until the library has copied them
        for number, layer in enumerate(weights.layers):
            linears = low_rank_linears(spec, layer, dtype, torch.device("cpu"))
            tensors.append(linears)
            for position, name in enumerate(FUSED):
                if (linear := linears.get(name)) is None:
                    continue
                source = sources[number * len(FUSED) + position]
                source.a = linear.a.data_ptr()
                source.rank, source.inputs = linear.a.shape
                source.outputs, source.parts = outputs[position], len(linear.outputs)
                for index, part in enumerate(linear.outputs):
                    source.part[index] = _Part(
                        part.b.data_ptr(), part.start, len(part.b), part.rank, part.b.shape[1]
                    )
        handle = kernel_library.baton_adapter_create(model, sources)
        if not handle:
            raise MemoryError("no memory for the adapter")
        self.handle = ctypes.c_void_p(handle)
        weakref.finalize(self, kernel_library.baton_adapter_destroy, self.handle)


def adapter_pointers(adapters: Sequence[NativeAdapter | None]) -> ctypes.Array[ctypes.c_void_p] | None:
    """Return the adapters of a pass's rows as `struct pass` has them; None if no row has one."""
    if not any(adapters):
        return None
    return (ctypes.c_void_p * len(adapters))(
        *(None if adapter is None else adapter.handle for adapter in adapters)
    )
