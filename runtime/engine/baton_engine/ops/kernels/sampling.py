"""
Selection of tokens from logits on an accelerator, by the rules of `baton_engine.sampling.sampler`.

Weights are integers, and their sums are exact (`baton_engine.ops.token_weights`). A row's token is therefore
the one that the host selects, and does not depend on other rows.

Greedy rows need two launches: the highest logit of each block of tokens, and that of the row. Rows with
chance need three more, for weights, for the least weight to keep, and for the sums of the kept weights. The
least weight is searched by its bits, four at a time. Each pass counts or adds the tokens above 16 bounds, and
skips blocks whose highest weight is below all of them. The kernels do not sort.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_engine.ops import token_weights as definition
from baton_engine.ops.token_weights import TokenRule, scale
from baton_engine.streams import copied

BLOCK = 1024
"""Tokens per block."""

SEARCH_WARPS = 16
"""Of 64 threads on AMD, whose programs have 1,024 threads at most. One program searches a row."""

DIGITS = tl.constexpr(16)
"""Bounds that one pass of the search compares."""

PASSES = tl.constexpr(8)
"""Passes that determine the 31 bits of a positive number of fp32."""

FIRST_SHIFT = tl.constexpr(27)

FIELDS = tl.constexpr(len(TokenRule._fields))
"""Columns of the parameters of rows, fp64."""

WHOLE = tl.constexpr(definition.WHOLE)
LEAST_EXPONENT = tl.constexpr(definition.LEAST_EXPONENT)
TERM_0, TERM_1, TERM_2, TERM_3, TERM_4, TERM_5 = map(tl.constexpr, definition.TERMS)


@triton.jit
def _find_peaks(logits, peaks, offsets, stride, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))  # a row with NaN has no token, as one with infinity
    peak, offset = tl.max(x, axis=0, return_indices=True)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(peaks + at, peak)
    tl.store(offsets + at, offset)


@triton.jit
def _weigh(
    logits, peaks, tops, rules, shift, stride, vocab, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Replace logits of rows with chance by weights. Must not be compiled with fused products."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(rules + row * FIELDS).to(tl.float32)
    if factor > 0:
        blocks = tl.num_programs(1)
        block = tl.arange(0, BLOCKS)
        peak = tl.max(tl.load(peaks + row * blocks + block, mask=block < blocks, other=float("-inf")), axis=0)
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        at = logits + row * stride + token
        x = tl.load(at, mask=token < vocab, other=float("-inf"))
        # A row without a finite peak has no token. Its weights do not matter, but must not be NaN.
        healthy = (peak > float("-inf")) & (peak < float("inf"))
        x = (tl.where(healthy, x, 0.0) - tl.where(healthy, peak, 0.0)) * factor
        x = tl.where(x > LEAST_EXPONENT, x, LEAST_EXPONENT)
        shifted = x + shift
        part = x - (shifted - shift)
        power = part * TERM_5 + TERM_4
        power = power * part + TERM_3
        power = power * part + TERM_2
        power = power * part + TERM_1
        power = power * part + TERM_0
        bits = power.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
        weight = bits.to(tl.float32, bitcast=True)
        weight = tl.where(weight < WHOLE, (weight + WHOLE) - WHOLE, weight)
        tl.store(at, weight, mask=token < vocab)
        tl.store(tops + row * blocks + tl.program_id(1), tl.max(weight, axis=0))


@triton.jit
def _measure(weights, tops, bounds, lowest, vocab, blocks, BLOCK: tl.constexpr):
    """Return the number and the sum of the weights whose bits reach each bound. `lowest` is the least one."""
    number = tl.zeros([DIGITS], tl.int32)
    total = tl.zeros([DIGITS], tl.int64)
    for block in range(blocks):
        if tl.load(tops + block).to(tl.int32, bitcast=True) >= lowest:
            token = block * BLOCK + tl.arange(0, BLOCK)
            weight = tl.load(weights + token, mask=token < vocab, other=0.0)
            reaches = weight.to(tl.int32, bitcast=True)[:, None] >= bounds[None, :]
            number += tl.sum(reaches.to(tl.int32), axis=0)
            total += tl.sum(tl.where(reaches, weight.to(tl.int64)[:, None], 0), axis=0)
    return number, total


@triton.jit
def _highest_bound(weights, tops, target, vocab, blocks, SUMS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the highest bits that `target` weights reach, or weights with the sum `target`."""
    digit = tl.arange(0, DIGITS)
    bound = tl.sum(digit, axis=0) * 0
    for step in range(PASSES):
        shift = tl.maximum(FIRST_SHIFT - 4 * step, 0)
        number, total = _measure(weights, tops, bound + (digit << shift), bound, vocab, blocks, BLOCK)
        reached = total.to(tl.float64) >= target if SUMS else number >= target
        bound += (tl.sum(reached.to(tl.int32), axis=0) - 1) << shift
    return bound


