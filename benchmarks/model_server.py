"""
Workers without models behind real sockets, for any router: `model_worker` as HTTP and ZMQ.

    python -m benchmarks.model_server --prefill 9201 9202 --decode 9203 --scale 20

All workers run in one process, each at its own port. `GET /usage` returns the usage of the workers and the
delays of this process. `POST /restart` simulates a restart of a worker, and `POST /deafen` with a body stops
its events.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
from collections.abc import Sequence
from typing import Any, cast

import httptools
import msgspec
import uvloop

from baton_api import headers
from baton_api.prompt_report import PromptReport
from baton_api.workers import Role
from benchmarks.model_cluster import MODEL, Body, Cluster, ServedWorker
from benchmarks.model_worker import Text, Timing, answer_text, text_of

_body = msgspec.json.Decoder(Body)


def _answer(body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (status, kind, len(body)) + body


def _event(data: object) -> bytes:
    part = b"data: " + msgspec.json.encode(data) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(part), part)


_MISSING = _answer(b"{}", status=b"404 Not Found")
_SHARED = {"id": "chatcmpl-1", "created": 1, "model": MODEL}
_DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


@functools.lru_cache(maxsize=64)  # every worker is asked for each prompt
def _rendered(prompt: bytes) -> bytes:
    """vLLM's tokens of a prompt: here each four bytes as a number of three digits."""
    padded = prompt + bytes(-len(prompt) % 4)
    tokens = [word % 1000 for word in memoryview(padded).cast("I").tolist()]
    content = {"request_id": "r", "token_ids": tokens, "sampling_params": {"max_tokens": 16}}
    return _answer(msgspec.json.encode(content))


