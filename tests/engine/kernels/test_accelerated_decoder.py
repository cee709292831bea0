"""The whole decoder and engine with accelerators' kernels, and how many launches a step has."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton_api.workers import Role
from baton_engine.batch import Batch, BatchRow
from baton_engine.graphs import CaptureLimits, GraphModel, capture_limits, with_graphs
from baton_engine.kv.cache import BLOCK_SIZE, KVCache
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.decoder import Decoder
from baton_engine.model.lora import LoraWeights, LowRank
from baton_engine.ops.accelerator import AcceleratorOps
from baton_engine.ops.choice import create_ops
from baton_engine.ops.plain import PlainOps
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.settings import WorkerSettings
from baton_engine.spec import LatentSpec
from benchmarks.launches import EXPERTS, LATENT, Rows, per_layer, replayed, select
from benchmarks.launches import step as count_step
from tests.engine.fake_graphs import FakeGraphs
from tests.engine.fake_streams import on_device
from tests.engine.greedy import CPU, by_baton
from tests.engine.kernels.cases import DEVICE
from tests.engine.models import VOCAB, make_model
from tests.engine.random_weights import tiny_spec

pytestmark = [
    pytest.mark.skipif(DEVICE.type != "cpu", reason="these models are on a CPU"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),  # of numpy
]

PROMPTS = [[(3 + at * (7 + row) + at**2) % VOCAB for at in range(3 + 17 * row)] for row in range(4)]


def decoders(folder: Path, variant: str) -> tuple[Decoder, Decoder]:
    checkpoint = Checkpoint(make_model(folder, variant), variant)
    spec = load_spec(checkpoint)
    weights = load_weights(checkpoint, spec, torch.float32)
    return Decoder(spec, weights, AcceleratorOps(spec), CPU), Decoder(spec, weights, PlainOps(spec), CPU)


def assert_same(folder: Path, variant: str, prompts: list[list[int]], count: int, chunk: int) -> None:
    ours, plain = decoders(folder, variant)
    results = by_baton(ours, prompts, count, chunk)
    for result, expected in zip(results, by_baton(plain, prompts, count, 64), strict=True):
        assert result.tokens == expected.tokens
        assert result.logprobs == pytest.approx(expected.logprobs, abs=2e-4)


def test_accelerated_tokens_are_those_of_plain(tmp_path: Path) -> None:
    assert_same(tmp_path, "qwen3", [PROMPTS[1][:6]], 2, 4)


VARIANTS = (
    "qwen3",
    "llama with one key head",
    "llama with biases",
    "mistral with a sliding window",
    "gemma2",
    "gemma3",
    "phi4 mini",
    "granite",
    "olmo2",
    "glm4",
    "smollm3",
    "gpt-oss",
    "llama 4",
    "deepseek-v3",
    "qwen3 with experts in some layers",
    "mixtral",
)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_accelerated_tokens_of_families(variant: str, tmp_path: Path) -> None:
    assert_same(tmp_path, variant, PROMPTS[::3], 3, 24)


def test_accelerated_decode_continues_in_copied_blocks(tmp_path: Path) -> None:
    """A decode worker has the prompt's blocks at other places, behind which others left NaN."""
    model, _ = decoders(tmp_path, "llama")
    prompt, here, elsewhere = PROMPTS[1], [1, 2], [4, 3]
    one, other = (KVCache(model.spec, 5, torch.float32, CPU) for _ in range(2))
    other.kv.fill_(torch.nan)
    model.forward(Batch([BatchRow(prompt, 0, here, 1)], BLOCK_SIZE, CPU), one)
    for number, (source, target) in enumerate(zip(here, elsewhere, strict=True)):
        used = min(BLOCK_SIZE, len(prompt) - number * BLOCK_SIZE)
        other.kv[target, ..., :used, :] = one.kv[source, ..., :used, :]
    for step in range(3):
        logits, copied = (
            model.forward(Batch([BatchRow([7], len(prompt) + step, blocks, 1)], BLOCK_SIZE, CPU), cache)
            for blocks, cache in ((here, one), (elsewhere, other))
        )
        assert torch.equal(logits, copied)