@triton.jit
def _find_least(weights, tops, rules, leasts, stride, vocab, blocks, BLOCK: tl.constexpr):
    """Determine the bits of the least weight that min-p, top-k and top-p keep."""
    row = tl.program_id(0).to(tl.int64)
    rule = rules + row * FIELDS
    if tl.load(rule) > 0:
        top_k = tl.load(rule + 2).to(tl.int32)
        top_p = tl.load(rule + 3)
        least = tl.load(rule + 1).to(tl.float32).to(tl.int32, bitcast=True)
        if (top_k > 0) | (top_p < 1.0):
            weights += row * stride
            tops += row * blocks
            digit = tl.arange(0, DIGITS)
            number, totals = _measure(weights, tops, least + digit, least, vocab, blocks, BLOCK)
            total = tl.max(totals, axis=0)
            if (top_k > 0) & (top_k <= tl.max(number, axis=0)):
                least = _highest_bound(weights, tops, top_k, vocab, blocks, False, BLOCK)
                above = least + 1
                number, totals = _measure(weights, tops, above + digit, above, vocab, blocks, BLOCK)
                # All tokens with the least weight are kept, but top-p is a share of top_k tokens.
                equal = (top_k - tl.max(number, axis=0)).to(tl.int64)
                total = tl.max(totals, axis=0) + equal * least.to(tl.float32, bitcast=True).to(tl.int64)
            if top_p < 1.0:
                target = top_p * total.to(tl.float64)
                least = tl.maximum(least, _highest_bound(weights, tops, target, vocab, blocks, True, BLOCK))
        tl.store(leasts + row, least)


@triton.jit
def _add_kept(weights, rules, leasts, sums, stride, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(rules + row * FIELDS) > 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        weight = tl.load(weights + row * stride + token, mask=token < vocab, other=0.0)
        weighed = weight.to(tl.int32, bitcast=True) >= tl.load(leasts + row)
        total = tl.sum(tl.where(weighed, weight, 0.0).to(tl.int64), axis=0)
        tl.store(sums + row * tl.num_programs(1) + tl.program_id(1), total)


@triton.jit
def _choose(
    weights, peaks, offsets, rules, leasts, sums, tokens, stride, vocab, blocks,
    CHANCE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    at = row * blocks + block
    peak, highest = tl.max(
        tl.load(peaks + at, mask=block < blocks, other=float("-inf")), axis=0, return_indices=True
    )
    token = highest * BLOCK + tl.load(offsets + row * blocks + highest)
    healthy = (peak > float("-inf")) & (peak < float("inf"))
    if CHANCE:
        rule = rules + row * FIELDS
        if tl.load(rule) > 0:
            sum_of = tl.load(sums + at, mask=block < blocks, other=0)
            end = tl.cumsum(sum_of, axis=0)
            total = tl.sum(sum_of, axis=0)
            target = (tl.load(rule + 4) * total.to(tl.float64)).to(tl.int64)
            target = tl.minimum(target, total - 1)  # the product may have been rounded up
            before = end <= target
            first = tl.minimum(tl.sum(before.to(tl.int32), axis=0), blocks - 1)
            target -= tl.max(tl.where(before, end, 0), axis=0)
            inside = first * BLOCK + tl.arange(0, BLOCK)
            weight = tl.load(weights + row * stride + inside, mask=inside < vocab, other=0.0)
            weighed = weight.to(tl.int32, bitcast=True) >= tl.load(leasts + row)
            end = tl.cumsum(tl.where(weighed, weight, 0.0).to(tl.int64), axis=0)
            token = first * BLOCK + tl.sum((end <= target).to(tl.int32), axis=0)
    tl.store(tokens + row, tl.where(healthy, token, -1))


def select_on_device(logits: Tensor, rules: Sequence[TokenRule]) -> Tensor:
    """
    Return the token [S] int32 of each row of logits [S, V] fp32; -1 for a row with NaN, infinity or no token.

    Overwrites the logits of rows with chance. The last dimension is contiguous.
    """
    (rows, vocab), device = logits.shape, logits.device
    if len(rules) != rows:
        raise ValueError(f"Invalid number of rules: {len(rules)}. Expected {rows}, one for each row.")
    tokens = torch.empty(rows, dtype=torch.int32, device=device)
    if not rows:
        return tokens
    chance = any(rule.factor for rule in rules)
    parameters = copied(np.array(rules, dtype=np.float64), device)
    blocks, stride = triton.cdiv(vocab, BLOCK), logits.stride(0)
    all_blocks = triton.next_power_of_2(blocks)
    # Not two parts of one tensor: for an address that is not a multiple of 16, Triton compiles kernels again.
    peaks, tops = (torch.empty((rows, blocks), dtype=torch.float32, device=device) for _ in range(2))
    offsets = torch.empty((rows, blocks), dtype=torch.int32, device=device)
    leasts = torch.empty(rows, dtype=torch.int32, device=device)
    sums = torch.empty((rows, blocks), dtype=torch.int64, device=device)
    grid = (rows, blocks)
    _find_peaks[grid](logits, peaks, offsets, stride, vocab, BLOCK=BLOCK, enable_fp_fusion=False)
    if chance:
        shift = definition.ROUNDING + scale(vocab)
        _weigh[grid](
            logits, peaks, tops, parameters, shift, stride, vocab,
            BLOCK=BLOCK, BLOCKS=all_blocks, enable_fp_fusion=False,
        )  # fmt: skip
        _find_least[(rows,)](
            logits, tops, parameters, leasts, stride, vocab, blocks,
            BLOCK=BLOCK, num_warps=SEARCH_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        _add_kept[grid](
            logits, parameters, leasts, sums, stride, vocab, BLOCK=BLOCK, enable_fp_fusion=False
        )  # fmt: skip
    _choose[(rows,)](
        logits, peaks, offsets, parameters, leasts, sums, tokens, stride, vocab, blocks,
        CHANCE=chance, BLOCK=BLOCK, BLOCKS=all_blocks, enable_fp_fusion=False,
    )  # fmt: skip
    return tokens