class Connection(asyncio.Protocol):
    """One connection to one worker; its requests come one after the other."""

    def __init__(self, worker: ServedWorker) -> None:
        self._worker = worker
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are not subclasses
        self._parser = httptools.HttpRequestParser(self)
        self.on_message_begin()

    def connection_lost(self, error: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._transport.close()  # a client tries HTTP/2

    def on_message_begin(self) -> None:
        self._path, self._parts, self._prefill = b"", list[bytes](), b""

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == headers.PREFILL.encode():
            self._prefill = value

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)

    def on_message_complete(self) -> None:
        if self._parser.get_method() != b"POST":
            self._transport.write(self._page(self._path))
            return
        given = b"".join(self._parts)
        match self._path:
            case b"/restart":
                self._worker.restart()
                self._transport.write(_answer(b"{}"))
            case b"/deafen":
                self._worker.deaf = bool(given)
                self._transport.write(_answer(b"{}"))
            case b"/v1/chat/completions/render":
                can = self._worker.cluster.renders
                self._transport.write(_rendered(_body.decode(given).prompt) if can else _MISSING)
            case b"/v1/chat/completions":
                prefill = self._worker.cluster.at(self._prefill.decode()) if self._prefill else None
                self._task = asyncio.create_task(self._serve(_body.decode(given), prefill))
            case _:
                self._transport.write(_answer(b"{}"))

    def _page(self, path: bytes) -> bytes:
        worker = self._worker
        match path:
            case b"/load":
                return _answer(msgspec.json.encode(worker.load))
            case b"/kv/snapshot":
                return _answer(worker.snapshot(), b"application/msgpack")
            case b"/usage":
                cluster = worker.cluster
                usages = {"workers": [one.usage for one in cluster.workers], "lags": cluster.lags}
                return _answer(msgspec.json.encode(usages))
            case b"/v1/models":
                model = {"id": MODEL, "object": "model", "created": 1, "owned_by": "x"}
                return _answer(json.dumps({"object": "list", "data": [model]}).encode())
            case _:  # SGLang's endpoints for the model, and all health endpoints
                about = {
                    "model_path": "/none", "tokenizer_path": "/none", "is_generation": True,
                    "served_model_name": MODEL, "model_id": MODEL, "version": "0",
                    "internal_states": [{}], "dp_size": 1, "tp_size": 1,
                }  # fmt: skip
                return _answer(json.dumps(about).encode())

    async def _serve(self, body: Body, prefill: ServedWorker | None) -> None:
        worker, model = self._worker, self._worker.model
        prompt = body.prompt
        text = text_of(prompt, model.block_tokens)
        held = min(model.cache.matched(text.blocks) * model.block_tokens, text.tokens - 1)
        done, remote = await worker.prefilled(body, text, prefill)
        if remote:
            await asyncio.sleep(model.timing.move_s)
        report = PromptReport(
            tokens=text.tokens,
            cached=done.cached,
            held=held,
            queue_s=done.queue_s,
            compute_s=done.compute_s,
            transfer_s=model.timing.move_s if remote else 0.0,
            remote=remote,
            tail=f"{text.blocks[-1]:016x}" if text.blocks else "",
        )
        usage = {
            "prompt_tokens": text.tokens,
            "completion_tokens": body.tokens,
            "total_tokens": text.tokens + body.tokens,
            "prompt_tokens_details": {"cached_tokens": done.cached},
        }
        transfer = body.kv_transfer_params
        if transfer is not None and transfer.do_remote_decode:
            self._transport.write(self._whole("", usage, worker.cluster.hand(done)))
        elif worker.role is Role.PREFILL:
            self._transport.write(self._whole("", usage, None))  # the decode worker has the rest
        elif body.stream:
            await self._stream(body, text, report, usage)
        else:
            await model.generate(text, body.tokens, lambda count: None)
            self._transport.write(self._whole(answer_text(text, body.tokens), usage, None))
        if worker.role is not Role.PREFILL:
            content = answer_text(text, body.tokens).encode()
            model.use(text_of(prompt + content, model.block_tokens).blocks)

    async def _stream(self, body: Body, text: Text, report: PromptReport, usage: dict[str, Any]) -> None:
        write = self._transport.write
        content, at = answer_text(text, body.tokens), 0
        chunk = {**_SHARED, "object": "chat.completion.chunk"}
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{headers.PROMPT}: "
        write(f"{head}{report.encode()}\r\ntransfer-encoding: chunked\r\n\r\n".encode())

        def emit(count: int) -> None:
            nonlocal at
            piece = content[at : at + 4 * count]
            at += 4 * count
            choice = {"index": 0, "delta": {"content": piece}, "finish_reason": None}
            write(_event({**chunk, "choices": [choice]}))

        await self._worker.model.generate(text, body.tokens, emit)
        end = {"index": 0, "delta": {}, "finish_reason": "length"}
        write(_event({**chunk, "choices": [end]}) + _event({**chunk, "choices": [], "usage": usage}) + _DONE)

    def _whole(self, content: str, usage: dict[str, Any], number: int | None) -> bytes:
        message = {"role": "assistant", "content": content}
        answer: dict[str, Any] = {
            **_SHARED,
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
            "usage": usage,
        }
        if number is not None:
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": [number],
                "remote_engine_id": self._worker.name,
                "remote_host": "127.0.0.1",
                "remote_port": 1,
            }
        return _answer(msgspec.json.encode(answer))


async def serve(
    roles: Sequence[tuple[Role, int]], timing: Timing, capacity: int, block_tokens: int, *, renders: bool
) -> None:
    cluster = Cluster(renders)
    loop = asyncio.get_running_loop()
    for role, port in roles:
        worker = ServedWorker(cluster, role, port, timing, capacity, block_tokens)
        cluster.workers.append(worker)
        await loop.create_server(lambda one=worker: Connection(one), "127.0.0.1", port)  # type: ignore[misc]
    await cluster.watch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prefill", type=int, nargs="*", default=[], metavar="PORT")
    parser.add_argument("--decode", type=int, nargs="+", required=True, metavar="PORT")
    parser.add_argument("--scale", type=float, default=1.0, help="times faster than the modeled worker")
    parser.add_argument("--capacity", type=int, default=2000, help="blocks of each worker")
    parser.add_argument("--block-tokens", type=int, default=512)
    parser.add_argument("--renders", action="store_true", help="return a prompt's tokens, as vLLM does")
    options = parser.parse_args()
    roles = [(Role.PREFILL, port) for port in options.prefill]
    roles += [(Role.DECODE if options.prefill else Role.BOTH, port) for port in options.decode]
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(
            serve(
                roles,
                Timing().faster(options.scale),
                options.capacity,
                options.block_tokens,
                renders=options.renders,
            )
        )


if __name__ == "__main__":
    main()
