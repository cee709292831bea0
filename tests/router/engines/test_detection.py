"""Finding out the engine of a worker, and what the router reads of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from baton_api.workers import EngineKind
from tests.router.engines.fake_engine import FakeEngine
from tests.router.engines.fake_sglang import FakeSglang
from tests.router.engines.fake_trtllm import FakeTrtllm
from tests.router.engines.fake_vllm import FakeVllm
from tests.router.fake_worker import FakeWorker, WorkerRequest, plain
from tests.router.running import running_router


class FakeOpenAi(FakeEngine):
    """A server of which only `/v1/models` and chats are known."""

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "tiny"}, {"id": "small"}]})),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]

    async def _chat(self, request: Request) -> JSONResponse:
        self.bodies.append(await request.json())
        return JSONResponse({"choices": [], "usage": {"prompt_tokens": 7}})


@pytest.mark.parametrize(
    ("worker_type", "kind"),
    [
        (FakeWorker, EngineKind.BATON),
        (FakeVllm, EngineKind.VLLM),
        (FakeSglang, EngineKind.SGLANG),
        (FakeTrtllm, EngineKind.TRTLLM),
        (FakeOpenAi, EngineKind.OPENAI),
    ],
)
async def test_engine_is_found_by_asking(worker_type: Callable[[], FakeEngine], kind: EngineKind) -> None:
    async with worker_type() as worker, running_router([worker]) as router:
        load = router.router.workers.decode[0].health.load
        assert load is not None
        assert (load.engine, load.model) == (kind, "tiny")


class StartingWorker(FakeWorker):
    """Baton's worker that becomes ready between two requests: it serves other engines' paths too."""

    def __init__(self, refused: int) -> None:
        super().__init__()
        self.refused = refused
        self.pages = {
            "/server_info": lambda: b'{"disaggregation_mode": "null", "version": "0.5"}',
            "/v1/models": lambda: b'{"data": [{"id": "tiny"}]}',
        }

    async def _answer(
        self, request: WorkerRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        if self.refused:
            self.refused -= 1
            writer.write(plain(503, b"{}"))
            return True
        return await super()._answer(request, reader, writer)


@pytest.mark.parametrize("refused", range(6))
async def test_engine_of_a_starting_worker_is_not_guessed(refused: int) -> None:
    starting = StartingWorker(refused)
    async with starting, running_router([starting]) as router:
        load = router.router.workers.decode[0].health.load
        assert load is not None
        assert (load.engine, starting.refused) == (EngineKind.BATON, 0)


async def test_vllm_load_is_read_from_its_metrics() -> None:
    async with FakeVllm(block_size=16) as worker, running_router([worker]) as router:
        worker.adapters = ["pirate"]
        load = router.router.workers.decode[0].health.load
        assert load is not None
        assert (load.running, load.queued, load.total_blocks, load.free_blocks) == (1, 2, 400, 300)
        assert (load.block_size, load.max_model_len, load.version) == (16, 8192, "0.32.0")
        assert load.step_s == pytest.approx(0.02)
        assert load.control == "127.0.0.1:5600"


async def test_vllm_ranks_behind_one_port_are_one_worker() -> None:
    """Requests of the ranks add up, and so do their blocks, of which vLLM reports the sum at each rank."""
    async with FakeVllm(block_size=16) as worker:
        worker.ranks = 2
        source = {"enable_kv_cache_events": True, "publisher": "zmq"}
        worker.event_sources = {
            str(rank): {**source, "endpoint": f"tcp://*:{5557 + rank}"} for rank in range(worker.ranks)
        }
        async with running_router([worker]) as router:
            load = router.router.workers.decode[0].health.load
            assert load is not None
            assert (load.running, load.queued, load.total_blocks, load.free_blocks) == (2, 4, 400, 200)
            assert load.step_s == pytest.approx(0.02)
            assert not load.kv_events, "the caches of the ranks differ, and vLLM chooses the rank"


async def test_openai_server_serves_all_its_models_as_worker() -> None:
    async with FakeOpenAi() as server, running_router([], [], worker=[server.url], wait=True) as router:
        for model in ("tiny", "small"):
            response = await router.post({"model": model, "messages": [{"role": "user", "content": "x"}]})
            assert response.status_code == 200
        assert [body["model"] for body in server.bodies] == ["tiny", "small"]


async def test_openai_server_listed_as_prefill_worker_says_why() -> None:
    async with FakeOpenAi() as server, running_router([], [server]) as router:
        (worker,) = router.router.workers.prefill
        assert "--worker" in worker.reason


async def test_engine_setting_overrides_what_is_found() -> None:
    async with FakeVllm() as worker, running_router([worker], engine="openai") as router:
        load = router.router.workers.decode[0].health.load
        assert load is not None and load.engine is EngineKind.OPENAI
