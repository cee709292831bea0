"""The engine from submission to the last token, on its own thread."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton_api.errors import (
    ContextTooLong,
    InternalError,
    InvalidRequest,
    NotReady,
    Overloaded,
    PromptTooLarge,
)
from baton_engine.batch import Batch
from baton_engine.failures import FAILURES_LIMIT
from baton_engine.forward_pass import schedule
from baton_engine.kv.block_pool import BlockPool
from baton_engine.kv.cache import KVCache
from baton_engine.model.decoder import Model
from baton_engine.pass_pipeline import PassPipeline
from baton_engine.requests import FinishReason, Request
from baton_engine.sampling.token_masks import MaskFiller
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.scheduling.scheduler import Scheduler
from baton_engine.scheduling.sequence import Sequence
from tests.engine.fake_model import FakeModel, make_cache
from tests.engine.fake_streams import FakeCuda, on_device
from tests.engine.serving import TIMEOUT_S, Serving, prompt_of, request_of
from tests.engine.test_interruption import until

NUMBERS = itertools.count()


def test_engine_request_gives_greedy_tokens_until_length() -> None:
    with Serving() as serving:
        request = request_of("a", 10)
        assert serving.run(request) == [serving.model.greedy(request.prompt, 8)]
        outputs = serving.outputs["a"]
        assert [len(output.tokens) for output in outputs] == [1] * 8
        assert [output.finish for output in outputs] == [None] * 7 + [FinishReason.LENGTH]
        serving.at_rest()


def test_engine_stop_id_ends_a_request_and_is_its_last_token() -> None:
    with Serving() as serving:
        tokens = serving.model.greedy(prompt_of(10), 8)
        stop = tokens[3]
        expected = tokens[: tokens.index(stop) + 1]
        request = request_of("a", 10, stop_ids=frozenset([stop]))
        assert serving.run(request) == [expected]
        last = serving.ended("a")
        assert (last.finish, last.stop_id) == (FinishReason.STOP, stop)


def test_stop_ids_wait_for_min_tokens() -> None:
    with Serving() as serving:
        stop = serving.model.greedy(prompt_of(10), 1)[0]
        request = request_of("a", 10, stop_ids=frozenset([stop]), min_tokens=3)
        tokens = serving.run(request)[0]
        assert tokens == serving.reference(request)
        assert stop not in tokens[:3]


def test_max_tokens_of_1_gives_one_token() -> None:
    """Peers' defect 30: it gave two."""
    with Serving() as serving:
        assert serving.run(request_of("a", max_tokens=1)) == [serving.model.greedy(prompt_of(10), 1)]
        assert serving.ended("a").finish is FinishReason.LENGTH


def test_engine_stop_id_as_first_token_ends_the_request() -> None:
    """Peers' defect 30: the first token ignored stop criteria."""
    with Serving() as serving:
        stop = serving.model.greedy(prompt_of(10), 1)[0]
        assert serving.run(request_of("a", stop_ids=frozenset([stop]))) == [[stop]]
        assert serving.ended("a").finish is FinishReason.STOP


def test_engine_full_context_ends_a_request_with_length() -> None:
    with Serving(max_model_len=12) as serving:
        assert len(serving.run(request_of("a", 10, max_tokens=50))[0]) == 2
        assert serving.ended("a").finish is FinishReason.LENGTH


def test_engine_finish_ends_with_stop_and_keeps_blocks_cached() -> None:
    with Serving() as serving:
        serving.model.go.clear()
        serving.submit(request_of("a", 9, max_tokens=500))
        assert serving.model.inside.wait(TIMEOUT_S)
        serving.engine.finish("a")
        serving.model.go.set()
        assert serving.ended("a").finish is FinishReason.STOP
        assert serving.at_rest().cached_blocks == 2


@pytest.mark.parametrize("length", range(1, 18))
def test_engine_cached_prefix_is_used_but_for_the_last_token(length: int) -> None:
    """Peers' defects 2, 7 and 18: a full hit, and hits of every length, give the same tokens."""
    with Serving() as serving:
        prompt = prompt_of(16)
        serving.run(request_of("first", prompt=prompt))
        request = request_of("again", prompt=prompt[:length])
        if length == 17:
            request = request_of("again", prompt=(*prompt, 5))
        assert serving.run(request) == [serving.model.greedy(request.prompt, 8)]
        assert serving.outputs["again"][0].cached_tokens == (len(request.prompt) - 1) // 4 * 4


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    with Serving() as serving:
        prompt = prompt_of(10)
        answer = tuple(serving.run(request_of("a", prompt=prompt, max_tokens=20))[0])
        serving.run(request_of("b", prompt=(*prompt, *answer, 3, 4, 5)))
        # 33 tokens, of which the last of the answer was never computed: 7 whole blocks.
        assert serving.outputs["b"][0].cached_tokens == 28


