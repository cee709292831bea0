"""A hub of one model, on 127.0.0.1 by default, as far as `snapshot_download` needs it."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISIONS = ("main", "v1", COMMIT)
"""All are that commit."""

PIECE_S = 1.0
"""Seconds from one piece of slow weights to the next: clients give up after ten without any."""


@contextmanager
def serving(
    folder: Path, model: str, paths: list[str], host: str = "127.0.0.1", weights_s: float = 0.0
) -> Iterator[str]:
    """
    Serve `folder` as `model` and yield the endpoint; append the requested paths to `paths`.

    It listens at `host`, and takes `weights_s` seconds to send a file of weights.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            paths.append(path)
            resolve = f"/{model}/resolve/"
            if path == f"/api/models/{model}/tree/{COMMIT}":
                tree = [
                    {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": file.name}
                    for file in sorted(folder.iterdir())
                ]
                self._send(200, json.dumps(tree).encode(), with_body)
            elif path.startswith(f"/api/models/{model}/revision/") and not path.endswith(REVISIONS):
                self._send(404, b"{}", with_body, error="RevisionNotFound")
            elif path.startswith(f"/api/models/{model}"):
                files = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
                body = json.dumps({"id": model, "sha": COMMIT, "siblings": files}).encode()
                self._send(200, body, with_body)
            elif path.startswith(resolve) and (folder / path.rsplit("/", 1)[1]).is_file():
                weights = path.endswith(".safetensors")
                body = (folder / path.rsplit("/", 1)[1]).read_bytes()
                self._send(200, body, with_body, seconds=weights_s if weights else 0.0)
            else:
                self._send(404, b"{}", with_body, error="RepoNotFound")

        def _send(
            self, status: int, body: bytes, with_body: bool, error: str = "", seconds: float = 0.0
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "application/json")
            self.send_header("ETag", f'"{hashlib.sha1(body, usedforsecurity=False).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            if error:
                self.send_header("X-Error-Code", error)
            self.end_headers()
            if not with_body:
                return
            pieces = max(1, round(seconds / PIECE_S))
            size = -(-len(body) // pieces)
            for begin in range(0, len(body), size):
                if seconds:
                    time.sleep(PIECE_S)  # the slow line itself
                self.wfile.write(body[begin : begin + size])

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer((host, 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://{host}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
