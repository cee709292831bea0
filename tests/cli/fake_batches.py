"""Files and batches of a service that behaves, and loses connections on demand."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeBatches:
    """One service's state; `url` is where it answers."""

    def __init__(self) -> None:
        self.url = ""
        self.files: dict[str, bytes] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        """Method and path of each request, in order."""
        self.ranges: list[str] = []
        self.keys: list[str] = []
        self.cut = 0
        """So many of the next requests are not answered: the connection is closed when they have come."""
        self.cut_after = 0
        """So many of the next ones are done, and the answer is not sent."""
        self.short = 0
        """So many of the next downloads end after 100 bytes."""
        self.polls: list[dict[str, Any]] = []
        """Changes that each read of a batch applies first."""

    def add_batch(self, **more: Any) -> str:
        id = f"batch_{len(self.batches)}"
        none = ("output_file_id", "error_file_id", "errors", "model", "completed_at", "cancelled_at")
        self.batches[id] = {
            "id": id, "object": "batch", "status": "validating", "created_at": 100,
            "endpoint": "/v1/embeddings", "input_file_id": "",
            "request_counts": {"total": 0, "completed": 0, "failed": 0}, **dict.fromkeys(none), **more,
        }  # fmt: skip
        return id

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        path, _, query = path.partition("?")
        match method, path.removeprefix("/v1").split("/")[1:]:
            case "POST", ["files"]:
                id = f"file-{len(self.files)}"
                file_part = re.search(rb"\r\n\r\n(\{.*?)\r\n--", body, re.DOTALL)
                self.files[id] = file_part[1] if file_part else b""
                return 200, json.dumps({"id": id, "bytes": len(self.files[id])}).encode()
            case "GET", ["files", id]:
                return 200, json.dumps({"id": id, "bytes": len(self.files[id])}).encode()
            case "GET", ["files", id, "content"]:
                return 200, self.files[id]
            case "POST", ["batches"]:
                fields = json.loads(body)
                id = self.add_batch(input_file_id=fields["input_file_id"], endpoint=fields["endpoint"])
                self.batches[id]["metadata"] = fields.get("metadata")
                return 200, json.dumps(self.batches[id]).encode()
            case "GET", ["batches"]:
                rows = list(reversed(self.batches.values()))
                after = re.search(r"after=(\w+)", query)
                start = 1 + [row["id"] for row in rows].index(after[1]) if after else 0
                limit = re.search(r"limit=(\d+)", query)
                end = start + int(limit[1]) if limit else len(rows)
                page = rows[start:end]
                last = page[-1]["id"] if page else None
                shown = {"data": page, "has_more": end < len(rows), "last_id": last}
                return 200, json.dumps(shown).encode()
            case "GET", ["batches", id] if id in self.batches:
                if self.polls:
                    self.batches[id].update(self.polls.pop(0))
                return 200, json.dumps(self.batches[id]).encode()
            case "POST", ["batches", id, "cancel"]:
                self.batches[id]["status"] = "cancelling"
                return 200, json.dumps(self.batches[id]).encode()
        return 404, b'{"error": {"message": "No such thing."}}'


@contextmanager
def fake_batches() -> Iterator[FakeBatches]:
    """It answers while this lasts."""
    state = FakeBatches()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            state.requests.append(f"{self.command} {self.path.partition('?')[0]}")
            state.keys.append(self.headers.get("authorization", ""))
            body = self._body()
            if state.cut:
                state.cut -= 1
                self.close_connection = True
                return
            status, answer = state.answer(self.command, self.path, body)
            if state.cut_after:
                state.cut_after -= 1
                self.close_connection = True
                return
            if self.path.endswith("/content"):
                wanted = self.headers.get("range", "")
                state.ranges.append(wanted)
                if wanted:
                    start = int(wanted.removeprefix("bytes=").rstrip("-"))
                    status, answer = 206, answer[start:]
            self.send_response(status)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            if self.path.endswith("/content") and state.short:
                state.short -= 1
                self.wfile.write(answer[:100])
                self.close_connection = True
                return
            self.wfile.write(answer)

        def _body(self) -> bytes:
            if self.headers.get("transfer-encoding") == "chunked":
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body
            return self.rfile.read(int(self.headers.get("content-length") or 0))

        do_GET = do_POST = _serve

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    try:
        yield state
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
