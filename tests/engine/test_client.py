"""The engine as asyncio sees it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from baton_api.errors import PromptTooLarge
from baton_engine.client import TOGETHER, AsyncEngine
from baton_engine.requests import FinishReason
from baton_engine.scheduling.limits import EngineLimits
from tests.engine.fake_model import FakeModel, make_cache
from tests.engine.serving import prompt_of, request_of


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
async def client(model: FakeModel) -> AsyncIterator[AsyncEngine]:
    client = AsyncEngine(model, make_cache(65), EngineLimits(max_model_len=256, chunk_tokens=16))
    client.start()
    yield client
    await client.close()


async def free(client: AsyncEngine) -> None:
    """Wait until the engine has nothing left; only its snapshot shows that."""
    async with asyncio.timeout(60):
        while client.snapshot().running or client.snapshot().queued:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert client.snapshot().available_blocks == client.snapshot().total_blocks


async def test_generations_run_side_by_side(client: AsyncEngine) -> None:
    async def tokens(seed: int) -> list[int]:
        request = request_of(f"{seed}", 10, seed=seed)
        return [choice.token async for output in client.generate(request) for choice in output.tokens]

    results = await asyncio.gather(*(tokens(seed) for seed in range(12)))
    assert results == [FakeModel().greedy(prompt_of(10, seed), 8) for seed in range(12)]


@pytest.mark.parametrize("count", [1, 2, TOGETHER, TOGETHER + 1, 3 * TOGETHER])
async def test_client_joins_outputs_that_nobody_watches(client: AsyncEngine, count: int) -> None:
    request = request_of("a", 10, max_tokens=count)
    outputs = [output async for output in client.generate(request, together=True)]
    tokens = [choice.token for output in outputs for choice in output.tokens]
    assert tokens == FakeModel().greedy(prompt_of(10), count)
    assert [len(output.tokens) for output in outputs][:1] == [1], "the first token is not kept back"
    assert len(outputs) <= 1 + -(-count // TOGETHER)
    assert [output.finish for output in outputs] == [None] * (len(outputs) - 1) + [FinishReason.LENGTH]


async def test_client_joined_outputs_end_with_an_abort(client: AsyncEngine, model: FakeModel) -> None:
    outputs = []
    model.stops_at = 2
    async for output in client.generate(request_of("a", max_tokens=240), together=True):
        outputs.append(output)
        client.abort("a")
        model.resume()
    assert outputs[-1].finish is FinishReason.ABORT
    await free(client)


async def test_client_rejection_is_raised_before_iteration(client: AsyncEngine) -> None:
    small = AsyncEngine(FakeModel(), make_cache(3), EngineLimits(max_model_len=256))
    with pytest.raises(PromptTooLarge):
        small.generate(request_of("a", 100))
    await asyncio.wait_for(small.idle(), 60)


async def test_client_dropped_generation_is_aborted(client: AsyncEngine, model: FakeModel) -> None:
    """Its reader was cancelled between two outputs, or never began."""
    reading = asyncio.Event()
    model.stops_at = 2

    async def read() -> None:
        async for _ in client.generate(request_of("a", max_tokens=240)):
            reading.set()
            await asyncio.Event().wait()

    reader = asyncio.create_task(read())
    await reading.wait()
    reader.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reader
    client.generate(request_of("b", max_tokens=240))
    await asyncio.wait_for(client.idle(), 60)
    model.resume()
    await free(client)
    assert client.snapshot().totals.finished == {"abort": 2}


async def test_client_cancelled_reader_aborts_its_request(client: AsyncEngine, model: FakeModel) -> None:
    model.go.clear()
    generation = client.generate(request_of("a", max_tokens=240))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(generation), 0.01)
    model.resume()
    await asyncio.wait_for(client.idle(), 60)
    await free(client)
    assert client.snapshot().totals.finished == {"abort": 1}


async def test_client_closed_generation_aborts_and_ends(client: AsyncEngine, model: FakeModel) -> None:
    model.stops_at = 2
    async with contextlib.aclosing(client.generate(request_of("a", max_tokens=240))) as outputs:
        await anext(outputs)
    model.resume()
    with pytest.raises(StopAsyncIteration):
        await anext(outputs)
    await free(client)
    assert client.snapshot().totals.finished == {"abort": 1}


async def test_finish_and_abort_from_outside_end_the_iteration(client: AsyncEngine, model: FakeModel) -> None:
    for name, end, reason in (
        ("a", client.finish, FinishReason.STOP),
        ("b", client.abort, FinishReason.ABORT),
    ):
        last = None
        await free(client)
        model.stops_at = model.passes + 2
        async for output in client.generate(request_of(name, max_tokens=240)):
            last = output
            if len(output.tokens):
                end(name)
                model.resume()
        assert last is not None
        assert last.finish is reason
    await free(client)


async def test_idle_waits_for_the_last_generation(client: AsyncEngine) -> None:
    generation = client.generate(request_of("a"))
    waiter = asyncio.create_task(client.idle())
    await anext(generation)
    assert not waiter.done()
    async for _ in generation:
        pass
    await asyncio.wait_for(waiter, 60)


async def test_closing_ends_what_is_left_with_abort() -> None:
    client = AsyncEngine(FakeModel(), make_cache(65), EngineLimits(max_model_len=256))
    client.start()
    generation = client.generate(request_of("a", max_tokens=240))
    await anext(generation)
    await client.close()
    outputs = [output async for output in generation]
    assert outputs[-1].finish in (FinishReason.ABORT, FinishReason.LENGTH)
