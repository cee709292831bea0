"""
A worker of TensorRT-LLM's `trtllm-serve` that follows the protocol of `disaggregated_params`.

TensorRT-LLM needs a GPU: this fake has what its sources say, and like these refuses members that it does not
know. Workers of one test share `blocks`: the prompts that prefill workers keep, by request.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.router.engines.fake_engine import FakeEngine, generate, health, render, text_of, tokenize

MEMBERS = {"model", "max_tokens", "n", "stream", "stream_options", "disaggregated_params"}
CHATS = MEMBERS | {"messages", "prompt_token_ids", "cache_salt"}
COMPLETIONS = MEMBERS | {"prompt"}
PARAMS = {"request_type", "first_gen_tokens", "ctx_request_id", "encoded_opaque_state", "draft_tokens"}
PARAMS |= {"disagg_request_id", "ctx_dp_rank", "ctx_info_endpoint", "schedule_style", "ctx_usage"}
OPAQUE = "b3BhcXVl"


class FakeTrtllm(FakeEngine):
    """One worker, with a cache transceiver if it has `blocks`."""

    def __init__(self, blocks: dict[int, list[int]] | None = None, *, version: str = "1.3.0") -> None:
        super().__init__()
        self.blocks = blocks
        self.version = version
        self.computed = 0
        """Prompts that were computed here."""
        self.finishes = False
        """Whether its prompts end their answers at the first token."""
        self.forgets = False
        """Whether it answers as one without a transceiver of an old version: with no parameters."""
        self.records = 0
        """How often /metrics was asked, which gives each record to one reader only."""

    def routes(self) -> list[Route]:
        card = {"id": "tiny", "object": "model", "created": 1, "owned_by": "tensorrt_llm"}
        running = 'trtllm_num_requests_running{model_name="tiny",engine_type="trtllm"} 2.0\n'
        return [
            Route("/health", health),
            Route("/version", lambda _: JSONResponse({"version": self.version})),
            Route("/server_info", lambda _: JSONResponse({"disaggregated_params": {}})),
            Route("/v1/models", lambda _: JSONResponse({"object": "list", "data": [card]})),
            Route("/prometheus/metrics", lambda _: Response(running)),
            Route("/metrics", self._metrics),
            Route("/v1/chat/completions", self._generate, methods=["POST"]),
            Route("/v1/completions", self._generate, methods=["POST"]),
        ]

    async def _metrics(self, request: Request) -> Response:
        self.records += 1
        return JSONResponse([])

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        await self.take(body)
        if self.fail_with:
            return _error(self.fail_with, "It failed.")
        params = body.get("disaggregated_params")
        members = CHATS if request.url.path == "/v1/chat/completions" else COMPLETIONS
        if unknown := (body.keys() - members) | ((params or {}).keys() - PARAMS):
            self.violations.append(f"unknown members: {unknown}")
            return _error(400, "Extra inputs are not permitted")
        if params is None:
            return self._answer(body, self._prompt(body), [])
        if self.blocks is None:
            return _error(400, "This instance has no cache transceiver")
        if params["request_type"] == "context_only":
            return self._context(body, params["disagg_request_id"])
        if params["request_type"] != "generation_only" or params["encoded_opaque_state"] != OPAQUE:
            self.violations.append(f"{params}")
        given = body.get("prompt_token_ids") if "messages" in body else body["prompt"]
        prompt = self.blocks.pop(params["disagg_request_id"])
        if given != prompt or params["ctx_request_id"] != params["disagg_request_id"]:
            self.violations.append("another prompt than the context server's")
        if params["ctx_usage"]["prompt_tokens"] != len(prompt):
            self.violations.append("no usage of the context server")
        return self._answer(body, prompt, params["first_gen_tokens"])

    def _prompt(self, body: dict[str, Any]) -> list[int]:
        self.computed += 1
        return render(body["messages"]) if "messages" in body else tokenize(body["prompt"])

    def _context(self, body: dict[str, Any], number: int) -> Response:
        assert self.blocks is not None
        if not 2**40 <= number < 2**63 or body.get("stream") or body.get("stream_options"):
            self.violations.append(f"no request for a context server: {body}")
        prompt = self._prompt(body)
        first = generate(prompt, 1)
        params: dict[str, Any] = dict.fromkeys(sorted(PARAMS))
        params |= {"request_type": "context_only", "first_gen_tokens": first, "disagg_request_id": number}
        if not self.finishes:
            self.blocks[number] = prompt
            params |= {"ctx_request_id": number, "encoded_opaque_state": OPAQUE}
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if self.finishes else "not_finished"}
        choice["disaggregated_params"] = None if self.forgets else params
        choice |= _content(body, text_of(first[0]))
        return JSONResponse(
            {"id": "x", "choices": [choice], "prompt_token_ids": prompt, "usage": _usage(prompt, first)}
        )

    def _answer(self, body: dict[str, Any], prompt: list[int], first: list[int]) -> Response:
        answer = [*first, *generate([*prompt, *first], body["max_tokens"] - len(first))]
        if body.get("stream"):
            return StreamingResponse(self._stream(body, answer), media_type="text/event-stream")
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= _content(body, "".join(map(text_of, answer)))
        if body.get("disaggregated_params"):
            choice["disaggregated_params"] = {
                "request_type": "generation_only",
                "ctx_info_endpoint": "tcp://c",
            }
        return JSONResponse(
            {"id": "x", "model": "tiny", "choices": [choice], "usage": _usage(prompt, answer)}
        )

    async def _stream(self, body: dict[str, Any], answer: list[int]) -> AsyncIterator[str]:
        for number, token in enumerate(answer, 1):
            content = (
                {"delta": {"content": text_of(token)}} if "messages" in body else {"text": text_of(token)}
            )
            choice = {"index": 0, **content, "finish_reason": "length" if number == len(answer) else None}
            yield f"data: {json.dumps({'id': 'x', 'choices': [choice]})}\n\n"
            await self.pause(number)
        yield "data: [DONE]\n\n"


def _content(body: dict[str, Any], text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text}} if "messages" in body else {"text": text}


def _usage(prompt: list[int], answer: list[int]) -> dict[str, Any]:
    details = {"cached_tokens": 3}
    return {
        "prompt_tokens": len(prompt), "completion_tokens": len(answer), "prompt_tokens_details": details,
    }  # fmt: skip


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"object": "error", "message": message, "type": "Error", "code": status}, status)
