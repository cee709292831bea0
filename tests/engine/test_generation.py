"""Sampling defaults from a model's own generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton_api.errors import SetupError
from baton_engine.model.checkpoint import Checkpoint, SamplingDefaults, sampling_defaults

OPENAI = SamplingDefaults(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)


def defaults(folder: Path, config: Any) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return sampling_defaults(Checkpoint(folder, "m"))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, OPENAI),
        ({"eos_token_id": 2, "do_sample": False}, OPENAI),
        (
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
            SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05),
        ),
        ({"temperature": 0, "min_p": 0.1}, SamplingDefaults(temperature=0, min_p=0.1)),
        ({"top_k": -1, "top_p": None}, OPENAI),
    ],
)
def test_sampling_defaults_file_overrides_openais_defaults(
    tmp_path: Path, config: dict[str, Any], expected: SamplingDefaults
) -> None:
    assert defaults(tmp_path, config) == expected


def test_sampling_defaults_without_file_are_openais(tmp_path: Path) -> None:
    assert sampling_defaults(Checkpoint(tmp_path, "m")) == OPENAI
    assert sampling_defaults(Checkpoint(tmp_path / "m.gguf", "m")) == OPENAI


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        pytest.param("SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432, (0.2, 0.9), id="wherever it lies"),
        pytest.param("SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_431, (1.0, 1.0), id="another file"),
        pytest.param("model.gguf", 98_362_432, (1.0, 1.0), id="another model"),
    ],
)
def test_sampling_defaults_of_the_built_in_model_are_its_publishers(
    tmp_path: Path, name: str, size: int, expected: tuple[float, float]
) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(size)
    given = sampling_defaults(Checkpoint(tmp_path / name, "m"))
    assert (given.temperature, given.top_p) == expected


@pytest.mark.parametrize(
    "config",
    [
        {"temperature": 3},
        {"temperature": "hot"},
        {"top_p": -0.1},
        {"top_k": 1.5},
        {"top_k": True},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"temperature": float("nan")},
    ],
)
def test_sampling_defaults_invalid_value_names_the_flag(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match=next(iter(config))) as caught:
        defaults(tmp_path, config)
    assert "--sampling-defaults openai" in caught.value.message
