"""
A worker's API over the real engine, a real tokenizer of single bytes and a model that writes a given script.

The chat template ends a prompt with `<|assistant|>`; after it the model writes `script`, or
printable letters drawn from the fake model's table. A prompt for completions can end with it as well.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx
import msgspec
import torch
from starlette.types import ASGIApp, Receive, Scope, Send
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from baton_api.workers import Load, Role
from baton_engine.api.app import Served, create_app
from baton_engine.api.served import OtherProcesses
from baton_engine.client import AsyncEngine
from baton_engine.frontends.engine_service import EngineService, FrontendConnection
from baton_engine.frontends.pool import hello_of
from baton_engine.frontends.process import Frontend, is_served
from baton_engine.frontends.remote_engine import EngineLink
from baton_engine.grammar.grammars import Grammars
from baton_engine.kv.cache import KVCache
from baton_engine.metrics.exposition import WorkerMetrics
from baton_engine.model.tokenizer import Tokenizer
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.settings import WorkerSettings
from tests.engine import fake_model
from tests.engine.fake_model import FakeModel

MODEL = "lab/tiny"
split_by_default = False
"""Whether the APIs of this test have a frontend; the fixture `split` sets it."""
CONTEXT = 512
BLOCK_SIZE = 4
SPECIALS = ("<|end|>", "<|assistant|>", "<|user|>", "<|system|>")
TEMPLATE = (
    "{% for tool in tools or () %}<|system|>{{ tool.function.name }}<|end|>{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if mood is defined %}{{ mood }}{% endif %}"
    "{% if messages[0].content == 'impossible' %}{{ raise_exception('no such talk') }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USER = [{"role": "user", "content": "Hi"}]


def make_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIALS[0], additional_special_tokens=list(SPECIALS[1:])
    )
    tokenizer.chat_template = TEMPLATE
    spec = dataclasses.replace(fake_model.SPEC, vocab=len(alphabet) + len(SPECIALS), context=CONTEXT)
    return Tokenizer(tokenizer, spec)


TOKENIZER = make_tokenizer()
GRAMMARS = Grammars(TOKENIZER, compile_s=1.0)
"""One for all tests: it starts a process of its own when it is first asked."""
atexit.register(GRAMMARS.close)
END = TOKENIZER.eos_ids[0]
GO = TOKENIZER.encode("<|assistant|>")[0]
LETTERS = [TOKENIZER.encode(letter)[0] for letter in "abcdefghijklmnopqrstuvwxyz "]


class TalkingModel(FakeModel):
    """Says `script` and then the end of sequence, or draws letters without end."""

    def __init__(self) -> None:
        super().__init__(dataclasses.replace(fake_model.SPEC, vocab=TOKENIZER.vocab_size, context=CONTEXT))
        self._others = torch.ones(self.spec.vocab, dtype=torch.bool)
        self._others[LETTERS] = False
        self.script: str | None = None

    def logits(self, tokens: list[int]) -> Tensor:
        if self.script is None:
            return super().logits(tokens).masked_fill(self._others, -1e4)
        written = len(tokens) - 1 - max(at for at, token in enumerate(tokens) if token == GO)
        script = [*TOKENIZER.encode(self.script), END]
        logits = torch.full((self.spec.vocab,), -50.0)
        logits[script[min(written, len(script) - 1)]] = 50.0
        return logits


@dataclass(frozen=True)
class Api:
    served: Served
    app: ASGIApp
    model: TalkingModel
    http: httpx.AsyncClient
    """Without a network between."""

    async def chat(self, **body: Any) -> httpx.Response:
        return await self.http.post(
            "/v1/chat/completions", json={"model": MODEL, "messages": USER, "max_tokens": 8} | body
        )

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": MODEL, "prompt": "Hi"} | body)

    async def metric(self, line: str) -> float:
        """The value of the sample that starts with `line`."""
        text = (await self.http.get("/metrics")).text
        values = [row.rpartition(" ")[2] for row in text.splitlines() if row.rpartition(" ")[0] == line]
        return float(values[0]) if values else 0.0

    def at_rest(self) -> bool:
        """Check that no request holds blocks."""
        now = self.served.computing.snapshot()
        return (now.running, now.queued, now.owned_blocks) == (0, 0, 0)

    def assert_all_blocks_back(self) -> None:
        assert self.at_rest()
        now = self.served.computing.snapshot()
        assert now.available_blocks == now.total_blocks


@contextlib.asynccontextmanager
async def open_frontend(served: Served, app: ASGIApp, *, joins: bool) -> AsyncIterator[ASGIApp]:
    """The API of `served`, whose generating endpoints a frontend in this process serves."""
    service = served.others
    assert isinstance(service, EngineService)
    service.served = served
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    _, connection = await loop.create_connection(lambda: FrontendConnection(service), sock=ours)
    _, link = await loop.create_connection(EngineLink, sock=theirs)
    connection.hello(hello_of(served, "", "worker", BLOCK_SIZE, ""))
    frontend = Frontend(link, await link.hello, served.tokenizer)
    frontend.served.engine.joins = joins
    connection.serving.set()

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        await (frontend.generating if is_served(scope) else app)(scope, receive, send)

    try:
        yield dispatch
    finally:
        connection.transport.close()
        await link.closed
        await connection.closed


@contextlib.asynccontextmanager
async def open_api(
    *,
    blocks: int = 512,
    max_running: int = 64,
    max_queued: int = 4096,
    chunk_tokens: int = 512,
    client: type[AsyncEngine] = AsyncEngine,
    split: bool | None = None,
    joins: bool = False,
    **served_fields: Any,
) -> AsyncIterator[Api]:
    """
    `split`: a frontend serves the endpoints that generate, over a link to the engine. None:
    `split_by_default`. `joins`: as `EngineClient.joins` of the frontend; without it, events are those of one
    process.
    """
    split = split_by_default if split is None else split
    model = TalkingModel()
    cache = KVCache(model.spec, blocks, torch.float32, torch.device("cpu"), BLOCK_SIZE)
    limits = EngineLimits(
        max_model_len=CONTEXT, max_running=max_running, max_queued=max_queued, chunk_tokens=chunk_tokens
    )
    engine = client(model, cache, limits)
    engine.start()
    fields: dict[str, Any] = {
        "names": (MODEL,),
        "tokenizer": TOKENIZER,
        "grammars": GRAMMARS,
        "engine": engine,
        "max_model_len": CONTEXT,
        "settings": WorkerSettings(),
        "metrics": WorkerMetrics(engine.snapshot),
        "load": lambda: Load(role=Role.BOTH, model=MODEL),
        "others": EngineService() if split else OtherProcesses(),
    }
    served = Served(**fields | served_fields)
    app = create_app(served)
    try:
        async with contextlib.AsyncExitStack() as stack:
            if split:
                app = await stack.enter_async_context(open_frontend(served, app, joins=joins))
            transport = httpx.ASGITransport(app=app)
            http = httpx.AsyncClient(transport=transport, base_url="http://worker")
            yield Api(served, app, model, await stack.enter_async_context(http))
    finally:
        model.resume()
        await engine.close()


async def eventually(claim: Callable[[], bool], seconds: float = 300.0) -> None:
    """Wait until `claim` holds, by asking again: the engine's thread sends no signal."""
    async with asyncio.timeout(seconds):
        while not claim():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def events(body: str) -> list[Any]:
    """The JSON of each event of a stream; the last must be [DONE]."""
    lines = [line for line in body.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [msgspec.json.decode(line.removeprefix("data: ")) for line in lines[:-1]]


ENDS = ("finish_reason", "matched_stop", "stop_reason")
"""Members of the event that ends a choice, which may have its last text too."""

GROWING = ("content", "text", "arguments", "partial_json", *ENDS)
"""Members whose texts follow one another in the events of a stream. Those of `ENDS` have one once."""


Place = tuple[str | int, ...]


class Event(NamedTuple):
    name: str
    rest: Any
    grown: dict[Place, Any]
    """Texts and logprobs, by their places."""


def joined(stream: str) -> list[Event]:
    """
    The events of a stream by choice, as if all tokens between two events of another kind had come at once.

    Frontends write tokens that come meanwhile as one event, so streams are the same if these are.
    """
    choices: dict[int, list[Event]] = {}
    for block in stream.split("\n\n"):
        name, _, data = block.rpartition("data: ")
        if not data.startswith("{"):
            choices.setdefault(-1, []).append(Event(block, None, {}))
            continue
        body = msgspec.json.decode(data)
        for choice in body.get("choices", ()):
            choice |= {end: choice.get(end) for end in ENDS}
        grown: dict[Place, Any] = {}
        rest = _without_growing(body, grown, ())
        first = next(iter(body.get("choices", ())), body if "meta_info" in body else {})
        of_choice = choices.setdefault(first.get("index", -1), [])
        before = of_choice[-1] if of_choice else Event("", None, {})
        if of_choice and "meta_info" in body:  # each event of SGLang has what the ones before had
            of_choice[-1] = Event(name, rest, grown)
        elif grown and before[:2] == (name, rest) and before.grown.keys() == grown.keys():
            of_choice[-1] = Event(name, rest, {at: before.grown[at] + grown[at] for at in grown})
        else:
            of_choice.append(Event(name, rest, grown))
    return [event for index in sorted(choices) for event in choices[index]]


def _without_growing(value: Any, grown: dict[Place, Any], place: Place) -> Any:
    """The value without what grows, which is put into `grown`."""
    if isinstance(value, list) and "logprobs" in place:
        grown[place] = value
        return None
    if isinstance(value, list):
        return [_without_growing(each, grown, (*place, at)) for at, each in enumerate(value)]
    if isinstance(value, dict):
        return {name: _without_growing(each, grown, (*place, name)) for name, each in value.items()}
    if place[-1] in GROWING and (value is None or isinstance(value, str)):
        grown[place] = value or ""
        return None
    return value
