"""
Norms, activations, and the rotation and storage of keys.

Values are computed in fp32 and rounded to the model's dtype where the plain operations round them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_engine.batch import Batch
from baton_engine.kv.cache import FLOAT8_CACHE, KVCache
from baton_engine.ops.kernels import float8
from baton_engine.spec import ModelSpec

COLUMNS = 1024
"""Columns of an activation, or of a norm of all heads, that one program computes."""

WARP_COLUMNS = 512
"""Columns of a norm that one warp computes, where there are enough warps."""

MOST_WARPS = 16
"""Of 64 threads on AMD, whose programs have 1,024 threads at most."""

HEADS = 4
"""Heads of a token that one program rotates."""


@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    result,
    x_stride,
    result_stride,
    size,
    epsilon,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    if ADDS:
        at = residual + row * size + column
        value = (value.to(tl.float32) + tl.load(at, mask=inside, other=0.0).to(tl.float32)).to(value.dtype)
        tl.store(at, value, mask=inside)
    exact = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(exact * exact, axis=0) / size + epsilon)
    weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + row * result_stride + column, (exact * scale * weights).to(value.dtype), mask=inside)


def rms_norm(
    x: Tensor, weight: Tensor, epsilon: float, result: Tensor, residual: Tensor | None = None
) -> None:
    """
    Write the norm of x [R, N] over N, times `weight` [N], to `result` [R, N].

    With a contiguous `residual` [R, N], x is added to it first, and the sum is normalized. The last dimension
    of x and of `result` is contiguous. They may be the same tensor.
    """
    rows, size = x.shape
    if rows:
        block = triton.next_power_of_2(size)
        _rms_norm[(rows,)](
            x,
            x if residual is None else residual,
            weight,
            result,
            x.stride(0),
            result.stride(0),
            size,
            epsilon,
            ADDS=residual is not None,
            BLOCK=block,
            num_warps=min(MOST_WARPS, max(1, block // WARP_COLUMNS)),
            enable_fp_fusion=True,
        )


@triton.jit
def _mean_squares(qkv, means, stride, of_q, of_k, BLOCK: tl.constexpr):
    row, of_keys = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size = tl.where(of_keys == 0, of_q, of_k)
    column = tl.arange(0, BLOCK)
    at = qkv + row * stride + of_keys * of_q + column
    exact = tl.load(at, mask=column < size, other=0.0).to(tl.float32)
    tl.store(means + row * 2 + of_keys, tl.sum(exact * exact, axis=0) / size)


def mean_squares(qkv: Tensor, spec: ModelSpec) -> Tensor:
    """Implement `Ops.mean_squares` in one launch."""
    means = torch.empty((len(qkv), 2), dtype=torch.float32, device=qkv.device)
    if len(qkv):
        of_q, of_k = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        block = triton.next_power_of_2(of_q)
        _mean_squares[(len(qkv), 2)](
            qkv,
            means,
            qkv.stride(0),
            of_q,
            of_k,
            BLOCK=block,
            num_warps=min(MOST_WARPS, max(1, block // WARP_COLUMNS)),
            enable_fp_fusion=True,
        )
    return means


@triton.jit
def _norm_jointly(qkv, means, q_norm, k_norm, stride, of_q, size, epsilon, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_q, is_k = column < of_q, (column >= of_q) & (column < size)
    mean = tl.where(is_q, tl.load(means + row * 2), tl.load(means + row * 2 + 1))
    weight = tl.load(q_norm + column, mask=is_q, other=0.0).to(tl.float32)
    weight += tl.load(k_norm + column - of_q, mask=is_k, other=0.0).to(tl.float32)
    at = qkv + row * stride + column
    raw = tl.load(at, mask=column < size, other=0.0)
    normed = raw.to(tl.float32) * (1.0 / tl.sqrt(mean + epsilon)) * weight
    tl.store(at, normed.to(raw.dtype), mask=column < size)


def norm_jointly(qkv: Tensor, means: Tensor, q_norm: Tensor, k_norm: Tensor, epsilon: float) -> None:
    """Implement `Ops.norm_jointly` in one launch."""
    of_q, size = len(q_norm), len(q_norm) + len(k_norm)
    if len(qkv):
        _norm_jointly[(len(qkv), triton.cdiv(size, COLUMNS))](
            qkv,
            means,
            q_norm,
            k_norm,
            qkv.stride(0),
            of_q,
            size,
            epsilon,
            BLOCK=COLUMNS,
            enable_fp_fusion=True,
        )


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def gated_product(gate, up, GELU: tl.constexpr):
    x = gate.to(tl.float32)
    if GELU:
        # sqrt(2 / pi) and the cubic term of https://arxiv.org/abs/1606.08415
        active = 0.5 * x * (1 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        active = x * tl.sigmoid(x)
    return (active.to(gate.dtype).to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _gated(gate_up, result, size, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=inside, other=0.0)
    tl.store(result + row * size + column, gated_product(gate, up, GELU), mask=inside)


def gated(gate_up: Tensor, gelu: bool) -> Tensor:
    """Return SiLU, or GELU's tanh form, of the first half of [T, 2N], times the second half: [T, N]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    result = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(COLUMNS, triton.next_power_of_2(size))
        _gated[(rows, triton.cdiv(size, block))](
            gate_up.contiguous(), result, size, GELU=gelu, BLOCK=block, enable_fp_fusion=True
        )
    return result


