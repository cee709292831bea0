"""Passes that fail: without memory, on a broken device, or for one request."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_api.errors import InternalError
from baton_engine import failures
from baton_engine.batch import Batch
from baton_engine.failures import SmallerLimits, smaller_limits
from baton_engine.kv.cache import KVCache
from baton_engine.model.group import RankFailed
from baton_engine.pass_errors import FailureKind, failure_of
from baton_engine.requests import FinishReason
from tests.engine.fake_model import FakeModel
from tests.engine.serving import Recipient, Serving, prompt_of, request_of

ERRORS: list[tuple[BaseException, FailureKind]] = [
    (torch.AcceleratorError("CUDA error: device-side assert triggered"), FailureKind.LASTING),
    (RuntimeError("CUDA error: unspecified launch failure"), FailureKind.LASTING),
    (RuntimeError("HIP error: an illegal memory access was encountered"), FailureKind.LASTING),
    (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), FailureKind.LASTING),
    (
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `gemm`"),
        FailureKind.LASTING,
    ),
    (RankFailed("Tensor parallelism failed: rank 1 ended"), FailureKind.LASTING),
    (RuntimeError("CUDA driver error: an illegal memory access was encountered"), FailureKind.LASTING),
    (RuntimeError("CUDA driver error: out of memory"), FailureKind.MEMORY),
    (RuntimeError("HIP driver error: invalid device context"), FailureKind.LASTING),
    (
        torch.distributed.DistBackendError(
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, remote process exited or "
            "there was a network error, NCCL version 2.28.9"
        ),
        FailureKind.LASTING,
    ),
    (RuntimeError("NCCL Error 1: unhandled cuda error"), FailureKind.LASTING),
    (RuntimeError("NCCL error: Cuda failure 2 'out of memory'"), FailureKind.LASTING),
    (RuntimeError("CUSPARSE_STATUS_EXECUTION_FAILED when calling `cusparseSpMM`"), FailureKind.LASTING),
    (RuntimeError("cusparse error: CUSPARSE_STATUS_ALLOC_FAILED"), FailureKind.MEMORY),
    (RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR"), FailureKind.LASTING),
    (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), FailureKind.LASTING),
    (RuntimeError("rocblas_status_internal_error"), FailureKind.LASTING),
    (RuntimeError("NVRTC error: compilation failed"), FailureKind.LASTING),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), FailureKind.MEMORY),
    (torch.AcceleratorError("CUDA error: out of memory"), FailureKind.MEMORY),
    (RuntimeError("Triton Error [CUDA]: out of memory"), FailureKind.MEMORY),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), FailureKind.MEMORY),
    (MemoryError("no memory for the activations of 9 tokens"), FailureKind.MEMORY),
    (RuntimeError("a kernel failed"), FailureKind.OTHER),
    (RuntimeError("the cursor error of a status"), FailureKind.OTHER),
    (ValueError("the request is out of memory"), FailureKind.OTHER),
]


@pytest.mark.parametrize(("error", "kind"), ERRORS, ids=str)
def test_passes_lasting_errors_are_those_of_the_accelerator(error: BaseException, kind: FailureKind) -> None:
    assert failure_of(error) is kind


@pytest.mark.parametrize(
    ("tokens", "prompt_tokens", "rows", "expected"),
    [
        (4096, 4096, 1, SmallerLimits(chunk_tokens=2048)),
        (4096, 4000, 97, SmallerLimits(chunk_tokens=2096)),
        (120, 20, 101, SmallerLimits(chunk_tokens=116)),
        (116, 16, 101, SmallerLimits(running=50)),
        (100, 0, 100, SmallerLimits(running=50)),
        (2, 0, 2, SmallerLimits(running=1)),
        (17, 16, 2, SmallerLimits(running=1)),
        (16, 16, 1, None),
        (1, 0, 1, None),
    ],
)
def test_smaller_limits_halve_prompts_then_sequences(
    tokens: int, prompt_tokens: int, rows: int, expected: SmallerLimits | None
) -> None:
    assert smaller_limits(tokens, prompt_tokens, rows, least=16) == expected


def test_law_smaller_limits_end() -> None:
    chance = random.Random(3)
    for _ in range(500):
        rows = chance.randrange(1, 300)
        prompt_tokens = chance.choice((0, chance.randrange(1, 9000)))
        for _ in range(40):
            smaller = smaller_limits(prompt_tokens + rows, prompt_tokens, rows, least=16)
            if smaller is None:
                break
            if smaller.chunk_tokens is not None:
                assert smaller.chunk_tokens - rows < prompt_tokens
                prompt_tokens = smaller.chunk_tokens - rows
            if smaller.running is not None:
                assert 0 < smaller.running < rows
                rows = smaller.running
        else:
            pytest.fail("a pass got smaller 40 times")


class NarrowModel(FakeModel):
    """A model whose passes run out of memory beyond some tokens or rows."""

    def __init__(self, tokens: int = 10_000, rows: int = 10_000) -> None:
        super().__init__()
        self.most_tokens, self.most_rows = tokens, rows

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        if batch.size > self.most_tokens or len(batch.rows) > self.most_rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.21 GiB.")
        return super().forward(batch, cache)


def assert_all_answered(model: FakeModel, count: int, length: int, **limits: Any) -> Serving:
    """Serve many requests at once: none may fail, and each answer is that of the model alone."""
    with Serving(model=model, **limits) as serving:
        requests = [request_of(f"r{number}", length, seed=number) for number in range(count)]
        results = serving.run(*requests)
        assert results == [model.greedy(request.prompt, 8) for request in requests]
        assert serving.engine.snapshot().totals.out_of_memory > 0
        assert serving.fatal == []
        serving.at_rest()
    return serving


@pytest.mark.parametrize(
    ("tokens", "rows"), [(5, 10_000), (31, 10_000), (10_000, 1), (10_000, 3), (6, 2)], ids=str
)
def test_engine_out_of_memory_is_survived(tokens: int, rows: int) -> None:
    assert_all_answered(NarrowModel(tokens, rows), 8, 40)


def test_engine_out_of_memory_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert_all_answered(NarrowModel(tokens=16), 2, 30)
    assert "A forward pass of 32 tokens ran out of memory: CUDA out of memory" in caplog.text
    assert "Passes have at most 16 tokens and 16 requests from now on. Set --chunk-tokens" in caplog.text


def test_engine_limits_grow_again_after_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "RECOVERY_PASSES", 3)
    model = NarrowModel(tokens=9)
    with Serving(model=model) as serving:
        serving.run(request_of("a", 30))
        model.most_tokens = 10_000
        serving.run(request_of("b", 30, seed=1, max_tokens=20))
        model.sizes.clear()
        serving.run(request_of("c", 60, seed=2))
        assert model.sizes[0] == 32, "as at startup"


def test_engine_ends_only_a_request_that_needs_too_much(caplog: pytest.LogCaptureFixture) -> None:
    """A prompt of which not even a block fits ends. Others are served before and after it."""
    model = NarrowModel(tokens=3)
    with Serving(model=model) as serving:
        serving.submit(request_of("large", 30))
        assert isinstance(serving.ended("large").error, InternalError)
        small = request_of("small", 3, seed=1)
        assert serving.run(small) == [model.greedy(small.prompt, 8)]
        serving.at_rest()


def test_engine_out_of_memory_keeps_exported_blocks() -> None:
    """Announced blocks are not retracted; the prompt is computed in smaller chunks."""
    model = NarrowModel(tokens=8)
    with Serving(model=model) as serving:
        recipient = Recipient()
        serving.run(request_of("a", 30, export=recipient))
        assert [tokens for tokens, _ in recipient.announced][-1] == 30
        assert len({blocks for _, blocks in recipient.announced}) == 1
        serving.engine.release("a")
        serving.at_rest()


def test_engine_out_of_memory_with_drafts_drops_them() -> None:
    """A pass of one token and its drafts can be smaller. The blocks of the drafts are released."""
    model = NarrowModel(tokens=4)
    answer = tuple(model.greedy(prompt_of(8), 20))
    with Serving(model=model, speculation_tokens=8, chunk_tokens=4) as serving:
        request = request_of("a", 8, max_tokens=20, prediction=answer)
        assert serving.run(request) == [list(answer)]
        assert serving.engine.snapshot().totals.out_of_memory <= 1
        serving.at_rest()


def test_engine_accelerator_error_is_fatal_at_once() -> None:
    """No further pass touches a broken device, also for requests that were not in the failed one."""
    model = FakeModel()
    model.fail_on = 90
    model.failure = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    with Serving(model=model, max_running=1) as serving:
        model.go.clear()
        serving.submit(request_of("bad", prompt=(1, 90)), request_of("queued", 5))
        model.go.set()
        for name in ("bad", "queued"):
            ended = serving.ended(name)
            assert ended.finish is FinishReason.ERROR
            assert isinstance(ended.error, InternalError)
        assert model.passes == 1
        (reason,) = serving.fatal
        expected = "the accelerator failed permanently: CUDA error: an illegal memory access was encountered"
        assert reason == expected
