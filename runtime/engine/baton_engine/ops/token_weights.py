"""
Weights of tokens: unnormalized probabilities that are integers, with the same bits on every device.

Each step of the computation is one correctly rounded operation in fp32, so torch, the native library and
Triton's kernels get the same bits (ADR 38). The most likely token has the weight 2**scale, which is chosen so
that the sum over the vocabulary is below 2**53: it is exact in fp64, in any order. Probabilities below about
2**-scale of the highest are 0.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_engine.ops.native import library

BLOCK = 128
"""Number of tokens per block of the host's sampler."""

SUM_BITS = 52
"""Bits of the highest possible sum of weights. One less than fp64 has, because weights are rounded."""

ROUNDING = 12582912.0
"""1.5 * 2**23. Adding it to a small number leaves the nearest integer in the low bits of the sum."""

WHOLE = 8388608.0
"""2**23: numbers of fp32 from here on are integers."""

LEAST_EXPONENT = -120.0
"""Binary logarithms of weights are limited to this, where they round to 0."""

TERMS = (
    1.0,
    0.6931470036506653,
    0.24022242426872253,
    0.05550733581185341,
    0.009671512991189957,
    0.001326472731307149,
)
"""Coefficients of 2**x for x from -0.5 to 0.5, with a relative error below 2e-7. Numbers of fp32."""

_TERMS = np.array(TERMS, dtype=np.float32)


class TokenRule(NamedTuple):
    """Parameters that, with the weights of a row, determine its token."""

    factor: float
    """Binary logarithm of a weight per unit of a logit, a number of fp32. 0 selects the most likely token."""
    floor: float = 1.0
    """Least weight to keep, a number of fp32."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    number: float = 0.0
    """Uniform number in [0, 1)."""


GREEDY = TokenRule(0.0)


def scale(vocab: int) -> int:
    """Return the binary logarithm of the weight of the most likely token."""
    return SUM_BITS - (vocab - 1).bit_length()


class TokenWeights(NamedTuple):
    """Weights of S rows in C blocks. The last block is padded with zeros."""

    values: Tensor
    """[S, C, BLOCK] fp32."""
    sums: NDArray[np.float64]
    """[S, C]"""
    maxima: NDArray[np.float32]
    """[S, C]"""


def weigh(logits: Tensor, peaks: Tensor, rules: Sequence[TokenRule]) -> TokenWeights:
    """
    Return the weights of `logits` [S, V] fp32, which may be overwritten.

    `peaks` [S] are the highest logits, which are finite. Factors are positive.
    """
    rows, vocab = logits.shape
    factors = torch.tensor([rule.factor for rule in rules], dtype=torch.float32, device=logits.device)
    if vocab % BLOCK:
        logits = torch.nn.functional.pad(logits, (0, BLOCK - vocab % BLOCK), value=-math.inf)
    shift = ROUNDING + scale(vocab)
    kernels = library.loaded()
    if kernels is None or logits.device.type != "cpu":
        values = by_torch(logits, peaks, factors, shift).view(rows, -1, BLOCK)
        sums = values.sum(-1, dtype=torch.float64).cpu().numpy()
        return TokenWeights(values, sums, values.amax(-1).cpu().numpy())
    return _by_library(kernels, logits.contiguous(), peaks.contiguous(), factors, shift)


def by_torch(logits: Tensor, peaks: Tensor, factors: Tensor, shift: float) -> Tensor:
    """Replace `logits` by weights. In place, because temporaries of this size are slow."""
    logits.sub_(peaks[:, None]).mul_(factors[:, None]).clamp_(min=LEAST_EXPONENT)
    shifted = logits + shift
    exponents = shifted.view(torch.int32) << 23  # an integer, of which the lowest 9 bits remain
    part = logits.sub_(shifted.sub_(shift))
    weights = torch.mul(part, TERMS[-1], out=shifted)
    for term in TERMS[-2:0:-1]:
        weights.add_(term).mul_(part)
    weights.add_(TERMS[0]).view(torch.int32).add_(exponents)
    return weights.round_()


def _by_library(
    kernels: ctypes.CDLL, logits: Tensor, peaks: Tensor, factors: Tensor, shift: float
) -> TokenWeights:
    rows, padded = logits.shape
    shape = (rows, padded // BLOCK)
    sums, maxima = np.empty(shape, dtype=np.float64), np.empty(shape, dtype=np.float32)
    kernels.baton_weigh(
        ctypes.c_void_p(logits.data_ptr()),
        ctypes.c_int64(rows),
        ctypes.c_int64(shape[1]),
        ctypes.c_void_p(peaks.data_ptr()),
        ctypes.c_void_p(factors.data_ptr()),
        ctypes.c_float(shift),
        ctypes.c_float(LEAST_EXPONENT),
        ctypes.c_void_p(_TERMS.ctypes.data),
        ctypes.c_void_p(sums.ctypes.data),
        ctypes.c_void_p(maxima.ctypes.data),
    )
    return TokenWeights(logits.view(*shape, BLOCK), sums, maxima)