@triton.jit
def _rope_and_store(
    qkv, cos, sin, q_norm, k_norm, positions, slots, q, kv,
    block_stride, plane_stride, head_stride, epsilon, temperature, length,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr, NORM_AFTER: tl.constexpr, TEMPERATURE: tl.constexpr, FLOAT8: tl.constexpr,
    TILE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * TILE + tl.arange(0, TILE))[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < H + 2 * K) & (dim < D)
    not_value = head < H + K  # values are stored as they are
    row = qkv + token * (H + 2 * K) * D + head * D
    raw = tl.load(row + dim, mask=inside, other=0.0)
    x = raw.to(tl.float32)
    # The other half of a rotated pair is loaded again, from the first-level cache.
    partner = tl.where(dim < R // 2, dim + R // 2, dim - R // 2)
    pairs = inside & not_value & (dim < R)
    other = tl.load(row + partner, mask=pairs, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / D + epsilon)[:, None]
        is_q, is_k = inside & (head < H), inside & not_value & (head >= H)
        weight = _by_kind(q_norm, k_norm, dim, is_q, is_k)
        x = tl.where(not_value, (x * scale * weight).to(raw.dtype).to(tl.float32), x)
        weight = _by_kind(q_norm, k_norm, partner, is_q & (dim < R), is_k & (dim < R))
        other = (other * scale * weight).to(raw.dtype).to(tl.float32)
    if R > 0:
        angle = token * (R // 2) + dim % (R // 2)
        turned = tl.load(cos + angle, mask=dim < R, other=1.0) * x
        crossed = tl.load(sin + angle, mask=dim < R, other=0.0) * other
        x = tl.where(pairs, tl.where(dim < R // 2, turned - crossed, turned + crossed), x)
    if NORM_AFTER:
        x = x.to(raw.dtype).to(tl.float32)
        x = tl.where(not_value, x / tl.sqrt(tl.sum(x * x, axis=1) / D + epsilon)[:, None], x)
    if TEMPERATURE:
        grown = (tl.load(positions + token) + 1) // length
        factor = tl.log(1 + grown.to(tl.float32)) * temperature + 1
        x = tl.where(head < H, x.to(raw.dtype).to(tl.float32) * factor.to(raw.dtype).to(tl.float32), x)
    value = x.to(raw.dtype)
    tl.store(q + token * H * D + head * D + dim, value, mask=inside & (head < H))
    slot = tl.load(slots + token)
    plane = tl.where(not_value, 0, 1)
    offset = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * D + plane * plane_stride
    offset += (head - H - plane * K) * head_stride
    stored = float8.narrow(value.to(tl.float32)) if FLOAT8 else value
    if slot >= 0:
        tl.store(kv + offset + dim, stored, mask=inside & (head >= H))


@triton.jit
def _by_kind(q_norm, k_norm, dim, is_q, is_k):
    """Return the weights of the norm of queries or of keys."""
    of_q = tl.load(q_norm + dim, mask=is_q, other=0.0).to(tl.float32)
    return of_q + tl.load(k_norm + dim, mask=is_k, other=0.0).to(tl.float32)


def rope_and_store(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor] | None,
    cache: KVCache,
    layer: int,
    batch: Batch,
    spec: ModelSpec,
) -> Tensor:
    """Implement `Ops.rope_and_store` in one launch. `norms` are the weights [D] of queries and keys."""
    tokens, heads = qkv.shape[0], spec.heads + 2 * spec.kv_heads
    q = torch.empty((tokens, spec.heads, spec.head_dim), dtype=qkv.dtype, device=qkv.device)
    kv = cache.kv[:, layer]  # [blocks, 2, K, slot, D]
    cos, sin = rotation or (qkv, qkv)
    temperature, length = spec.temperature or (0.0, 1)
    _rope_and_store[(tokens, triton.cdiv(heads, HEADS))](
        qkv.contiguous(),
        cos,
        sin,
        *(norms or (qkv, qkv)),
        batch.positions,
        batch.slots,
        q,
        kv,
        *kv.stride()[:3],
        spec.norm_epsilon,
        temperature,
        length,
        H=spec.heads,
        K=spec.kv_heads,
        D=spec.head_dim,
        R=2 * cos.shape[1] if rotation else 0,
        BLOCK_SIZE=cache.block_size,
        NORM=norms is not None,
        NORM_AFTER=rotation is not None and spec.qk_norm_after,
        TEMPERATURE=rotation is None and spec.temperature is not None,
        FLOAT8=cache.kv.dtype == FLOAT8_CACHE,
        TILE=HEADS,
        BLOCK_D=triton.next_power_of_2(spec.head_dim),
        enable_fp_fusion=True,
    )
    return q
