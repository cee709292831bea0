"""GGUF files: they hold what their source folder held, and damage is reported."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_api.errors import SetupError
from baton_engine.api.template.rendering import TemplateInput
from baton_engine.api.template.templates import templates_of
from baton_engine.model import gguf_tokenizer
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.decoder import Decoder
from baton_engine.model.gguf import GGUFFile
from baton_engine.model.tokenizer import load_tokenizer
from baton_engine.model.weights import Weights
from baton_engine.ops.plain import PlainOps
from baton_engine.spec import ModelSpec
from tests.engine.gguf_files import write_gguf
from tests.engine.greedy import CPU, by_baton
from tests.engine.models import make_model

PROMPT = [5, 9, 70, 12, 33, 8]


def loaded(path: Path) -> tuple[ModelSpec, Weights]:
    checkpoint = Checkpoint(path, path.name)
    spec = load_spec(checkpoint)
    return spec, load_weights(checkpoint, spec, torch.float32)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("model"))
    return write_gguf(folder, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with biases": {"mlp_bias": False},
    "llama with its own head size": {},
    "llama with tied embeddings": {},
    "llama with linear rope": {},
    "llama with llama3 rope": {},
    "llama with yarn rope": {},
    "qwen2": {},
    "qwen3": {},
    # llama.cpp derives the scale of scores from the sizes.
    "gemma2": {"query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    "gemma3": {"query_pre_attn_scalar": 24},
    "phi3": {},
    "phi3 with a long context": {},
    "phi4 mini": {},
    "granite": {},
    "olmo2": {},
    "glm4": {},
    "smollm3": {},
    "qwen3 with experts": {},
    "mixtral": {},
    # llama.cpp has one limit of the activation.
    "gpt-oss": {"swiglu_limit": 7.0},
    "deepseek-v2": {},
    # llama.cpp stores one factor of YaRN.
    "deepseek-v2 with groups": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "mscale": 0.9,
            "mscale_all_dim": 0.9,
            "original_max_position_embeddings": 128,
        }
    },
    "deepseek-v3": {},
}
"""Variants that llama.cpp can store, and what its format requires of their configuration."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_gguf_answers_equal_those_of_its_source_folder(tmp_path: Path, variant: str) -> None:
    folder = make_model(tmp_path / "model", variant, **VARIANTS[variant])
    path = write_gguf(folder, tmp_path / "tiny.gguf")
    answers, contexts = [], []
    for source in (folder, path):
        spec, weights = loaded(source)
        contexts.append(spec.context)
        answers += by_baton(Decoder(spec, weights, PlainOps(spec), CPU), [PROMPT], 48, chunk=512)
    assert contexts[0] == contexts[1]
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].logprobs == pytest.approx(answers[1].logprobs, abs=1e-4)


def test_quantised_matrices_come_back_within_their_step(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    _, exact = loaded(folder)
    _, near = loaded(write_gguf(folder, tmp_path / "tiny.gguf", quantised=True))
    for ours, theirs in zip(exact.layers, near.layers, strict=True):
        for name in ("qkv", "output", "gate_up", "down"):
            wanted, got = getattr(ours, name), getattr(theirs, name)
            steps = wanted.abs().amax() / 127
            assert (wanted - got).abs().max() <= steps
            assert not torch.equal(wanted, got)


def test_gguf_tokenizer_equals_the_folders(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    path = write_gguf(folder, tmp_path / "tiny.gguf")
    ours, theirs = (
        load_tokenizer(Checkpoint(source, "tiny"), load_spec(Checkpoint(source, "tiny")))
        for source in (folder, path)
    )
    text = "<|bos|>The naïve baton 🎉 1234\n\n<|end|>"
    assert ours.encode(text) == theirs.encode(text)
    assert theirs.decode(theirs.encode(text), skip_special_tokens=False) == text
    talk = TemplateInput(messages=[{"role": "user", "content": text}])
    assert templates_of(ours).render(talk) == templates_of(theirs).render(talk)
    assert (ours.eos_ids, ours.bos_id) == (theirs.eos_ids, theirs.bos_id)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["HelloWorld", "'s", "Ġ12345", "!!", "ĊĊ", "Ġend"]),
        ("refact", ["HelloWorld", "'s", "Ġ", "1", "2", "3", "4", "5", "!!", "ĊĊ", "Ġend"]),
        ("dbrx", ["HelloWorld", "'s", "Ġ", "123", "45", "!!ĊĊ", "Ġend"]),
        ("glm4", ["HelloWorld", "'s", "Ġ", "123", "45", "!!ĊĊ", "Ġend"]),
        ("gpt-4o", ["Hello", "World's", "Ġ", "123", "45", "!!ĊĊ", "Ġend"]),
    ],
)
def test_gguf_text_is_split_as_in_llama_cpp(pre: str, pieces: list[str]) -> None:
    split = gguf_tokenizer.PRE_TOKENIZERS[pre]().pre_tokenize_str("HelloWorld's 12345!!\n\n end")
    assert [piece for piece, _ in split] == pieces


