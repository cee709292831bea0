"""Waiting for a server that was just started: until it answers a chat."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path

START_LIMIT_S = 60.0


def until_answering(port: int, model: str, log: Path, limit_s: float = START_LIMIT_S) -> None:
    """Return when a chat is answered by the router or the worker at this port. Raises SystemExit."""
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        try:
            with urllib.request.urlopen(request, timeout=3) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.3)
    raise SystemExit(f"nobody answered at {port} within {limit_s:g} s; its log is {log}")
