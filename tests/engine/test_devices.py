"""The device of a worker, and the data type that it chooses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton_api.errors import SetupError
from baton_engine.devices import device_of, has_bfloat16, unmeasured
from baton_engine.ops.choice import create_ops, dtype_of
from baton_engine.ops.plain import PlainOps
from baton_engine.settings import WorkerSettings
from baton_engine.streams import DeviceStreams
from baton_engine.worker import open_worker
from tests.engine.fake_streams import FakeCuda
from tests.engine.random_weights import tiny_spec

GPUS = {
    "V100": ((7, 0), False, False),
    "T4": ((7, 5), False, False),
    "A100": ((8, 0), False, True),
    "L4": ((8, 9), False, True),
    "H100": ((9, 0), False, True),
    "B200": ((10, 0), False, True),
    "MI210": ((9, 0), True, True),
    "MI300X": ((9, 4), True, True),
}
"""Compute capability, whether it is ROCm's, and whether it has bfloat16."""


@pytest.mark.parametrize(
    ("name", "expected"), [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")]
)
def test_device_of_a_gpu_has_a_number(name: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses to make "cuda" the current device, and then no captured pass could be replayed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    device = device_of(name, 1)
    assert device == torch.device(expected)
    if device.type == "cuda":
        DeviceStreams(device, FakeCuda()).use()


@pytest.mark.parametrize("name", GPUS)
def test_gpu_has_bfloat16_by_its_capability(name: str) -> None:
    capability, rocm, expected = GPUS[name]
    assert has_bfloat16(capability, rocm=rocm) is expected


def test_older_gpu_logs_that_it_has_no_bfloat16(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert dtype_of("auto", torch.device("cuda")) == torch.float32
    assert "Tesla T4 (compute capability 7.5) has no products of bfloat16" in caplog.text


def test_older_gpu_computes_with_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    ops = create_ops(tiny_spec(), torch.device("cuda"), torch.float32, {})
    assert type(ops) is PlainOps
    assert "Triton does not support GPUs with compute capability 7.5" in caplog.text


UNMEASURED: dict[str, tuple[tuple[str, int, bool], str]] = {
    "the measured one": (("NVIDIA H200", 1, False), ""),
    "several of them": (("NVIDIA H200", 2, False), "never been measured on several GPUs, only on one"),
    "another of its kind": (("NVIDIA H200 NVL", 1, False), "never been measured on NVIDIA H200 NVL, only on"),
    "another one": (("NVIDIA L4", 2, False), "never been measured on NVIDIA L4, only on one NVIDIA H200"),
    "one of AMD": (("AMD Instinct MI300X", 1, True), "with ROCm, nor on AMD Instinct MI300X, only on one"),
}


@pytest.mark.parametrize("name", UNMEASURED)
def test_gpu_that_was_not_measured_is_named(name: str) -> None:
    (gpu, ranks, rocm), expected = UNMEASURED[name]
    sentence = unmeasured(gpu, ranks, rocm=rocm)
    assert expected in sentence
    assert bool(sentence) is bool(expected)
    assert "\n" not in sentence


@pytest.mark.parametrize(("gpu", "times"), [("NVIDIA H100 80GB HBM3", 1), ("NVIDIA H200", 0)])
async def test_worker_logs_at_its_start_that_its_gpu_was_not_measured(
    gpu: str, times: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Before it loads the model, which is missing here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    settings = WorkerSettings(model=str(tmp_path / "missing"), dtype="bfloat16")
    with pytest.raises(SetupError, match="missing"):
        async with open_worker(settings):
            pass
    assert [record.levelname for record in caplog.records if "never been measured" in record.message] == (
        ["WARNING"] * times
    )


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_given_dtype_is_used_on_any_device(name: str) -> None:
    for device in ("cpu", "cuda"):
        assert dtype_of(name, torch.device(device)) == getattr(torch, name)