def test_another_salt_shares_nothing() -> None:
    with Serving() as serving:
        serving.run(request_of("a", 16, salt="one"))
        serving.run(request_of("b", 16, salt="two"), request_of("c", 16, salt="one"))
        assert serving.outputs["b"][0].cached_tokens == 0
        assert serving.outputs["c"][0].cached_tokens == 12


def test_engine_requests_that_share_a_new_block_are_both_right() -> None:
    """Hazard 3: the first copy stays known, the other is freed."""
    with Serving(chunk_tokens=64) as serving:
        serving.model.go.clear()
        requests = [request_of(f"{index}", 16) for index in range(3)]
        serving.submit(*requests)
        serving.model.go.set()
        for request in requests:
            assert serving.tokens(request.id) == serving.model.greedy(request.prompt, 8)
        assert serving.at_rest().cached_blocks == 5  # 16 + 7 tokens


def test_engine_chunk_is_published_only_once_computed() -> None:
    """Hazard 1: a twin that is admitted while the first computes must not see unwritten blocks."""
    with Serving(chunk_tokens=16) as serving:
        first, twin = request_of("first", 40), request_of("twin", 40)
        assert serving.run(first, twin) == [serving.model.greedy(first.prompt, 8)] * 2


def test_engine_long_prompt_does_not_stall_generation() -> None:
    with Serving(blocks=257, chunk_tokens=16) as serving:
        serving.submit(request_of("stream", 4, max_tokens=200))
        serving.wait(lambda: len(serving.so_far("stream")) >= 2)
        serving.submit(request_of("long", 400, max_tokens=1))
        serving.ended("long")
        # 400 tokens at 15 a pass, since the stream has one of the 16.
        before, after = 2, len(serving.so_far("stream"))
        assert after - before >= 26
        assert max(serving.model.sizes) == 16


def test_engine_batch_as_large_as_the_chunk_admits_prompts() -> None:
    with Serving(chunk_tokens=4) as serving:
        requests = [request_of(f"{index}", 6, seed=index, max_tokens=30) for index in range(6)]
        for request, tokens in zip(requests, serving.run(*requests), strict=True):
            assert tokens == serving.model.greedy(request.prompt, 30)


def test_engine_max_running_bounds_the_batch_in_order() -> None:
    with Serving(max_running=2, chunk_tokens=100) as serving:
        names = [f"{index}" for index in range(6)]
        serving.model.go.clear()
        serving.submit(*(request_of(name, 8, seed=int(name)) for name in names))
        serving.model.go.set()
        for name in names:
            serving.ended(name)
        assert list(serving.outputs) == names
        assert max(serving.model.sizes[1:]) <= 16


# --- Refusals ---


def test_engine_prompt_as_long_as_the_context_is_rejected() -> None:
    with Serving(max_model_len=20) as serving, pytest.raises(ContextTooLong, match="20 tokens"):
        serving.submit(request_of("a", 20))


def test_engine_prompt_larger_than_the_cache_is_rejected() -> None:
    with Serving(blocks=5) as serving:
        with pytest.raises(PromptTooLarge, match=r"5 KV blocks of 4 tokens.* has 4"):
            serving.submit(request_of("a", 17))
        serving.run(request_of("b", 16, max_tokens=1))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (request_of("a", prompt=()), "no tokens"),
        (request_of("a", prompt=(1, 97)), "outside 0 to 96"),
        (request_of("a", prompt=(1, -1)), "outside 0 to 96"),
        (request_of("a", logit_bias=((97, 1.0),)), "token id 97 is outside 0 to 96"),
    ],
)
def test_engine_request_that_would_break_a_pass_is_rejected(request_: Request, message: str) -> None:
    with Serving() as serving, pytest.raises(InvalidRequest, match=message):
        serving.submit(request_)


def test_engine_full_queue_rejects_with_overloaded() -> None:
    with Serving(max_running=1, max_queued=3) as serving:
        serving.model.go.clear()
        serving.submit(request_of("0"))
        assert serving.model.inside.wait(TIMEOUT_S)
        serving.submit(*(request_of(f"{index}") for index in range(1, 4)))
        with pytest.raises(Overloaded, match="3 requests are waiting and the limit is 3"):
            serving.submit(request_of("4"))
        serving.model.go.set()
        for index in range(4):
            serving.ended(f"{index}")
        serving.run(request_of("4"))


