"""A pass up to the final norm, and the head apart from it, on both decoders."""

from __future__ import annotations

import random

import pytest
import torch

from baton_engine.batch import Batch, BatchRow
from tests.engine.random_weights import tiny_spec
from tests.engine.test_cpu_ops import CPU, ROWS, filled_cache, native_model, plain, plain_in_float, rows_of

SPECS = {
    "tiny": tiny_spec(),
    "nothing is a multiple of anything": tiny_spec(
        head_dim=10, heads=6, kv_heads=2, hidden=51, intermediate=77, vocab=33, tied_embeddings=False
    ),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_hidden_states_projected_equal_the_logits(name: str, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    batch = Batch(rows_of(ROWS, spec.vocab, random.Random(1)), 16, CPU)
    for model in (native_model(spec, dtype), plain(spec, dtype)):
        logits = model.forward(batch, filled_cache(spec, dtype))
        states = model.hidden_states(batch, filled_cache(spec, dtype))
        assert states.shape == (len(ROWS), spec.hidden) and states.dtype == torch.float32
        assert torch.equal(model.project(states), logits)
        # As many rows at a time as one likes.
        torch.testing.assert_close(model.project(states[3:4]), logits[3:4], rtol=0.01, atol=0.01)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-5), (torch.bfloat16, 0.12)])
def test_native_states_are_those_of_plain_operations_in_fp32(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    spec = SPECS[name]
    batch = Batch(rows_of(ROWS, spec.vocab, random.Random(1)), 16, CPU)
    exact = filled_cache(spec, dtype)
    exact.kv = exact.kv.float()
    expected = plain_in_float(spec, dtype).hidden_states(batch, exact)
    states = native_model(spec, dtype).hidden_states(batch, filled_cache(spec, dtype))
    torch.testing.assert_close(states, expected, rtol=0, atol=tolerance)


def test_hidden_states_equal_last_states_of_shorter_rows() -> None:
    spec = tiny_spec()
    for model in (native_model(spec, torch.float32), plain(spec, torch.float32)):
        row = BatchRow([random.Random(2).randrange(spec.vocab) for _ in range(40)], 0, [3, 1, 2], 25)
        other = BatchRow([5, 6], 0, [9], 1)
        cache = filled_cache(spec, torch.float32)
        states = model.hidden_states(Batch([other, row, other], 16, CPU), cache)
        assert states.shape == (27, spec.hidden)
        for length in (16, 17, 31, 40):
            shorter = BatchRow(row.tokens[:length], 0, row.blocks, 1)
            single = model.hidden_states(Batch([shorter], 16, CPU), filled_cache(spec, torch.float32))
            torch.testing.assert_close(states[1 + length - 16], single[0], rtol=0, atol=2e-5)


def test_hidden_states_without_wanted_rows_are_empty() -> None:
    spec = tiny_spec()
    batch = Batch([BatchRow([5, 6], 0, [9], 0)], 16, CPU)
    for model in (native_model(spec, torch.float32), plain(spec, torch.float32)):
        states = model.hidden_states(batch, filled_cache(spec, torch.float32))
        assert states.shape == (0, spec.hidden)
        assert model.project(states).shape == (0, spec.vocab)
