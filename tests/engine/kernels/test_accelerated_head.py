"""
A draft head with accelerators' kernels, and in captured passes: on the device here, else by Triton's
interpreter with a fake of CUDA's graphs. Torch computes the expected results on the CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton_engine.batch import Batch, BatchRow
from baton_engine.graphs import CaptureLimits, GraphModel, GraphPasses, head_with_graphs, with_graphs
from baton_engine.kv.cache import BLOCK_SIZE, KVCache
from baton_engine.ops.accelerator import AcceleratorOps
from baton_engine.scheduling.limits import EngineLimits
from tests.engine.draft_heads import CountingDecoder, decoder_of, make_eagle3, make_mtp
from tests.engine.fake_graphs import FakeGraphs
from tests.engine.fake_streams import on_device
from tests.engine.greedy import CPU
from tests.engine.kernels.cases import DEVICE
from tests.engine.models import make_model

pytestmark = [
    pytest.mark.slow,  # the interpreter computes two models
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),  # of numpy
]

LIMITS = CaptureLimits(rows=4, memory=2**30, seconds=3600)
ENGINE = EngineLimits(max_model_len=64, max_running=2, speculation_tokens=1)
PROMPTS = [[5, 9, 7, 3, 8, 11, 30, 14, 2, 40, 41, 17, 19, 20, 33], [6, 8, 44]]
BLOCKS = [[1, 3], [2, 4]]


TOLERANCE = 1e-4 if DEVICE.type == "cpu" else 1e-3
"""A device adds products of fp32 in another order."""


def rows_of(device: torch.device, tokens: list[list[int]], starts: list[int], wanted: bool) -> Batch:
    rows = zip(tokens, starts, BLOCKS, strict=True)
    counted = [BatchRow(row, start, blocks, len(row) * wanted) for row, start, blocks in rows]
    return Batch(counted, BLOCK_SIZE, device)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_captured_head_computes_what_a_plain_one_does(kind: str, tmp_path: Path) -> None:
    """
    Two prompts, two draft tokens of each, and their verification. One is rejected. Then the next draft.

    Draft tokens of the first row cross the border of two blocks. The MTP layer has latent attention.
    """
    head_folder = None
    if kind == "mtp":
        folder = make_mtp(tmp_path / "model", num_hidden_layers=2)
    else:
        folder = make_model(tmp_path / "model", num_hidden_layers=3)
        head_folder = make_eagle3(tmp_path / "head", folder, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    plain = decoder_of(folder, head_folder)
    kernels, captured = (decoder_of(folder, head_folder, AcceleratorOps, DEVICE) for _ in range(2))
    caches = [KVCache(plain.spec, 6, torch.float32, device) for device in (CPU, DEVICE, DEVICE)]
    for model in (plain, kernels, captured):
        assert model.drafts is not None
        model.drafts.reserve(8)
    assert captured.drafts is not None
    if DEVICE.type == "cpu":
        on_device(caches[2], FakeGraphs())
    graphs = with_graphs(captured, caches[2], ENGINE, LIMITS, lambda: 2**30)
    passes = head_with_graphs(captured.drafts, caches[2], ENGINE, LIMITS, lambda: 2**30)
    assert isinstance(graphs, GraphModel) and isinstance(passes, GraphPasses)

    def each(batch_of: tuple[list[list[int]], list[int]], what: str) -> None:
        results = []
        for number, model in enumerate((plain, kernels, captured)):
            assert model.drafts is not None
            batch = rows_of(caches[number].kv.device, *batch_of, wanted=what != "prompt")
            if what == "continue":
                batch.continue_states()
            drafts = passes if number == 2 else model.drafts
            target = graphs if number == 2 else model
            of = drafts if what in ("draft", "continue") else target
            results.append(of.forward(batch, caches[number]).cpu().clone())
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], atol=TOLERANCE, rtol=TOLERANCE)

    def keep(rows: list[int], blocks: list[int]) -> None:
        models: tuple[CountingDecoder, ...] = (plain, kernels, captured)
        for model, cache in zip(models, caches, strict=True):
            assert model.drafts is not None
            model.drafts.keep(rows, blocks, cache)

    lengths = [len(prompt) for prompt in PROMPTS]
    each((PROMPTS, [0, 0]), "prompt")
    each(([[50], [60]], lengths), "draft")
    each(([[51], [61]], [length + 1 for length in lengths]), "continue")
    each(([[50, 51], [60, 61]], lengths), "verify")
    keep([2], [BLOCKS[1][0]])  # the second row's draft token is rejected
    each(([[52], [62]], [lengths[0] + 2, lengths[1] + 1]), "draft")
    assert graphs.replays == 1
    assert passes.replays == 3
    for cache in caches[1:]:
        torch.testing.assert_close(cache.kv[1:].cpu(), caches[0].kv[1:], atol=TOLERANCE, rtol=TOLERANCE)
    passes.close()
    graphs.close()
