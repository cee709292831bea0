"""Adapters that cannot be served exactly are refused with their cause."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_api.errors import SetupError
from baton_engine.model.lora import CONFIG, WEIGHTS, read_lora
from tests.engine.lora_adapters import ATTENTION, MLP, make_adapter
from tests.engine.models import make_model
from tests.engine.random_weights import tiny_spec

SPEC = tiny_spec(vocab=320)
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    return make_adapter(root / "good", make_model(root / "base"), targets=(*ATTENTION, *MLP), r=4)


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(good, tmp_path / "copy"))


def configure(folder: Path, **changes: Any) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, ("peft_type", "'IA3'", "LORA")),
        ({"use_dora": True}, ("use_dora", "Merge")),
        ({"use_qalora": True}, ("use_qalora",)),
        ({"lora_bias": True}, ("lora_bias",)),
        ({"bias": "all"}, ("bias is 'all'", "none")),
        ({"modules_to_save": ["lm_head"]}, ("modules_to_save", "lm_head")),
        ({"trainable_token_indices": [1]}, ("trainable_token_indices",)),
        ({"layer_replication": [[0, 2]]}, ("layer_replication",)),
        ({"target_parameters": ["experts.w"]}, ("target_parameters",)),
        ({"alora_invocation_tokens": [1, 2]}, ("alora_invocation_tokens",)),
        ({"fan_in_fan_out": True}, ("fan_in_fan_out",)),
        ({"an_option_of_the_future": 3}, ("an_option_of_the_future", "3")),
        ({"init_lora_weights": "pissa_niter_4"}, ("pissa_niter_4", "base model")),
        ({"layers_pattern": "blocks"}, ("layers_pattern", "'blocks'")),
        ({"target_modules": None}, ("target_modules", "None")),
        ({"target_modules": ["q_proj", "lm_head"]}, ("lm_head", "not a supported linear")),
        ({"target_modules": "("}, ("target_modules", "invalid")),
        ({"target_modules": "nothing"}, ("matches no linear",)),
        ({"target_modules": ["q_proj"]}, ("do not belong", "down_proj")),
        ({"rank_pattern": {"(": 1}}, ("rank_pattern",)),
        ({"rank_pattern": {"q_proj": 0}}, ("rank", "0", ">= 1")),
        ({"r": 17}, ("17", "--max-lora-rank is 16", "--max-lora-rank 17")),
        ({"r": 5}, ("[4, 64]", "[5, 64]", "another model")),
        ({"lora_alpha": "much"}, ("lora_alpha", "'much'")),
        ({"lora_alpha": float("inf")}, ("lora_alpha", "inf")),
    ],
)  # fmt: skip
def test_lora_unsupported_option_is_refused(
    folder: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    configure(folder, **changes)
    with pytest.raises(SetupError) as error:
        read_lora(folder, SPEC, 16)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (tiny_spec(hidden=128), ("[4, 64]", "[4, 128]", "another model")),
        (tiny_spec(layers=1), ("model.layers.1", "with 1 layers")),
        (tiny_spec(layers=3), ("lacks", "model.layers.2")),
        (tiny_spec(kv_heads=4), ("k_proj.lora_B", "[32, 4]", "[64, 4]")),
    ],
)
def test_lora_of_another_model_is_refused(good: Path, spec: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(SetupError) as error:
        read_lora(good, spec, 16)
    for word in words:
        assert word in str(error.value)


def test_lora_damaged_files_are_refused(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / WEIGHTS)

    def refusal(changed: dict[str, torch.Tensor]) -> str:
        save_file(changed, folder / WEIGHTS)
        with pytest.raises(SetupError) as error:
            read_lora(folder, SPEC, 16)
        return str(error.value)

    assert "not finite" in refusal(tensors | {f"{Q}.lora_A.weight": torch.full((4, 64), torch.nan)})
    assert "dtype I32" in refusal(tensors | {f"{Q}.lora_A.weight": torch.ones((4, 64), dtype=torch.int32)})
    assert "lora_magnitude" in refusal(tensors | {f"{Q}.lora_magnitude_vector.weight": torch.ones(64)})
    assert "lacks" in refusal({name: one for name, one in tensors.items() if not name.startswith(Q)})
    (folder / WEIGHTS).write_bytes(b"short")
    with pytest.raises(SetupError, match="truncated"):
        read_lora(folder, SPEC, 16)
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(SetupError, match="pickle"):
        read_lora(folder, SPEC, 16)
    (folder / CONFIG).write_text("[" * 100_000)
    with pytest.raises(SetupError, match="Cannot read"):
        read_lora(folder, SPEC, 16)
    (folder / CONFIG).unlink()
    with pytest.raises(SetupError, match=CONFIG):
        read_lora(folder, SPEC, 16)


def test_lora_digest_is_of_the_content(good: Path, folder: Path) -> None:
    first = read_lora(good, SPEC, 16)
    assert (first.digest, first.rank) == (read_lora(folder, SPEC, 16).digest, 4)
    configure(folder, lora_alpha=9)
    assert read_lora(folder, SPEC, 16).digest != first.digest