def test_engine_one_tenant_leaves_room_in_the_queue() -> None:
    """It may fill 80 % of what it and absent tenants have, also while its requests are on their way."""
    with Serving(max_running=1, max_queued=10) as serving:
        serving.model.go.clear()
        serving.submit(request_of("0", tenant="many"))
        assert serving.model.inside.wait(TIMEOUT_S)
        serving.submit(*(request_of(f"{index}", tenant="many") for index in range(1, 9)))
        with pytest.raises(Overloaded, match="8 requests are waiting and the limit is 8"):
            serving.submit(request_of("9", tenant="many"))
        serving.submit(request_of("another", tenant="few"))
        serving.model.go.set()
        assert serving.ended("another").finish is FinishReason.LENGTH
        serving.ended("8")
        serving.run(request_of("10", tenant="many"))


def test_engine_id_is_reusable_only_after_its_end() -> None:
    with Serving() as serving:
        serving.model.go.clear()
        serving.submit(request_of("a"))
        with pytest.raises(InvalidRequest, match="already being served"):
            serving.submit(request_of("a"))
        serving.model.go.set()
        serving.ended("a")
        serving.at_rest()
        serving.outputs.clear()
        serving.run(request_of("a"))


# --- Failures ---


def test_engine_failed_pass_ends_only_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    model = FakeModel()
    model.fail_on = 90
    with Serving(model=model) as serving:
        serving.submit(request_of("bad", prompt=(1, 90)))
        error = serving.ended("bad").error
        assert isinstance(error, InternalError)
        assert "a kernel failed" in caplog.text
        assert "bad" in caplog.text
        serving.at_rest()
        model.fail_on = None
        assert serving.run(request_of("good")) == [model.greedy(prompt_of(10), 8)]


def fail(serving: Serving, times: int) -> None:
    """So many passes fail, one after another."""
    for _ in range(times):
        name = f"bad{next(NUMBERS)}"
        serving.submit(request_of(name, prompt=(1, 90)))
        assert isinstance(serving.ended(name).error, InternalError)


def test_engine_failed_passes_in_a_row_are_fatal() -> None:
    """A worker that fails every pass ends, so that a new process replaces it; a good pass resets this."""
    model = FakeModel()
    model.fail_on = 90
    with Serving(model=model) as serving:
        for _ in range(2):
            fail(serving, FAILURES_LIMIT - 1)
            serving.run(request_of(f"good{next(NUMBERS)}"))
        assert serving.fatal == []
        fail(serving, FAILURES_LIMIT + 1)
        (reason,) = serving.fatal
        assert reason == "the last 5 forward passes failed, the last one with: a kernel failed"


def test_passes_time_includes_work_the_device_has_queued() -> None:
    """An accelerator's forward returns at once; the pass has ended when the device has."""
    model, cache, now = FakeModel(), make_cache(8), 0.0
    scheduler = Scheduler(BlockPool(8), EngineLimits(max_model_len=16), cache.block_size)
    scheduler.add(Sequence(request_of("a"), cache.block_size, 3))
    plan = scheduler.plan()

    def synchronize() -> None:
        nonlocal now
        assert model.passes == 1, "the device is waited for before it has got its work"
        now += 2.0

    masks = MaskFiller(model.spec.vocab)
    pipeline = PassPipeline(model, cache, scheduler, masks, lambda: now, synchronize, depth=0)
    with torch.inference_mode(), contextlib.closing(masks):
        launched = pipeline.launch(plan, [schedule(*plan.prefills[0])], started=0.0)
        assert pipeline.read(launched).seconds == 2.0


def test_overlapping_passes_time_includes_work_the_device_has_queued() -> None:
    cuda, now = FakeCuda(), 0.0

    class Slow(FakeModel):
        def forward(self, batch: Batch, cache: KVCache) -> Tensor:
            cuda.default.queued.append(compute)
            return super().forward(batch, cache)

    def compute() -> None:
        nonlocal now
        now += 2.0

    def wrap(model: Model, cache: KVCache) -> Model:
        on_device(cache, cuda)
        return model

    with Serving(model=Slow(), wrap=wrap, clock=lambda: now, overlap=True) as serving:
        serving.run(request_of("a", max_tokens=3))
        snapshot = serving.engine.snapshot()
    assert (snapshot.forward_times.count, snapshot.forward_times.total_s) == (3, 6.0)
    assert snapshot.step_times.total_s == 6.0


