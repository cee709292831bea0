"""The product with one row against the library's."""

from __future__ import annotations

import pytest
import torch

from baton_engine.ops.accelerator import AcceleratorOps
from baton_engine.ops.kernels.one_row import MANY_OUTPUTS, STEP, RowLinear
from tests.engine.kernels.cases import DEVICE, guarded
from tests.engine.random_weights import tiny_spec


@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [
        pytest.param(16, STEP, id="one program"),
        pytest.param(37, STEP, id="outputs that fill no program"),
        pytest.param(20, 2 * STEP + 40, id="inputs that fill no step"),
        pytest.param(5, 24, id="few of both"),
        pytest.param(MANY_OUTPUTS + 3, 40, id="many outputs", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_product_with_one_row_is_the_libraries(outputs: int, inputs: int, biased: bool) -> None:
    """Numbers around all inputs are NaN. The interpreter has no products of bfloat16."""
    torch.manual_seed(1)
    weight = guarded(torch.randn(outputs, inputs, device=DEVICE).half() / inputs**0.5)
    bias = guarded(torch.randn(outputs, device=DEVICE).half()) if biased else None
    x = guarded(torch.randn(1, inputs, device=DEVICE).half())
    linear = AcceleratorOps(tiny_spec()).prepare(weight, bias)
    assert isinstance(linear, RowLinear)
    expected = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(linear(x).float(), expected, atol=2e-3, rtol=2e-3)


def test_several_rows_are_the_libraries_own() -> None:
    weight, x = torch.randn(8, 16, device=DEVICE).half(), torch.randn(3, 16, device=DEVICE).half()
    linear = AcceleratorOps(tiny_spec()).prepare(weight)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, weight))


def test_full_precision_is_left_to_the_library() -> None:
    assert not isinstance(AcceleratorOps(tiny_spec()).prepare(torch.zeros(8, 16)), RowLinear)
