"""
The engine inside a Python process, without a server: for evaluation and for batches of prompts.

Requests are the bodies of `/v1/completions` and `/v1/chat/completions`, so that templates, parsers, grammars
and defaults are those of a server. A thread runs the event loop, and the engine batches all requests.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from baton_api import limits
from baton_api.errors import InvalidRequest, NotReady
from baton_api.sampling import SamplingParams
from baton_engine.api import completions
from baton_engine.api.chat import endpoint
from baton_engine.api.choices import Choices
from baton_engine.api.exchange import Exchange
from baton_engine.api.fields import Fields
from baton_engine.api.generate import Prepare, collected, require_generation
from baton_engine.api.served import Served
from baton_engine.api.work import with_constraint_field, with_matchers
from baton_engine.service import served_of
from baton_engine.settings import WorkerSettings
from baton_engine.worker import open_worker

Params = SamplingParams | Mapping[str, Any]
"""Sampling, or fields of a request by their names in the HTTP API."""

Prompt = str | Sequence[int]
"""A text, or token ids."""

AT_ONCE = 256
"""Maximum requests that are prepared or in the engine."""

NUMBERS = (
    *(limit.field for limit in limits.SAMPLING_NUMBERS),
    "seed", "top_k", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs",
)  # fmt: skip
"""Members of `SamplingParams` that are fields of a request. The other members must have their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str | None
    logprobs: Mapping[str, Any] | None
    """In the format of the HTTP API. None: not requested."""
    message: Mapping[str, Any] | None
    """The message of a chat, with `reasoning_content` and `tool_calls`. None: a completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The answers to one prompt."""

    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    prompt_logprobs: Sequence[Mapping[str, Any] | None] | None
    """For each token of the prompt: `logprob`, `rank` and `decoded_token` by token id. None: not requested,
    or a token without one before it."""


class LLM:
    """
    A model that generates text in this process.

    >>> with LLM("smollm2") as llm:  # doctest: +SKIP
    ...     llm.generate(["The capital of France is"], {"max_tokens": 8, "temperature": 0})[0].outputs[0].text
    """

    def __init__(self, model: str = "smollm2", **settings: Any) -> None:
        """
        Load `model`: a folder, a .gguf file, an id on the hub, or the built-in model.

        `settings` are those of `baton serve`, such as `threads=4`. Sets torch's number of threads for the
        process. Raises SetupError if the model cannot be served.
        """
        self._settings = WorkerSettings(model=model, **settings)
        self._opened: Future[Served] = Future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="baton-llm", daemon=True)
        self._thread.start()
        try:
            self._served = self._opened.result()
        except BaseException:
            self._thread.join()
            raise

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params | None = None, **fields: Any
    ) -> list[RequestOutput]:
        """
        Complete prompts. Returns one output for each, in their order.

        `fields` are further fields of `/v1/completions`, such as `stop`. Raises InvalidRequest for invalid
        fields, and the error of the first request that fails.
        """
        given = _read(params) | fields
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        several: list[Any] = [prompts] if single else list(prompts)
        bodies = [
            {**given, "prompt": prompt if isinstance(prompt, str) else list(prompt)} for prompt in several
        ]
        return self._all(completions.prepare, bodies)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: Params | None = None,
        **fields: Any,
    ) -> list[RequestOutput]:
        """
        Answer one conversation or several. Returns one output for each, in their order.

        `fields` are further fields of `/v1/chat/completions`, such as `tools`. Errors are as for `generate`.
        """
        given = _read(params)
        if isinstance(params, SamplingParams) and params.logprobs is not None:
            given |= {"logprobs": True, "top_logprobs": params.logprobs}
        several: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        return self._all(
            endpoint.prepare,
            [{**given, **fields, "messages": list(conversation)} for conversation in several],
        )

    def close(self) -> None:
        """End the engine and free its memory. Further calls raise NotReady."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- The thread ---

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._open())

    async def _open(self) -> None:
        try:
            async with open_worker(self._settings) as worker:
                self._opened.set_result(served_of(worker))
                await self._stop.wait()
        except BaseException as error:
            if self._opened.done():
                raise
            self._opened.set_exception(error)

    def _all(self, prepare: Prepare, bodies: Sequence[dict[str, Any]]) -> list[RequestOutput]:
        require_generation(self._served)
        return [_output(body) for body in self._wait(lambda: self._answers(prepare, bodies))]

    def _wait(self, work: Callable[[], Coroutine[Any, Any, list[Any]]]) -> list[Any]:
        if not self._thread.is_alive():
            raise NotReady("This LLM is closed. Create another one.")
        waiting = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return waiting.result()
        except BaseException:
            waiting.cancel()  # an interrupt of the caller ends the requests
            raise

    async def _answers(self, prepare: Prepare, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        gate = asyncio.Semaphore(AT_ONCE)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._answer(prepare, body, gate)) for body in bodies]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _answer(self, prepare: Prepare, body: dict[str, Any], gate: asyncio.Semaphore) -> Any:
        async with gate:
            fields = Fields({**body, "return_token_ids": True, "stream": None})
            work = with_constraint_field(await asyncio.to_thread(prepare, fields, self._served), fields)
            work = await with_matchers(work, self._served.grammars)
            exchange = Exchange(f"llm-{next(self._numbers)}", "", "")
            return await collected(work, Choices(self._served, work, exchange))


def _read(params: Params | None) -> dict[str, Any]:
    """Return the fields of a request."""
    if not isinstance(params, SamplingParams):
        return dict(params or {})
    rest = [name for name in SamplingParams.__slots__ if name not in NUMBERS]
    changed = [name for name in rest if getattr(params, name) != getattr(SamplingParams(), name)]
    if changed:
        raise InvalidRequest(
            f"SamplingParams.{changed[0]} cannot be set here. Pass a field of the HTTP API instead, such as "
            "stop, logit_bias or structured_outputs.",
            param=changed[0],
        )
    values = {name: getattr(params, name) for name in NUMBERS}
    return {name: value for name, value in values.items() if value is not None}


def _output(body: Mapping[str, Any]) -> RequestOutput:
    """Convert the body of a response."""
    choices = body["choices"]
    of_prompt = body if "prompt_token_ids" in body else choices[0]
    return RequestOutput(
        prompt_token_ids=of_prompt["prompt_token_ids"],
        prompt_logprobs=body.get("prompt_logprobs") or choices[0].get("prompt_logprobs"),
        outputs=[
            CompletionOutput(
                index=choice["index"],
                text=choice["text"] if "text" in choice else choice["message"]["content"] or "",
                token_ids=choice["token_ids"],
                finish_reason=choice["finish_reason"],
                logprobs=choice["logprobs"],
                message=choice.get("message"),
            )
            for choice in choices
        ],
    )