def test_engine_failed_pass_publishes_no_block() -> None:
    model = FakeModel()
    model.fail_on = 90
    with Serving(model=model) as serving:
        prompt = (*prompt_of(8), 90)
        serving.submit(request_of("bad", prompt=prompt))
        serving.ended("bad")
        model.fail_on = None
        assert serving.run(request_of("good", prompt=prompt)) == [model.greedy(prompt, 8)]
        assert serving.outputs["good"][0].cached_tokens == 0


def test_nan_logits_end_their_own_request_alone() -> None:
    model = FakeModel()
    model.nan_on = 90
    with Serving(model=model) as serving:
        serving.model.go.clear()
        serving.submit(request_of("bad", prompt=(1, 2, 90)), request_of("good"))
        serving.model.go.set()
        assert serving.ended("bad").finish is FinishReason.ERROR
        assert serving.tokens("good") == model.greedy(prompt_of(10), 8)
        serving.at_rest()


def test_engine_stop_aborts_requests_and_rejects_new_ones() -> None:
    serving = Serving(max_running=1)
    with serving:
        serving.model.go.clear()
        serving.submit(request_of("running", max_tokens=500), request_of("waiting"))
        assert serving.model.inside.wait(TIMEOUT_S)
        stopper = threading.Thread(target=serving.engine.stop)
        stopper.start()
        late = itertools.count()

        def rejects() -> bool:
            try:
                serving.submit(request_of(f"late {next(late)}"))
            except NotReady:
                return True
            return False

        until(rejects)
        serving.model.go.set()
        stopper.join()
        assert serving.ended("running").finish is FinishReason.ABORT
        assert serving.ended("waiting").finish is FinishReason.ABORT
        with pytest.raises(NotReady, match="shutting down"):
            serving.submit(request_of("late"))


# --- Figures ---


def test_engine_snapshot_totals_add_up() -> None:
    with Serving(chunk_tokens=16) as serving:
        prompt = prompt_of(30)
        serving.run(request_of("a", prompt=prompt))
        serving.run(request_of("b", prompt=prompt))
        totals = serving.at_rest().totals
        assert totals.prompt_tokens_computed == 30 + 2
        assert totals.prompt_tokens_cached == 28
        assert totals.generated_tokens == 16
        assert totals.finished == {"length": 2}
        assert totals.local_prefills == {"no_prefill_worker": 2}
        snapshot = serving.engine.snapshot()
        assert snapshot.step_times.count == totals.steps == serving.model.passes
        assert snapshot.forward_times.total_s <= snapshot.step_times.total_s
        assert snapshot.generated_per_s > 0


def test_engine_batch_log_has_the_fields_format(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="baton_engine.batches")
    with Serving() as serving:
        serving.run(request_of("a", 10, max_tokens=42))
    assert caplog.messages[0] == (
        "Prefill batch. #new-seq: 1, #new-token: 10, #cached-token: 0, token usage: 0.05, "
        "#running-req: 0, #queue-req: 0"
    )
    (decode,) = [line for line in caplog.messages if line.startswith("Decode")]
    assert decode.startswith(
        "Decode batch. #running-req: 1, #token: 51, token usage: 0.20, gen throughput (token/s): "
    )
    assert decode.endswith(", #queue-req: 0")


def test_engine_idle_uses_no_processor_time() -> None:
    with Serving() as serving:
        serving.run(request_of("a"))

        def processor_s() -> float:
            before = time.process_time()
            time.sleep(0.3)
            return time.process_time() - before

        # A loop that looks for work takes this in each span; a slow end of what was before does so in one.
        assert any(processor_s() < 0.1 for _ in range(5))
        serving.run(request_of("b"))


def test_sampled_tokens_are_the_same_in_any_company_and_chunking() -> None:
    def requests() -> list[Request]:
        return [
            request_of(
                f"{seed}",
                3 + seed * 5 % 40,
                seed=seed,
                max_tokens=12,
                temperature=0.9 if seed % 3 else 0.0,
                top_p=0.9 if seed % 2 else 1.0,
                repetition_penalty=1.2 if seed % 5 == 0 else 1.0,
                frequency_penalty=0.4 if seed % 4 == 0 else 0.0,
            )
            for seed in range(32)
        ]

    with Serving(blocks=600) as serving:
        expected = [
            serving.reference(replace(request, sampling=replace(request.sampling, seed=9)))
            for request in requests()
        ]
    for chunk in (16, 64, 1024):
        for company in (1, 7, 32):
            with Serving(blocks=600, chunk_tokens=chunk, max_running=32) as serving:
                everyone = [
                    replace(request, sampling=replace(request.sampling, seed=9)) for request in requests()
                ]
                for start in range(0, 32, company):
                    part = everyone[start : start + company]
                    assert serving.run(*part) == expected[start : start + company]
                serving.at_rest()
