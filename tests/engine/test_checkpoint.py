"""Checkpoints in folders: the files that are read, and the errors of damaged ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_api.errors import SetupError
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.config import spec_of
from baton_engine.model.tokenizer import load_tokenizer
from baton_engine.model.weights import Weights
from baton_engine.quantized import floats
from baton_engine.spec import ModelSpec
from tests.engine.models import EOS, make_model


def loaded(folder: Path) -> tuple[ModelSpec, Weights]:
    checkpoint = Checkpoint(folder, folder.name)
    spec = load_spec(checkpoint)
    weights = load_weights(checkpoint, spec, torch.float32)
    load_tokenizer(checkpoint, spec)
    return spec, weights


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    for file in whole.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_weights_are_stored_on_the_device_one_by_one(whole: Path) -> None:
    """The host's memory does not have them all: the meta device stores nothing."""
    checkpoint = Checkpoint(whole, "tiny")
    spec = load_spec(checkpoint)
    weights = load_weights(checkpoint, spec, torch.bfloat16, device=torch.device("meta"))
    expected = load_weights(checkpoint, spec, torch.bfloat16)
    assert weights.bytes == expected.bytes > 0
    for layer in weights.layers:
        tensors = [getattr(layer, part.name) for part in fields(layer)]
        assert {tensor.device.type for tensor in tensors if tensor is not None} == {"meta"}
    assert floats(weights.embedding).is_meta and floats(weights.head).is_meta and weights.final_norm.is_meta


def _tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], Any]:
    def damage(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        change(held)
        save_file(held, folder / "model.safetensors")

    return damage


def _cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


UP = "model.layers.1.mlp.up_proj.weight"

DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "a configuration cut short": (lambda folder: (folder / "config.json").write_text("{"), "Cannot read"),
    "a list for a configuration": (
        lambda folder: (folder / "config.json").write_text("[]"),
        "does not contain a JSON object",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "pickled weights": (_pickled, "pickled weights .pytorch_model.bin.*Convert them"),
    "weights cut short": (_cut, r"truncated: it has \d+ bytes, but its header requires \d+"),
    "no weights at all": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "has 0 bytes"),
    "a wild header": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64),
        "not a safetensors file, or is truncated: it has 64 bytes",
    ),
    "a header that is no JSON": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"\x08" + b"\0" * 7 + b"nonsense"),
        "damaged safetensors header",
    ),
    "a tensor less": (_tensors(lambda held: held.pop(UP)), f"tensor {UP} is missing"),
    "many tensors less": (
        _tensors(lambda held: [held.pop(name) for name in list(held) if ".1." in name]),
        "and 4 more are missing",
    ),
    "a tensor more": (
        _tensors(lambda held: held.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})),
        "tensor model.layers.0.self_attn.q_proj.bias is not part of LlamaForCausalLM",
    ),
    "another shape": (
        _tensors(lambda held: held.update({UP: torch.zeros(96, 63)})),
        rf"tensor {UP} has shape \[96, 63\], but the configuration requires \[96, 64\]",
    ),
    "whole numbers for weights": (
        _tensors(lambda held: held.update({UP: torch.zeros(96, 64, dtype=torch.int8)})),
        f"tensor {UP} has the unsupported dtype I8",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "a damaged tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        "Cannot read the tokenizer",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_checkpoint_damaged_folder_is_rejected_with_the_reason(folder: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    damage(folder)
    with pytest.raises(SetupError, match=message):
        loaded(folder)


def test_checkpoint_tokenizer_of_larger_model_is_rejected(folder: Path) -> None:
    spec = load_spec(Checkpoint(folder, "tiny"))
    small = spec_of(json.loads((folder / "config.json").read_bytes()) | {"vocab_size": 200}, "config.json")
    assert spec.vocab > small.vocab
    with pytest.raises(SetupError, match="the tokenizer has ids up to 319, but the model has only 200"):
        load_tokenizer(Checkpoint(folder, "tiny"), small)


def test_known_leftovers_are_ignored(folder: Path) -> None:
    leftover = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    _tensors(lambda held: held.update(leftover))(folder)
    loaded(folder)


def _shard(folder: Path) -> dict[str, str]:
    """Split the weights in two; the index's map."""
    held = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    homes = {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(sorted(held))}
    for shard in set(homes.values()):
        save_file({name: held[name] for name, home in homes.items() if home == shard}, folder / shard)
    _index(folder, homes)
    return homes


def _index(folder: Path, homes: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))


def test_shards_hold_the_same_weights_as_one_file(whole: Path, folder: Path) -> None:
    _shard(folder)
    (_, one), (_, many) = loaded(whole), loaded(folder)
    torch.testing.assert_close(one.embedding, many.embedding, atol=0, rtol=0)
    for ours, theirs in zip(one.layers, many.layers, strict=True):
        torch.testing.assert_close(ours.qkv, theirs.qkv, atol=0, rtol=0)
        torch.testing.assert_close(ours.gate_up, theirs.gate_up, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("homes", "message"),
    [
        ({"a": "model-00003-of-00003.safetensors"}, "lacks model-00003-of-00003.safetensors, one of the 1"),
        ({"a": "../secret.safetensors"}, "not a plain file name"),
        ({}, "does not list any file"),
        ([], "not a safetensors index"),
    ],
)
def test_checkpoint_damaged_index_is_rejected(folder: Path, homes: Any, message: str) -> None:
    _shard(folder)
    _index(folder, homes)
    with pytest.raises(SetupError, match=message):
        loaded(folder)


def test_checkpoint_tensor_in_two_shards_is_rejected(folder: Path) -> None:
    homes = _shard(folder)
    first, second = sorted(set(homes.values()))
    held = load_file(folder / first)
    save_file(load_file(folder / second) | {"lm_head.weight": held["lm_head.weight"]}, folder / second)
    with pytest.raises(SetupError, match="weight is in both"):
        loaded(folder)


def test_checkpoint_weights_have_requested_dtype_and_tied_head(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "qwen3 with tied embeddings")
    checkpoint = Checkpoint(folder, "tiny")
    weights = load_weights(checkpoint, load_spec(checkpoint), torch.bfloat16)
    assert weights.head is weights.embedding
    assert floats(weights.embedding).dtype == floats(next(iter(weights.layers)).qkv).dtype == torch.bfloat16


class Watching:
    """Progress that adds up."""

    def __init__(self) -> None:
        self.label, self.total, self.passed, self.over = "", 0, 0, False

    def start(self, label: str, total_bytes: int) -> None:
        self.label, self.total = label, total_bytes

    def advance(self, size: int) -> None:
        self.passed += size

    def done(self) -> None:
        self.over = True


def test_progress_ends_at_the_total_that_it_promised(whole: Path) -> None:
    watching, checkpoint = Watching(), Checkpoint(whole, "tiny")
    load_weights(checkpoint, load_spec(checkpoint), torch.float32, watching)
    assert watching.over and watching.passed == watching.total > 100_000
    assert whole.name in watching.label


def test_checkpoint_generation_config_ends_come_first(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, EOS, 100_000]}))
    checkpoint = Checkpoint(folder, "tiny")
    assert load_tokenizer(checkpoint, load_spec(checkpoint)).eos_ids == (7, EOS)