def test_gguf_cut_file_is_rejected_with_its_size(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(4, 600, 13), len(whole) // 2, len(whole) - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(SetupError, match=rf"truncated or damaged: it has {size} bytes"):
            load_spec(Checkpoint(cut, "cut"))


def _replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new, 1)

    return change


def _number(key: bytes, value: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        at = data.index(key) + len(key) + 4
        return data[:at] + struct.pack("<I", value) + data[at + 4 :]

    return change


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "Cannot read"),
    "another format": (lambda data: b"PK\x03\x04" + data[4:], "not a GGUF file"),
    "a version to come": (lambda data: data[:4] + struct.pack("<I", 9) + data[8:], "GGUF version 9"),
    "tensors without end": (
        lambda data: data[:8] + struct.pack("<Q", 1 << 60) + data[16:],
        "damaged|dimensions|unknown type",
    ),
    "keys without end": (lambda data: data[:16] + struct.pack("<Q", 1 << 60) + data[24:], "damaged|unknown"),
    "another architecture": (
        _replaced(b"llama", b"mamba"),
        "'mamba' is not supported.*llama, .*qwen2, qwen3",
    ),
    "a tensor less": (
        _replaced(b"blk.1.ffn_up.weight", b"blk.1.ffn_no.weight"),
        "model.layers.1.mlp.up_proj.weight is missing",
    ),
    "a key less": (_replaced(b"llama.block_count", b"llama.block_kount"), "lacks the metadata"),
    "absurd layers": (_number(b"llama.block_count", 4_000_000_000), "layers is 4000000000"),
    "no heads": (_number(b"llama.attention.head_count", 0), "heads is 0"),
    "another width": (_number(b"llama.feed_forward_length", 97), r"shape \[96, 64\].*\[97, 64\]"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_gguf_damaged_file_is_rejected_with_the_reason(file: Path, tmp_path: Path, name: str) -> None:
    change, message = DAMAGE[name]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(change(file.read_bytes()))
    with pytest.raises(SetupError, match=message):
        loaded(path)


def test_arrays_within_arrays_are_refused(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    nested = struct.pack("<Q", 1) + b"x" + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000
    path = tmp_path / "nested.gguf"
    path.write_bytes(data[:24] + nested + data[24:])
    with pytest.raises(SetupError, match="nested array"):
        load_spec(Checkpoint(path, "nested"))


def test_gguf_unknown_quantization_is_named(file: Path, tmp_path: Path) -> None:
    stored = GGUFFile(file).tensors["blk.0.attn_q.weight"]
    data = bytearray(file.read_bytes())
    at = data.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 8 * len(stored.shape)
    data[at : at + 4] = struct.pack("<I", 250)
    path = tmp_path / "strange.gguf"
    path.write_bytes(data)
    with pytest.raises(SetupError, match=r"blk\.0\.attn_q\.weight has the unknown type 250"):
        load_spec(Checkpoint(path, "strange"))


def test_gguf_header_is_parsed_once_until_its_release(file: Path) -> None:
    checkpoint = Checkpoint(file, "tiny")
    spec = load_spec(checkpoint)
    header = checkpoint.gguf
    load_tokenizer(checkpoint, spec)
    load_weights(checkpoint, spec, torch.float32)
    assert checkpoint.gguf is header
    checkpoint.release()
    checkpoint.release()
    assert checkpoint.gguf is not header
    assert checkpoint == Checkpoint(file, "tiny")


def test_gguf_rows_in_memory_are_apart_from_the_file(tmp_path: Path) -> None:
    """Rows are views of the mapped file. Changes of them stay in memory."""
    path = write_gguf(make_model(tmp_path / "model"), tmp_path / "tiny.gguf", quantised=True)
    before = path.read_bytes()
    rows = GGUFFile(path).rows("blk.0.ffn_down.weight")
    stored = GGUFFile(path).tensors["blk.0.ffn_down.weight"]
    assert rows.numpy().tobytes() == before[stored.offset : stored.offset + stored.size]
    rows.zero_()
    assert path.read_bytes() == before
