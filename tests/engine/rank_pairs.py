"""A prefill worker and a decode worker in this process, each with its own number of ranks, joined by NIXL."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from baton_decode.main import decode
from baton_engine.requests import RemotePrefill, Request
from baton_engine.settings import WorkerSettings
from baton_engine.worker import Worker, open_worker
from baton_prefill.main import prefill


class RankPair:
    """The decode worker `worker`, and the prefill worker as it names it."""

    def __init__(self, worker: Worker, remote: Callable[[str], RemotePrefill]) -> None:
        self.worker = worker
        self.remote = remote
        """The prefill worker, for the request with this id."""

    async def answer(self, request: Request) -> list[int]:
        """Return the tokens of an answer whose prompt came from the prefill worker."""
        outputs = [output async for output in self.worker.client.generate(request)]
        relay = outputs[0].relay
        assert relay is not None, "the prompt did not come from the prefill worker"
        assert relay.transport.startswith("nixl")
        return [choice.token for output in outputs for choice in output.tokens]


@contextlib.asynccontextmanager
async def open_pair(
    settings: Callable[..., WorkerSettings], model: Path, ranks: tuple[int, int], **given: Any
) -> AsyncIterator[RankPair]:
    """Start a pair with `ranks` for prompts and for generation; `settings` takes model, ranks and options."""
    given |= {"transfer": "nixl", "local_prefill_tokens": 0, "transfer_deadline_s": 60}
    async with (
        open_worker(settings(model, ranks[0], role="prefill", **given)) as source,
        prefill(source) as serving,
        open_worker(settings(model, ranks[1], role="decode", **given)) as worker,
        decode(worker) as fetching,
    ):
        assert source.compatibility == worker.compatibility
        remote = fetching.remote
        assert remote is not None
        yield RankPair(worker, lambda id: remote(serving.control, "", id))
