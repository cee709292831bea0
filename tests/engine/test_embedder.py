"""Models that make vectors, and their pooling: by their files, or by a flag."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from baton_api.errors import SetupError
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.embedder import Embedder, NoEmbeddings, embedder_of
from baton_engine.model.gguf import GGUFFile
from baton_engine.model.tokenizer import load_tokenizer
from baton_engine.quantized import floats
from baton_engine.requests import Pooling
from tests.engine.gguf_files import write_gguf
from tests.engine.models import EOS, make_model

PACKAGE = "sentence_transformers.models."
STEPS = ("Transformer", "Pooling", "Normalize")


def checkpoint(
    folder: Path,
    steps: tuple[str, ...] | None = STEPS,
    pooling: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
) -> Checkpoint:
    """Write the files of a model's folder that are read."""
    (folder / "config.json").write_text(json.dumps(config or {}))
    if steps is not None:
        modules = [
            {
                "idx": number,
                "name": str(number),
                "path": f"{number}_{step}" if number else "",
                "type": PACKAGE + step,
            }
            for number, step in enumerate(steps)
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return Checkpoint(folder, "tiny")


def modes(*on: str) -> dict[str, Any]:
    names = (
        "cls_token",
        "mean_tokens",
        "max_tokens",
        "mean_sqrt_len_tokens",
        "weightedmean_tokens",
        "lasttoken",
    )
    return {"word_embedding_dimension": 64} | {f"pooling_mode_{name}": name in on for name in names}


ABLE: dict[str, tuple[dict[str, Any], Embedder]] = {
    "last token": (
        {"pooling": modes("lasttoken") | {"include_prompt": True}},
        Embedder(pooling=Pooling.LAST),
    ),
    "mean": ({"pooling": modes("mean_tokens")}, Embedder(pooling=Pooling.MEAN)),
    "the newer name": (
        {"pooling": {"embedding_dimension": 64, "pooling_mode": "lasttoken"}},
        Embedder(pooling=Pooling.LAST),
    ),
    "a list of one": ({"pooling": {"pooling_mode": ["mean"]}}, Embedder(pooling=Pooling.MEAN)),
    "not normalized": (
        {"pooling": modes("mean_tokens"), "steps": STEPS[:2]},
        Embedder(pooling=Pooling.MEAN, normalized=False),
    ),
    "shortened at will": (
        {"pooling": modes("lasttoken"), "config": {"is_matryoshka": True}},
        Embedder(pooling=Pooling.LAST, shortens=True),
    ),
    "shortened to some lengths": (
        {"pooling": modes("lasttoken"), "config": {"matryoshka_dimensions": [64, 16, 32]}},
        Embedder(pooling=Pooling.LAST, shortens=True, lengths=(16, 32, 64)),
    ),
}


@pytest.mark.parametrize(("files", "expected"), ABLE.values(), ids=ABLE.keys())
def test_embedder_pooling_follows_the_folder(
    tmp_path: Path, files: dict[str, Any], expected: Embedder
) -> None:
    assert embedder_of(checkpoint(tmp_path, **files), "auto") == expected


UNABLE: dict[str, tuple[dict[str, Any], str]] = {
    "made to generate": ({"steps": None}, "--pooling mean"),
    "by the first token": ({"pooling": modes("cls_token")}, "first token"),
    "two ways at once": ({"pooling": modes("mean_tokens", "lasttoken")}, "mean_tokens and lasttoken"),
    "no way at all": ({"pooling": modes()}, "nothing"),
    "an unknown way": ({"pooling": modes("max_tokens")}, "'max_tokens'"),
    "a layer after the pooling": (
        {"pooling": modes("mean_tokens"), "steps": ("Transformer", "Pooling", "Dense", "Normalize")},
        "'Dense'",
    ),
    "no pooling": ({"steps": ("Transformer",)}, "no pooling"),
    "looking ahead": ({"pooling": modes("mean_tokens"), "config": {"is_causal": False}}, "bidirectional"),
}


@pytest.mark.parametrize(("files", "reason"), UNABLE.values(), ids=UNABLE.keys())
def test_embedder_unsupported_folder_has_a_reason(tmp_path: Path, files: dict[str, Any], reason: str) -> None:
    embedder = embedder_of(checkpoint(tmp_path, **files), "auto")
    assert isinstance(embedder, NoEmbeddings) and reason in embedder.reason


def test_embedder_flag_overrides_the_files(tmp_path: Path) -> None:
    mean = checkpoint(tmp_path, steps=STEPS[:2], pooling=modes("mean_tokens"))
    assert embedder_of(mean, "last", shortens=True) == Embedder(
        pooling=Pooling.LAST, normalized=False, shortens=True
    )
    assert isinstance(embedder_of(mean, "none"), NoEmbeddings)


@pytest.mark.parametrize("choice", ["mean", "last"])
def test_embedder_flag_makes_a_generating_model_embed(tmp_path: Path, choice: str) -> None:
    assert embedder_of(checkpoint(tmp_path, steps=None), choice) == Embedder(pooling=Pooling(choice))


def test_embedder_bidirectional_model_is_rejected(tmp_path: Path) -> None:
    ahead = checkpoint(tmp_path, steps=None, config={"use_bidirectional_attention": True})
    with pytest.raises(SetupError, match="--pooling mean"):
        embedder_of(ahead, "mean")


DAMAGED: dict[str, dict[str, Any]] = {
    "a pooling without its file": {},
    "dimensions that are no numbers": {"steps": None, "config": {"matryoshka_dimensions": ["many"]}},
    "dimensions that are no list": {"steps": None, "config": {"matryoshka_dimensions": 7}},
}


@pytest.mark.parametrize("files", DAMAGED.values(), ids=DAMAGED.keys())
def test_embedder_damaged_folder_names_its_file(tmp_path: Path, files: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match=r"config\.json"):
        embedder_of(checkpoint(tmp_path, **files), "auto")


def test_modules_of_another_shape_or_outside_are_refused(tmp_path: Path) -> None:
    here = checkpoint(tmp_path, steps=None)
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(SetupError, match=r"modules\.json"):
        embedder_of(here, "auto")
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "x.Pooling", "path": "../../elsewhere"}]))
    with pytest.raises(SetupError, match="outside"):
        embedder_of(here, "auto")
    (tmp_path / "modules.json").write_text(json.dumps(["Transformer", 5]))
    assert isinstance(embedder_of(here, "auto"), NoEmbeddings)


