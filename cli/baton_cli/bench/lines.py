"""
Lines through measurements, none of whose coefficients is negative.

More tokens never take less time, whatever noise says. Each measurement counts by its relative error: a
millisecond is much of a short prompt and nothing of a long one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def fit(inputs: Sequence[Sequence[float]], outcomes: Sequence[float]) -> list[float]:
    """
    Coefficients for the columns of `inputs`; all 0 without measurements. Outcomes are above 0.

    There are few columns, so every choice of them is tried, and of those without a negative coefficient the
    one with the least error taken.

    >>> [round(one, 6) for one in fit([(1, 1), (1, 2), (1, 4)], [3.0, 5.0, 9.0])]
    [1.0, 2.0]
    """
    width = len(inputs[0]) if inputs else 0
    rows = [[one / outcome for one in row] for row, outcome in zip(inputs, outcomes, strict=True)]
    best, least = [0.0] * width, float(len(rows))
    for count in range(1, width + 1):
        for chosen in itertools.combinations(range(width), count):
            found = _least_squares([[row[column] for column in chosen] for row in rows])
            if found is None or min(found) < 0:
                continue
            whole = [0.0] * width
            for column, value in zip(chosen, found, strict=True):
                whole[column] = value
            error = sum((sum(c * x for c, x in zip(whole, row, strict=True)) - 1) ** 2 for row in rows)
            if error < least * (1 - 1e-9):
                best, least = whole, error
    return best


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Of rows whose outcome is 1 each; None if their columns depend on one another."""
    width = len(rows[0])
    matrix = [
        [sum(row[i] * row[j] for row in rows) for j in range(width)] + [sum(row[i] for row in rows)]
        for i in range(width)
    ]
    scales = [matrix[i][i] ** 0.5 or 1.0 for i in range(width)]
    for i in range(width):
        matrix[i] = [
            value / scales[i] / (scales[j] if j < width else 1.0) for j, value in enumerate(matrix[i])
        ]
    for i in range(width):
        pivot = max(range(i, width), key=lambda one: abs(matrix[one][i]))
        if abs(matrix[pivot][i]) < 1e-9:
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for j in range(width):
            if j != i:
                share = matrix[j][i] / matrix[i][i]
                matrix[j] = [a - share * b for a, b in zip(matrix[j], matrix[i], strict=True)]
    return [matrix[i][width] / matrix[i][i] / scales[i] for i in range(width)]
