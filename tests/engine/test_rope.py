"""Rotary frequencies are those of transformers, at the sizes of real models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton_engine.model.config import spec_of
from baton_engine.model.rope import Rotary, attention_factor, inverse_frequencies
from tests.engine.greedy import CPU

SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32_768}

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": YARN,
    "yarn that ends between dimensions": YARN | {"truncate": False},
    "yarn with other bounds": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn with its own factor": YARN | {"attention_factor": 1.25},
    "yarn with two scales": YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn that does not stretch": YARN | {"factor": 1.0},
}


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_factor_are_those_of_transformers(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = SIZES | {"rope_parameters": SCALINGS[name]}
    spec = spec_of(config, "config.json")
    reference = ROPE_INIT_FUNCTIONS[SCALINGS[name]["rope_type"]]
    frequencies, factor = reference(LlamaConfig(**config), torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(spec), frequencies, rtol=1e-5, atol=0)
    assert attention_factor(spec.rope) == pytest.approx(factor)


def test_cosines_and_sines_stay_exact_far_out() -> None:
    rotary = Rotary(spec_of(SIZES, "config.json"), CPU)
    positions = torch.tensor([0, 1, 4095, 131_071])
    cos, sin = rotary.at(positions)
    exponents = torch.arange(0, 128, 2, dtype=torch.float64) / 128
    angles = positions.double()[:, None] * (1.0 / 10_000.0**exponents)
    assert cos.dtype == sin.dtype == torch.float32
    # fp32 keeps an angle of 131,071 radians to about 0.008.
    torch.testing.assert_close(cos.double(), angles.cos(), atol=0.02, rtol=0)
    torch.testing.assert_close(sin.double(), angles.sin(), atol=0.02, rtol=0)
    torch.testing.assert_close(cos[0], torch.ones(64))
