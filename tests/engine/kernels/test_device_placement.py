"""
The engine on a fake GPU: tensors are where kernels need them, and the host waits only where it must.

The host must read the outputs of requests. A copy from pageable memory waits too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from baton_api.sampling import SamplingParams
from baton_engine.batch import Batch, BatchRow, StaticBatch
from baton_engine.engine import Engine
from baton_engine.kv.cache import BLOCK_SIZE, FLOAT8_CACHE, KVCache
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.decoder import Decoder
from baton_engine.model.encoder import Encoder, EncoderWeights, encoder_spec
from baton_engine.model.group import Group
from baton_engine.model.lora import LoraWeights, LowRank
from baton_engine.model.progress import SILENT
from baton_engine.model.shards import Shard
from baton_engine.ops.accelerator import AcceleratorOps
from baton_engine.ops.kernels.quantized import QuantizedLinear
from baton_engine.ops.kernels.sampling import select_on_device
from baton_engine.ops.kernels.scaled import works
from baton_engine.ops.plain import PlainOps
from baton_engine.ops.token_weights import GREEDY, TokenRule
from baton_engine.quantized import Format, Quantized, QuantizedPart, pack_float8
from baton_engine.requests import Output, Pooling
from baton_engine.sampling import sampler
from baton_engine.sampling.prompt_outputs import prompt_output_of
from baton_engine.sampling.state import SamplingState
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.spec import ExpertSpec
from baton_engine.transfer.integrity import block_checksums
from tests.engine.encoders import make_encoder
from tests.engine.fake_device import GPU, FakeDevice
from tests.engine.fake_streams import FakeCuda, on_device
from tests.engine.kernels.cases import DEVICE
from tests.engine.kernels.compiling import ROW_BYTES
from tests.engine.models import make_model
from tests.engine.random_weights import random_weights, tiny_spec
from tests.engine.serving import request_of

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="the kernels would be those of a real GPU")

BF16 = torch.bfloat16
CHANCE = TokenRule(1.0, top_p=0.9, number=0.5)
SINGLE = [BatchRow([5], start, range(1 + 3 * row, 4 + 3 * row), 1) for row, start in enumerate((3, 20, 40))]
PROMPT = BatchRow(range(40), 0, range(20, 23), 1)
BATCHES = {
    "one row": SINGLE[:1],
    "rows": SINGLE,
    "a chunk": [BatchRow(range(40), 0, range(20, 23), 0)],
    "rows and chunks": [*SINGLE, PROMPT, BatchRow(range(8), 32, range(24, 27), 3)],
}
MATRICES = ("qkv", "output", "gate_up", "down")
SPECS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"qk_norm": True, "qkv_bias": True},
    "olmo2": {"qk_norm": True, "qk_norm_joint": True, "pre_norm": False, "post_norm": True},
    "gemma2": {"sliding_window": 16, "attention_cap": 50.0, "logit_cap": 30.0, "activation": "gelu_tanh"},
    "llama4": {"sliding_window": 16, "window_chunks": True, "qk_norm_after": True, "temperature": (0.1, 8)},
    "wide heads": {"head_dim": 320},
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    # These fail without a GPU.
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with FakeDevice().running() as device, torch.inference_mode():
        yield device


def decoder(device: FakeDevice, ops: type[PlainOps] = AcceleratorOps, **changes: Any) -> Decoder:
    """Return a model on the device. Waits while it is loaded do not count."""
    spec = tiny_spec(**changes)
    model = Decoder(spec, random_weights(spec, BF16), ops(spec), GPU, dtype=BF16)
    device.waits.clear()
    return model


def compute(model: Decoder, rows: Sequence[BatchRow], kv_dtype: torch.dtype = BF16) -> None:
    cache = KVCache(model.spec, 32, kv_dtype, GPU)
    logits = model.forward(Batch(rows, BLOCK_SIZE, GPU), cache)
    assert (logits.device, logits.dtype, logits.shape[1]) == (GPU, torch.float32, model.spec.vocab)
    states = model.hidden_states(Batch(rows, BLOCK_SIZE, GPU), cache)
    assert model.project(states).shape == logits.shape


@pytest.mark.parametrize("ops", [PlainOps, AcceleratorOps])
@pytest.mark.parametrize("name", SPECS)
def test_passes_do_not_wait(name: str, ops: type[PlainOps], device: FakeDevice) -> None:
    model = decoder(device, ops, **SPECS[name])
    for rows in BATCHES.values():
        compute(model, rows)
    assert device.waits == []


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_captured_passes_do_not_wait(name: str, device: FakeDevice) -> None:
    """Nor do their inputs, which are tokens on the device in a pass that is launched ahead."""
    model = decoder(device, **SPECS[name])
    for rows in (1, 3, 8):
        static = StaticBatch(rows, 64, 4096, BLOCK_SIZE, GPU)
        model.forward(static, KVCache(model.spec, 32, FLOAT8_CACHE, GPU))
        batch = Batch(SINGLE[: min(rows, 2)], BLOCK_SIZE, GPU)
        static.load(batch.values, batch.tables)
        batch.feed(torch.zeros(batch.size, dtype=torch.int64, device=GPU))
        static.load(batch.values, batch.tables, batch.fed)
    assert device.waits == []


@pytest.mark.parametrize("choice", ["q8_0", "q4_0"])
def test_matrices_are_converted_on_the_device(choice: Any, device: FakeDevice, tmp_path: Path) -> None:
    checkpoint = Checkpoint(make_model(tmp_path), "tiny")
    weights = load_weights(checkpoint, load_spec(checkpoint), BF16, quantize=choice, device=GPU)
    matrices = [weights.embedding, *(getattr(layer, name) for layer in weights.layers for name in MATRICES)]
    for matrix in matrices:
        assert isinstance(matrix, Quantized)
        assert [part.rows.device for part in matrix.parts] == [GPU] * len(matrix.parts)


class Operations:
    """`ProcessGroupNCCL`: notes the operations."""

    class Options:
        pass

    def __init__(self, *_: Any) -> None:
        self.seen: list[tuple[str, Tensor]] = []

    def allreduce(self, tensors: list[Tensor]) -> Operations:
        return self._note("allreduce", tensors[0])

    def broadcast(self, tensors: list[Tensor]) -> Operations:
        return self._note("broadcast", tensors[0])

    def gather(self, outputs: list[list[Tensor]], parts: list[Tensor]) -> Operations:
        return self._note("gather", parts[0])

    def wait(self) -> None:
        return

    def _note(self, name: str, tensor: Tensor) -> Operations:
        assert tensor.is_contiguous()
        self.seen.append((name, tensor))
        return self


@pytest.mark.parametrize(
    ("name", "sums", "dtypes"),
    [("llama", 2, {BF16}), ("olmo2", 3, {BF16, torch.float32})],
    ids=["llama", "a norm over all heads"],
)
def test_ranks_sum_in_place_by_operations_that_nccl_knows(
    name: str,
    sums: int,
    dtypes: set[torch.dtype],
    device: FakeDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A captured pass has no kind of operation for which NCCL would have to connect, nor copies of parts."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Operations, raising=False)
    spec = tiny_spec(**SPECS[name])
    shard, group = Shard(0, 2), Group(Shard(0, 2), spec.vocab, GPU)
    group.connect(tmp_path / "store", 1.0)
    connected = {name for name, _ in group.backend.seen}
    part = shard.spec(spec)
    weights = random_weights(replace(part, vocab=len(shard.part(spec.vocab))), BF16)
    model = Decoder(part, weights, AcceleratorOps(part), GPU, group, BF16)
    group.backend.seen.clear()
    device.waits.clear()
    static = StaticBatch(3, 64, 4096, BLOCK_SIZE, GPU)
    group.broadcast(static.tokens)
    model.forward(static, KVCache(part, 32, BF16, GPU))
    names = [name for name, _ in group.backend.seen]
    assert names == ["broadcast", *["allreduce"] * (1 + sums * spec.layers), "gather"]
    assert set(names) == connected
    assert {tensor.dtype for kind, tensor in group.backend.seen if kind == "allreduce"} == dtypes
    assert device.waits == []
    given = torch.zeros((3, 8), dtype=BF16, device=GPU)
    assert group.sum(given) is given
    assert group.sum(given.T).shape == (8, 3)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # the table has addresses
def test_adapters_do_not_wait(device: FakeDevice) -> None:
    sizes = {"q": (64, 64), "k": (64, 32), "v": (64, 32), "output": (64, 64), "gate": (64, 96)}
    layer = {name: LowRank(torch.zeros(4, i), torch.zeros(o, 4)) for name, (i, o) in sizes.items()}
    model = decoder(device)
    adapter = model.prepare_adapter(LoraWeights(digest="", rank=4, layers=(layer, layer)))
    device.waits.clear()
    compute(model, [BatchRow(row.tokens, row.start, row.blocks, 1, adapter=adapter) for row in SINGLE])
    assert device.waits == []


EXPERTS = {
    "normalized": ExpertSpec(count=4, chosen=2, intermediate=32, normalized=True),
    "clamped": ExpertSpec(count=4, chosen=2, intermediate=32, clamp=7.0, slope=1.7),
    "weighted inputs": ExpertSpec(count=4, chosen=1, intermediate=32, weighs_inputs=True, shared=32),
    "in groups": ExpertSpec(count=8, chosen=2, intermediate=32, groups=4, chosen_groups=2, scoring="sigmoid"),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_do_not_wait(name: str, device: FakeDevice) -> None:
    model = decoder(device, experts=EXPERTS[name])
    for rows in BATCHES.values():
        compute(model, rows)
    assert device.waits == []


def test_plain_experts_wait_once_per_layer(device: FakeDevice) -> None:
    model = decoder(device, PlainOps, experts=EXPERTS["normalized"])
    model.forward(Batch(SINGLE, BLOCK_SIZE, GPU), KVCache(model.spec, 32, BF16, GPU))
    assert device.waits == ["plain.py group_by_expert: _to_copy from cuda"] * 2


@pytest.mark.parametrize("form", ROW_BYTES)
def test_quantized_experts_do_not_wait(form: Format, device: FakeDevice) -> None:
    ops, part = AcceleratorOps(tiny_spec()), torch.zeros(4 * 65, ROW_BYTES[form], dtype=torch.uint8)
    matrix = Quantized((QuantizedPart(form, part, group=128),), 4096).to(GPU)
    experts = ops.prepare_experts(matrix, torch.zeros(4, 65, dtype=BF16, device=GPU), 4)
    device.waits.clear()
    for rows in (1, 3, 100):
        groups = ops.group_by_expert(torch.zeros(rows, 2, dtype=torch.int64, device=GPU), 4)
        assert experts(torch.zeros(rows, 4096, dtype=BF16, device=GPU), groups).shape == (2 * rows, 65)
    assert device.waits == []
    # Grouping, and products in two heights of tiles.
    assert len({launch.variant for launch in device.launches}) == 3


@pytest.mark.slow
def test_latent_attention_does_not_wait(tmp_path: Path, device: FakeDevice) -> None:
    checkpoint = Checkpoint(make_model(tmp_path, "deepseek-v3"), "model")
    spec = load_spec(checkpoint)
    weights = load_weights(checkpoint, spec, BF16, device=GPU)
    assert weights.final_norm.device == GPU
    model = Decoder(spec, weights, AcceleratorOps(spec), GPU, dtype=BF16)
    device.waits.clear()
    for rows in BATCHES.values():
        compute(model, rows)
    assert device.waits == []


def test_encoders_do_not_wait(tmp_path: Path, device: FakeDevice) -> None:
    checkpoint = Checkpoint(make_encoder(tmp_path, "bert cross encoder"), "model")
    spec = encoder_spec(checkpoint)
    assert spec is not None
    model = Encoder(spec, EncoderWeights(checkpoint, spec, GPU, BF16, SILENT))
    device.waits.clear()
    rows = [BatchRow([3, 4, 5], 0, [1], 1), BatchRow([6] * 20, 0, [2, 3], 1)]
    scores = model.forward(Batch(rows, BLOCK_SIZE, GPU), KVCache(spec.model, 4, BF16, GPU))
    assert (scores.device, device.waits) == (GPU, [])


@pytest.mark.parametrize("form", ROW_BYTES)
def test_quantized_products_do_not_wait(form: Format, device: FakeDevice) -> None:
    part = QuantizedPart(form, torch.zeros(65, ROW_BYTES[form], dtype=torch.uint8), group=128)
    linear = QuantizedLinear(Quantized((part,), 4096).to(GPU), torch.zeros(65, dtype=BF16, device=GPU))
    device.waits.clear()
    for rows in (1, 3, 100):
        assert linear(torch.zeros(rows, 4096, dtype=BF16, device=GPU)).shape == (rows, 65)
    assert linear[torch.zeros(3, dtype=torch.int64, device=GPU)].shape == (3, 4096)
    assert device.waits == []


@pytest.mark.parametrize("group", [128, 4096])
def test_products_with_rounded_inputs_do_not_wait(group: int, device: FakeDevice) -> None:
    """Nor expand the matrix. torch's product in FP8 checks the sizes of fake tensors too."""
    matrix = pack_float8(torch.zeros(64, 4096, dtype=torch.uint8), torch.ones(64, 4096 // group), group)
    part = replace(matrix.parts[0], rounds_inputs=True)
    linear = QuantizedLinear(Quantized((part,), 4096).to(GPU), torch.zeros(64, dtype=BF16, device=GPU))
    device.waits.clear()
    device.launches.clear()
    assert linear(torch.zeros(300, 4096, dtype=BF16, device=GPU)).shape == (300, 64)
    assert (device.waits, [launch.kernel for launch in device.launches]) == ([], ["_round_rows"])


def test_trial_of_rounded_inputs_runs_on_the_device_of_the_matrix(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that loads a model may have another current device, such as the first one."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    works.cache_clear()
    matrix = pack_float8(torch.zeros(64, 256, dtype=torch.uint8), torch.ones(64, 1), 256)
    part = replace(matrix.parts[0], rounds_inputs=True)
    QuantizedLinear(Quantized((part,), 256).to(GPU))
    assert current == [GPU]
    assert [launch.kernel for launch in device.launches] == ["_round_rows"]


PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.4},
    "bias": {"logit_bias": ((3, 1.0), (5, -1.0))},
    "logprobs": {"logprobs": 3},
    "logprobs of ids": {"logprobs": 0, "logprob_ids": (3, 4)},
    "minimum length": {"min_tokens": 3, "stop_ids": (4, 5)},
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_selection_does_not_wait(name: str, device: FakeDevice) -> None:
    """Tokens and logprobs are in page-locked memory, and are read after an event."""
    states = [SamplingState(SamplingParams(**PARAMETERS[name]), (1, 2, 3)) for _ in range(2)]
    mask = np.full(4, -1, dtype=np.int32)
    selection = sampler.select(torch.zeros(2, 97, device=GPU), states, [mask, None])
    assert selection.tokens.device == GPU
    assert [choice.token for choice in selection.read() if choice is not None] == [0, 0]
    assert device.waits == []


def test_checksums_wait_for_the_sums_only(device: FakeDevice) -> None:
    cache = on_device(KVCache(tiny_spec(), 8, BF16, GPU), FakeCuda())
    assert block_checksums(cache, [1, 2, 5], sums=True) == [0, 0, 0]
    assert set(device.waits) == {"integrity.py _word_checksums: _local_scalar_dense"}


def test_prompt_outputs_wait_for_their_results_only(device: FakeDevice) -> None:
    request = request_of("r0", 9, prompt_logprobs=2)
    output = prompt_output_of(request)
    assert output is not None
    output.update(torch.zeros(8, 64, device=GPU), lambda states: torch.zeros(len(states), 97, device=GPU))
    assert set(device.waits) == {"prompt_outputs.py update: _to_copy from cuda"}
    device.waits.clear()
    pooled = prompt_output_of(request_of("r1", 9, pooling=Pooling.MEAN))
    assert pooled is not None
    pooled.update(torch.zeros(9, 64, device=GPU), lambda states: states)
    assert device.waits == []


def test_engine_waits_for_events_and_prompt_outputs_only(device: FakeDevice) -> None:
    """Passes are planned and launched ahead, rows end and join, with masks, penalties and logprobs."""
    model = decoder(device)
    cache = on_device(KVCache(model.spec, 40, BF16, GPU), FakeCuda())
    ended: list[str] = []

    def take(outputs: list[Output]) -> None:
        assert not any(output.error for output in outputs)
        ended.extend(output.request_id for output in outputs if output.finish is not None)
        if len(ended) == len(requests):
            engine.stop()

    limits = EngineLimits(max_model_len=64, max_running=3, chunk_tokens=32, overlap=True)
    engine = Engine(model, cache, limits, on_outputs=take)
    requests = [
        request_of("greedy", 40, max_tokens=6),
        request_of("top-p", 5, max_tokens=3, temperature=1.0, top_p=0.9, logprobs=2),
        request_of("penalties", 9, max_tokens=4, frequency_penalty=0.4),
        request_of("allowed", 9, max_tokens=4, allowed_ids=(0, 3)),
        request_of("late", 33, max_tokens=7),
        request_of("prompt", 50, max_tokens=2, prompt_logprobs=1),
    ]
    for request in requests:
        engine.submit(request)
    engine._run()
    assert sorted(ended) == sorted(request.id for request in requests)
    assert engine._pipeline.ahead > 0
    assert set(device.waits) == {"prompt_outputs.py update: _to_copy from cuda"}


def test_batches_of_any_size_need_no_other_variants(device: FakeDevice) -> None:
    """Triton compiles a variant in seconds, during which no request gets a token."""
    model = decoder(device)
    cache = KVCache(model.spec, 4, BF16, GPU)
    for rows in (1, 2, 3, 8, 16, 17, 64):
        for start in (0, 40, 300):
            blocks = [1] * -(-(start + rows) // BLOCK_SIZE)
            for tokens in ([0], [0] * rows):
                batch = [BatchRow(tokens, start, blocks, 1)] * rows
                model.forward(Batch(batch, BLOCK_SIZE, GPU), cache)
        for rule in (GREEDY, CHANCE):
            select_on_device(torch.zeros(rows, 128_256, device=GPU), [rule] * rows)
    variants = defaultdict(set)
    for launch in device.launches:
        variants[launch.kernel].add(launch.variant)
    # A norm may add a residual, attention is that of chunks or rows, and rows are greedy or not.
    # A norm may add a residual, attention is that of chunks or rows, rows are greedy or not, and weights have
    # numbers of outputs that are multiples of 16 or not.
    several = {"_rms_norm": 2, "_attention": 2, "_choose": 2, "_one_row": 2}
    assert {kernel: len(all_of) for kernel, all_of in variants.items() if len(all_of) > 1} == several


@pytest.mark.parametrize(
    ("wait", "message"),
    [
        (lambda x: x[torch.tensor([1])], "index with a tensor of the CPU"),
        (lambda x: x[[1, 2]], "_to_copy from cpu"),
        (lambda x: torch.tensor([1], device=GPU), "_to_copy from cpu"),
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: x.cpu(), "_to_copy from cuda"),
        (lambda x: torch.empty(4, pin_memory=True).copy_(x[0]), "copy_ from cuda"),
        (lambda x: torch.zeros(4).copy_(x[0], non_blocking=True), "copy_ from cuda"),
        (lambda x: torch.zeros(4).to(GPU, non_blocking=True), "_to_copy from cpu"),
    ],
)
def test_fake_device_finds_waits(wait: Any, message: str, device: FakeDevice) -> None:
    wait(torch.zeros(3, 4, device=GPU))
    assert [call.partition(": ")[2] for call in device.waits] == [message]


def test_fake_device_refuses_mixed_devices(device: FakeDevice) -> None:
    x = torch.zeros(3, 4, device=GPU)
    with pytest.raises(RuntimeError, match="found at least two devices"):
        x + torch.zeros(4)
    with pytest.raises(AssertionError, match="the size of the result of nonzero"):
        x.nonzero()
    model = decoder(device)
    with pytest.raises(AssertionError, match="weight of _rms_norm is on cpu"):
        model.ops.rms_norm(x, torch.zeros(4), 1e-5)