@pytest.mark.parametrize(
    ("changes", "plain", "ours"),
    [
        pytest.param({}, (41, 16), (10, 7), id="llama"),
        pytest.param({"qk_norm": True}, (43, 16), (10, 7), id="qwen3"),
        pytest.param({"experts": EXPERTS}, (101, 8), (19, 7), id="experts"),
        pytest.param(LATENT, (47, 16), (14, 7), id="deepseek"),
    ],
)
def test_decode_step_launches(changes: dict[str, Any], plain: tuple[int, int], ours: tuple[int, int]) -> None:
    """Launches per layer, and per step beside those, of plain operations and of the kernels."""
    assert [per_layer(ops, **changes) for ops in (PlainOps, AcceleratorOps)] == [plain, ours]


def test_decode_step_launches_with_kept_weights() -> None:
    """As many as with expanded ones, and a captured pass is one."""
    assert per_layer(AcceleratorOps, quantized=True, **LATENT) == (14, 7)
    assert replayed("graph", AcceleratorOps, select, quantized=True, **LATENT).beside == 1


def test_decode_step_launches_of_a_rank() -> None:
    """A layer has two sums over ranks of a launch each."""
    assert per_layer(AcceleratorOps, ranks=2) == (12, 19)
    counted = replayed("graph", AcceleratorOps, select, ranks=2)
    assert (counted.layer, counted.beside, counted.greedy, counted.copies, counted.waits) == (0, 1, 2, 3, 1)


def test_decode_step_launches_of_adapters() -> None:
    """Six launches of a layer more, whatever adapters the rows have."""
    counts = [per_layer(AcceleratorOps, rows=Rows((3, 20), adapters)) for adapters in (1, 2)]
    assert counts == [(16, 7)] * 2


def test_decode_step_moves_each_input_once() -> None:
    """Copies: tokens, positions, slots, blocks, wanted rows, the plan of attention, rules of selection."""
    counted = count_step("kernels", AcceleratorOps, select)
    assert (counted.greedy, counted.chance, counted.copies, counted.waits) == (2, 5, 7, 1)


def test_replayed_step_is_one_launch_and_its_selection() -> None:
    """Copies: tokens with positions and slots, blocks, rules of selection."""
    counted = replayed("graph", AcceleratorOps, select)
    assert (counted.layer, counted.beside, counted.greedy, counted.copies, counted.waits) == (0, 1, 2, 3, 1)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["qwen3", "gemma2", "gpt-oss", "qwen3 with experts", "deepseek-v3"])