@pytest.mark.parametrize(
    ("number", "expected"),
    [(None, None), (0, None), (1, Pooling.MEAN), (2, None), (3, Pooling.LAST), (4, None), (9, None)],
)
def test_embedder_gguf_pooling_number_is_read(
    tmp_path: Path, number: int | None, expected: Pooling | None
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "qwen3")
    if number is not None:
        writer.add_uint32("qwen3.pooling_type", number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    embedder = embedder_of(Checkpoint(tmp_path / "tiny.gguf", "tiny.gguf"), "auto")
    assert embedder == Embedder(pooling=expected) if expected else isinstance(embedder, NoEmbeddings)


def test_gguf_tokenizer_with_add_eos_ends_each_text(tmp_path: Path) -> None:
    """As embedding models want it that pool by the last token."""
    folder = make_model(tmp_path / "folder")
    for name, ends in (("plain", False), ("ended", True)):
        path = write_gguf(folder, tmp_path / f"{name}.gguf", adds_eos=ends)
        assert GGUFFile(path).metadata.get("tokenizer.ggml.add_eos_token", False) is ends
        file = Checkpoint(path, name)
        ids = load_tokenizer(file, load_spec(file)).encode("The baton")
        assert (ids[-1] == EOS) is ends and EOS not in ids[:-1] and len(ids) > ends


def test_checkpoint_without_head_is_read_as_headless(tmp_path: Path) -> None:
    whole = Checkpoint(make_model(tmp_path / "whole", "mistral"), "whole")
    bare = Checkpoint(make_model(tmp_path / "bare", "mistral"), "bare")
    model: Any = transformers.MistralForCausalLM.from_pretrained(whole.path)
    (bare.path / "model.safetensors").unlink()
    model.model.save_pretrained(bare.path)
    assert json.loads((bare.path / "config.json").read_text())["architectures"] == ["MistralModel"]
    spec = load_spec(bare)
    assert (spec.architecture, spec.headless, load_spec(whole).headless) == (
        "MistralForCausalLM",
        True,
        False,
    )
    theirs = load_weights(whole, load_spec(whole), torch.float32)
    ours = load_weights(bare, spec, torch.float32)
    assert torch.equal(floats(ours.embedding), floats(theirs.embedding))
    assert torch.equal(ours.final_norm, theirs.final_norm)
    assert torch.equal(floats(tuple(ours.layers)[1].output), floats(tuple(theirs.layers)[1].output))
