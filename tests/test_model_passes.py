"""Times of `benchmarks.model_passes`: prompts and streams of one worker delay one another by whole passes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from benchmarks import virtual_time
from benchmarks.model_passes import GAP_S, Chunks, PassWorker
from benchmarks.model_worker import Text, Timing

TIMING = Timing()
PROMPT = Text(8192, tuple(range(16)))
STREAM = Text(512, (100,))
ANSWER = 1001


def worker(hidden: bool) -> PassWorker:
    return PassWorker(TIMING, 100, 512, lambda changed: None, Chunks(mixed=256, hidden=hidden))


async def generated(model: PassWorker) -> float:
    """Seconds from one token to the next, on average."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    await model.generate(STREAM, ANSWER, lambda count: None)
    return (loop.time() - began) / (ANSWER - 1)


async def computed(model: PassWorker) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    done = await model.compute(PROMPT)
    assert done.cached == 0 and done.queue_s < 0.02
    return loop.time() - began


def test_work_alone_takes_as_long_as_by_the_timing() -> None:
    prompt_s = virtual_time.run(on_one_worker(computed))
    assert prompt_s == pytest.approx(TIMING.prefill_s(8192, 8192), rel=1e-3)
    assert virtual_time.run(on_one_worker(generated)) == pytest.approx(TIMING.token_step_s(1, 512), rel=1e-3)


async def on_one_worker(work: Callable[[PassWorker], Awaitable[float]]) -> float:
    return await work(worker(hidden=True))


@pytest.mark.parametrize("hidden", [True, False])
def test_prompt_and_stream_of_one_worker_delay_one_another(hidden: bool) -> None:
    async def both() -> tuple[float, float, PassWorker]:
        model = worker(hidden)
        stream = asyncio.create_task(generated(model))
        await asyncio.sleep(1.0)
        prompt_s = await computed(model)
        return prompt_s, await stream, model

    prompt_s, token_s, model = virtual_time.run(both())
    alone_s, step_s, passes = TIMING.prefill_s(8192, 8192), TIMING.token_step_s(1, 512), 8192 / 256
    extra_s = step_s - (TIMING.step_s if hidden else 0)
    assert prompt_s == pytest.approx(alone_s + passes * extra_s, abs=step_s)
    delay_s = alone_s + passes * (extra_s - step_s)
    assert token_s == pytest.approx(step_s + delay_s / (ANSWER - 1), rel=1e-2)
    assert model.gaps.total() == ANSWER - 1
    last_s = 256 * (TIMING.token_s + TIMING.pair_s * (8192 - 128)) + extra_s
    beside = [gap * GAP_S for gap in model.gaps.elements() if gap * GAP_S > 1.1 * step_s]
    assert len(beside) == passes
    assert last_s <= max(beside) + GAP_S and max(beside) < last_s + TIMING.start_s
