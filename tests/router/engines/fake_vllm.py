"""
A vLLM worker that follows the protocol of NixlConnector and notes each violation of it.

Its answers have the bytes of vLLM 0.32's: compact JSON, `null` for what was not asked for, one event per
token.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from baton_api import anthropic
from baton_api.headers import REQUEST_ID
from tests.router.engines.fake_engine import FakeEngine, error, generate, health, render, text_of, tokenize

CHAT = "chat.completion"
COMPLETION = "text_completion"
PROBE = [1]
"""The prompt by which the router finds out whether there is a connector."""

REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


class FakeVllm(FakeEngine):
    """One worker. Workers of one test share `blocks`, the KV blocks that wait to be read."""

    def __init__(
        self,
        blocks: dict[str, list[int]] | None = None,
        *,
        model: str = "tiny",
        connector: bool = True,
        block_size: int = 4,
        version: str = "0.32.0",
        embeds: bool = False,
    ) -> None:
        super().__init__()
        self.blocks = {} if blocks is None else blocks
        self.model = model
        self.connector = connector
        self.block_size = block_size
        self.version = version
        self.adapters: list[str] = []
        self.pulled = 0
        """Prompts whose blocks were read from another worker."""
        self.computed = 0
        """Prompts that were computed here."""
        self.prefill_status = 0
        """A status with which it fails to compute prompts for others."""
        self.fingerprint: str | None = None
        """Before the usage of its whole answers."""
        self.transfer_fails: Callable[[], bool] = lambda: False
        """Whether reads of blocks fail, with the policy `fail`."""
        self.ranks = 1
        """Data-parallel ranks behind its port; rank 1 has used half of its blocks more than rank 0."""
        self.embeds = embeds
        """Whether its model makes embeddings."""
        self.cached: int | None = None
        """Cached tokens of each prompt, in its usage; None without --enable-prompt-tokens-details."""
        self.error_reply: tuple[int, Any] | None = None
        """Status and body with which it rejects answers: an object, or plain text."""
        self.foreign_connector = False
        """Whether it returns members of another connector than NixlConnector."""
        self.event_sources: dict[str, Any] = {}
        self.errors: list[int] = []
        """Each makes one stream fail, after so many tokens; workers may share them."""
        self.aborts = False
        """Whether `errors` abort answers as a shutdown does: without an error, and also whole ones."""
        self._epoch = time.time()

    def routes(self) -> list[Route]:
        return [
            Route("/health", health),
            Route("/load", lambda _: JSONResponse({"server_load": 0})),
            Route("/version", lambda _: JSONResponse({"version": self.version})),
            Route("/metrics", lambda _: Response(self._metrics())),
            Route("/kv_event_sources", lambda _: JSONResponse(self.event_sources)),
            Route("/v1/models", lambda _: JSONResponse({"object": "list", "data": self._models()})),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._completion, methods=["POST"]),
            Route("/v1/responses", self._response, methods=["POST"]),
            Route(anthropic.MESSAGES, self._message, methods=["POST"]),
            Route("/tokenize", self._tokens, methods=["POST"]),
            Route("/detokenize", self._text, methods=["POST"]),
            *([Route("/v1/embeddings", self._embeddings, methods=["POST"])] if self.embeds else []),
            Route("/{path:path}", lambda _: error(404, "Not Found", "Not Found"), methods=["POST"]),
        ]

    async def _tokens(self, request: Request) -> Response:
        tokens = tokenize((await request.json())["prompt"])
        return JSONResponse(
            {"count": len(tokens), "max_model_len": 8192, "tokens": tokens, "token_strs": None}
        )

    async def _text(self, request: Request) -> Response:
        return JSONResponse({"prompt": "".join(map(text_of, (await request.json())["tokens"]))})

    async def _embeddings(self, request: Request) -> Response:
        inputs = (await request.json())["input"]
        data = [{"index": index, "embedding": [float(len(one.split()))]} for index, one in enumerate(inputs)]
        return JSONResponse({"object": "list", "model": self.model, "data": data})

    async def _response(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if body.get("previous_response_id") and not isinstance(body["input"], list):
            return error(404, f"Response with id '{body['previous_response_id']}' not found.")
        prompt = body["input"] if isinstance(body["input"], str) else json.dumps(body["input"])
        answer = generate(tokenize(prompt), body.get("max_output_tokens", 8))
        content = [{"type": "output_text", "text": "".join(map(text_of, answer)), "annotations": []}]
        message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
        whole = {"id": "resp_1", "object": "response", "created_at": 17, "status": "completed"}
        whole |= {"model": self.model, "output": [{**message, "content": content}]}
        whole |= {"usage": {"input_tokens": 3, "output_tokens": len(answer), "total_tokens": 3 + len(answer)}}
        if not body.get("stream"):
            return JSONResponse(whole)
        events: list[dict[str, Any]] = [
            {"type": "response.output_text.delta", "delta": text_of(token)} for token in answer
        ]
        events.append({"type": "response.completed", "response": whole})
        lines = [f"event: {one['type']}\ndata: {compact(one)}\n\n" for one in events]
        return StreamingResponse(iter(lines), media_type="text/event-stream")

    async def _message(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if not body.get("max_tokens"):
            return JSONResponse(
                {"type": "error", "error": {"type": "BadRequestError", "message": "No."}}, 400
            )
        answer = [
            text_of(token) for token in generate(tokenize(json.dumps(body["messages"])), body["max_tokens"])
        ]
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": self.model}
        usage = {"input_tokens": 3, "output_tokens": len(answer)}
        if not body.get("stream"):
            content = [{"type": "text", "text": "".join(answer)}]
            return JSONResponse({**message, "content": content, "stop_reason": "end_turn", "usage": usage})
        place = {"index": 0}
        events = [anthropic.event("message_start", {"message": {**message, "content": [], "usage": usage}})]
        block = {"type": "text", "text": ""}
        events += [anthropic.event("content_block_start", {**place, "content_block": block})]
        deltas = [{"type": "text_delta", "text": text} for text in answer]
        events += [anthropic.event("content_block_delta", {**place, "delta": delta}) for delta in deltas]
        events += [anthropic.event("content_block_stop", place)]
        ending = {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": len(answer)}}
        events += [anthropic.event("message_delta", ending), anthropic.event("message_stop", {})]
        return StreamingResponse(iter([*events, b"data: [DONE]\n\n"]), media_type="text/event-stream")

    def _metrics(self) -> str:
        ranks = "".join(map(self._metrics_of, range(self.ranks)))
        return f"process_start_time_seconds {self._epoch}\n{ranks}"

    def _metrics_of(self, rank: int) -> str:
        labels = f'engine="{rank}",model_name="tiny"'
        cache = f'block_size="{self.block_size}",cache_dtype="auto",engine="{rank}",num_gpu_blocks="400"'
        return (
            f"vllm:num_requests_running{{{labels}}} 1.0\nvllm:num_requests_waiting{{{labels}}} 2.0\n"
            f"vllm:kv_cache_usage_perc{{{labels}}} {0.25 + rank / 2}\n"
            f"vllm:cache_config_info{{{cache}}} 1.0\n"
            f"vllm:inter_token_latency_seconds_sum{{{labels}}} 2.0\n"
            f"vllm:inter_token_latency_seconds_count{{{labels}}} 100.0\n"
        )

    def _models(self) -> list[dict[str, Any]]:
        base = {
            "id": self.model,
            "object": "model",
            "root": self.model,
            "parent": None,
            "max_model_len": 8192,
        }
        return [base, *({**base, "id": one, "parent": self.model} for one in self.adapters)]

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        transfer = body.get("kv_transfer_params") or {}
        prompt = transfer.pop("prompt_token_ids", None) or render(body["messages"])
        return await self._answer(request, body, prompt, CHAT)

    async def _completion(self, request: Request) -> Response:
        body = await request.json()
        prompt = body["prompt"]
        return await self._answer(
            request, body, tokenize(prompt) if isinstance(prompt, str) else prompt, COMPLETION
        )

    async def _answer(self, request: Request, body: dict[str, Any], prompt: list[int], kind: str) -> Response:
        if body["model"] not in (self.model, *self.adapters):
            self.violations.append(f"a request for {body['model']}, which it does not list")
            return error(404, f"The model `{body['model']}` does not exist.", "NotFoundError")
        if prompt == PROBE:
            return JSONResponse(self._whole(body, prompt, [9], kind, "probe"))
        await self.take(body)
        self.headers.append(dict(request.headers))
        if self.fail_with:
            return error(self.fail_with, "It failed.", "InternalServerError")
        if self.error_reply is not None:
            status, reply = self.error_reply
            return Response(reply, status) if isinstance(reply, str) else JSONResponse(reply, status)
        transfer = body.get("kv_transfer_params")
        if transfer is not None:
            self._check(body, transfer, prompt)
            if transfer.get("do_remote_decode") and self.prefill_status:
                return error(self.prefill_status, "No.", "InternalServerError")
        if transfer is None or not transfer.get("do_remote_prefill"):
            self.computed += 1
        elif self.transfer_fails():
            return error(500, "KV load failed.", "InternalServerError")
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 8
        if limit < 1:
            return error(400, f"max_tokens must be at least 1, got {limit}.")
        answer, name = generate(prompt, limit), request.headers.get(REQUEST_ID, "none")
        if body.get("stream"):
            return StreamingResponse(
                self._stream(body, prompt, answer, kind, name), media_type="text/event-stream"
            )
        await self.pause(0)
        whole = self._whole(body, prompt, answer, kind, name)
        if self.aborts and self.errors:
            self.errors.pop()
            whole["choices"][0]["finish_reason"] = "abort"
        return JSONResponse(whole)

    def _check(self, body: dict[str, Any], transfer: dict[str, Any], prompt: list[int]) -> None:
        if transfer.get("do_remote_decode"):
            if transfer != REMOTE_DECODE:
                self.violations.append(f"a prefill request with {transfer}")
            if body["max_tokens"] != 1 or body.get("stream") or body.get("stream_options"):
                self.violations.append("a prefill request that generates or streams")
        elif transfer:
            held = self.blocks.pop(transfer.get("remote_request_id", ""), None)
            if held != prompt:
                self.violations.append(f"blocks of {held} for {prompt}")
            self.pulled += 1

    def _transfer(self, body: dict[str, Any], prompt: list[int], name: str) -> dict[str, Any] | None:
        if not self.connector or not (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            return None
        if self.foreign_connector:
            return {"do_remote_prefill": True, "remote_bootstrap_addr": "10.0.0.1:8998"}
        remote = f"{name}-{len(self.blocks)}-{id(self)}"
        if prompt != PROBE:
            self.blocks[remote] = prompt
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2]],
            "remote_engine_id": str(id(self)),
            "remote_request_id": remote,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "remote_num_tokens": len(prompt),
            "remote_prefill_cached_tokens": 3,
            "tp_size": 1,
            "transfer_mode": "pull",
        }

    @property
    def _details(self) -> dict[str, int] | None:
        return None if self.cached is None else {"cached_tokens": self.cached}

    def _whole(
        self, body: dict[str, Any], prompt: list[int], answer: list[int], kind: str, name: str
    ) -> dict[str, Any]:
        text = "".join(map(text_of, answer))
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if body.get("tools"):
            call = {"name": body["tools"][0]["function"]["name"], "arguments": text}
            message |= {"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": call}]}
        content = {"message": message} if kind == CHAT else {"text": text}
        ids = body.get("return_token_ids")
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(answer)}
        usage["total_tokens"] = len(prompt) + len(answer)
        return {
            "id": f"{'chatcmpl' if kind == CHAT else 'cmpl'}-{name}",
            "object": kind,
            "created": 17,
            "model": self.model,
            "choices": [
                {"index": 0, **content, "finish_reason": "length", "token_ids": answer if ids else None}
            ],
            "system_fingerprint": self.fingerprint,
            "usage": {**usage, "prompt_tokens_details": self._details},
            "prompt_token_ids": prompt if ids else None,
            "kv_transfer_params": self._transfer(body, prompt, name),
        }

    async def _stream(
        self, body: dict[str, Any], prompt: list[int], answer: list[int], kind: str, name: str
    ) -> AsyncIterator[str]:
        ids = body.get("return_token_ids")
        head = {
            "id": f"{'chatcmpl' if kind == CHAT else 'cmpl'}-{name}",
            "object": f"{kind}.chunk" if kind == CHAT else kind,
            "created": 17,
            "model": self.model,
        }
        try:
            await self.pause(0)
            shown: dict[str, Any] = {"prompt_token_ids": prompt if ids else None, "prompt_text": None}
            if kind == CHAT:
                choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield f"data: {compact({**head, 'choices': [choice], **shown})}\n\n"
                shown = {}
            fails_after = self.errors.pop() if self.errors else len(answer)
            for number, token in enumerate(answer, 1):
                if number > fails_after and self.aborts:
                    if number > 1:  # vLLM does not send the end of an answer that has no token yet
                        choice = {"index": 0, "delta": {"content": ""}, "text": "", "finish_reason": "abort"}
                        yield f"data: {compact({**head, 'choices': [choice]})}\n\n"
                    yield "data: [DONE]\n\n"
                    return
                if number > fails_after:
                    yield f"data: {compact({'error': {'message': 'EngineCore died.', 'code': 500}})}\n\n"
                    yield "data: [DONE]\n\n"
                    return
                content: dict[str, Any] = {"text": text_of(token)}
                if kind == CHAT:
                    content = {"delta": {"content": text_of(token)}}
                if body.get("tools"):
                    call = {"name": body["tools"][0]["function"]["name"], "arguments": text_of(token)}
                    content = {"delta": {"tool_calls": [{"index": 0, "function": call}]}}
                finish = "length" if number == len(answer) else None
                choice = {
                    "index": 0,
                    **content,
                    "finish_reason": finish,
                    "token_ids": [token] if ids else None,
                }
                if kind == COMPLETION and number == 1:
                    choice |= shown
                    if body.get("echo") and not ids:  # vLLM leaves the prompt's text out beside its ids
                        choice["text"] = body["prompt"] + choice["text"]
                yield f"data: {compact({**head, 'choices': [choice]})}\n\n"
                await self.pause(number)
            if (body.get("stream_options") or {}).get("include_usage"):
                usage: dict[str, Any] = {
                    "prompt_tokens": len(prompt),
                    "total_tokens": len(prompt) + len(answer),
                }
                usage["completion_tokens"] = len(answer)
                if self._details:
                    usage["prompt_tokens_details"] = self._details
                yield f"data: {compact({**head, 'choices': [], 'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.left.set()
            raise
