"""
Random numbers without a state: one number for each (seed, position).

A generator that is advanced from draw to draw would tie a request's tokens to what else was drawn. A
function of seed and position gives the same token alone, in a batch, after a retraction, or on
another worker, and nothing has to be handed over.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """
    A number in [0, 1) with 53 random bits.

    >>> uniform(1, 2) == uniform(1, 2) != uniform(2, 1)
    True
    """
    # The seed is mixed before the position is added, or neighbouring seeds would share their numbers.
    return (_mix(_mix(seed + _GOLDEN) + position * _GOLDEN) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    """SplitMix64's finaliser: every bit of the input moves every bit of the result."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