def test_captured_decoder_gives_the_same_logits(variant: str, tmp_path: Path) -> None:
    """Gemma has two plans in a pass: layers with a window and without."""
    model, _ = decoders(tmp_path, variant)
    cache, again = (KVCache(model.spec, 16, torch.float32, CPU) for _ in range(2))
    prompts = PROMPTS[:3]
    blocks = [list(range(1 + 4 * row, 5 + 4 * row)) for row in range(3)]
    limits = CaptureLimits(rows=4, memory=2**30, seconds=3600)
    engine = EngineLimits(max_model_len=64, max_running=4)
    graphs = with_graphs(model, on_device(again, FakeGraphs()), engine, limits, lambda: 2**30)
    rows = [BatchRow(prompt, 0, blocks[row], 1) for row, prompt in enumerate(prompts)]
    for one, kv in ((model, cache), (graphs, again)):
        one.forward(Batch(rows, BLOCK_SIZE, CPU), kv)
    for step, count in enumerate((3, 3, 2, 1)):
        batch = Batch(
            [BatchRow([7 + step], len(prompts[row]) + step, blocks[row], 1) for row in range(count)],
            BLOCK_SIZE,
            CPU,
        )
        expected, replayed_logits = model.forward(batch, cache), graphs.forward(batch, again)
        torch.testing.assert_close(replayed_logits, expected, atol=1e-4, rtol=1e-4)
    drafted = Batch([BatchRow([9, 8, 7], len(prompts[1]) + 4, blocks[1], 3)], BLOCK_SIZE, CPU)
    expected, replayed_logits = model.forward(drafted, cache), graphs.forward(drafted, again)
    torch.testing.assert_close(replayed_logits, expected, atol=1e-4, rtol=1e-4)
    assert isinstance(graphs, GraphModel) and graphs.replays == 5
    torch.testing.assert_close(again.kv, cache.kv, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_captured_rows_have_their_adapters(tmp_path: Path) -> None:
    """Passes with adapters are captured beside the others, and serve whatever adapters their rows have."""
    model, _ = decoders(tmp_path, "qwen3")
    generator = torch.Generator().manual_seed(4)
    spec = model.spec
    width, values = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim

    def low_rank(inputs: int, outputs: int) -> LowRank:
        return LowRank(
            *(torch.randn(shape, generator=generator) / 4 for shape in ((3, inputs), (outputs, 3)))
        )

    def adapter() -> Any:
        layer = {"v": low_rank(spec.hidden, values), "output": low_rank(width, spec.hidden)}
        return model.prepare_adapter(LoraWeights(digest="", rank=3, layers=(layer,) * spec.layers))

    cache, again = (KVCache(spec, 16, torch.float32, CPU) for _ in range(2))
    limits = CaptureLimits(rows=2, memory=2**30, seconds=3600, adapter_rank=3)
    engine = EngineLimits(max_model_len=64, max_running=2)
    graphs = with_graphs(model, on_device(again, FakeGraphs()), engine, limits, lambda: 2**30)
    assert isinstance(graphs, GraphModel)
    first, second = adapter(), adapter()
    seen = []
    for position, chosen in enumerate(((first, None), (None, second), (second, first), (None, None))):
        rows = [BatchRow([7], position, [1 + row], 1, adapter=one) for row, one in enumerate(chosen)]
        batch = Batch(rows, BLOCK_SIZE, CPU)
        expected, replayed_logits = model.forward(batch, cache), graphs.forward(batch, again)
        torch.testing.assert_close(replayed_logits, expected, atol=1e-4, rtol=1e-4)
        seen.append(graphs.replays)
    assert seen == [1, 2, 3, 3]  # the last one is a replay of the passes without adapters


def test_models_whose_host_reads_results_are_not_captured(tmp_path: Path) -> None:
    captures = {}
    for variant in ("qwen3", "gpt-oss", "deepseek-v3"):
        captures[variant] = [decoder.capturable for decoder in decoders(tmp_path / variant, variant)]
    assert captures == {variant: [True, False] for variant in captures}


@pytest.mark.parametrize(("role", "rows"), [(Role.BOTH, 8), (Role.DECODE, 8), (Role.PREFILL, 0)])
def test_workers_that_decode_capture_passes(role: Role, rows: int, tmp_path: Path) -> None:
    model, _ = decoders(tmp_path, "qwen3")
    assert capture_limits(WorkerSettings(model="m", role=role, graph_rows=8), model).rows == rows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "Triton kernels compute norms, activations, rotation and attention"),
        (
            LATENT | {"latent": LatentSpec(q_rank=0, kv_rank=513, plain=16, value=16)},
            "latents of 513 and 8 rotated dimensions, above 512 and 64",
        ),
        ({"head_dim": 320}, "heads of 320 dimensions, above 256"),
    ],
)
def test_operations_of_an_accelerator_are_logged(
    changes: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        ops = create_ops(tiny_spec(**changes), torch.device("cuda"), torch.bfloat16, {})
    assert isinstance(ops, AcceleratorOps)
    assert message in caplog.text


def test_disabled_kernels_leave_accelerators_to_torch(caplog: pytest.LogCaptureFixture) -> None:
    ops = create_ops(tiny_spec(), torch.device("cuda"), torch.bfloat16, {"BATON_KERNELS": "off"})
    assert not isinstance(ops, AcceleratorOps)
    assert "BATON_KERNELS disables the kernels" in caplog.text


def test_kernels_run_on_the_device_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device of the thread, which is the first one."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    second = torch.device("cuda:1")
    batch: Any = SimpleNamespace(positions=SimpleNamespace(device=second))
    AcceleratorOps(tiny_spec()).begin(batch)
    assert chosen == [second]
