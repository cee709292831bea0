"""Batches as people make them, by SDK, curl and command, on a real model, router, prefill and decode."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import smollm2
from tests.conformance.deployment import PAIR, TIMEOUT_S, Deployment, Deployments

pytestmark = pytest.mark.nixl

EXAMPLES = Path(__file__).parents[2] / "examples" / "batches"
CHAT = "/v1/chat/completions"


@pytest.fixture
def served(deployments: Deployments) -> Deployment:
    """The built-in model behind a router: a single worker has no batches."""
    pytest.importorskip("nixl", reason="the NIXL library is missing")
    return smollm2(deployments, PAIR)


def run(*command: str, cwd: Path | None = None) -> list[str]:
    """Return its output, line by line; `baton` is this one."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=4 * TIMEOUT_S,
        cwd=cwd,
        env={**os.environ, "PATH": path},
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout.splitlines()


def write_requests(served: Deployment, path: Path, count: int, tokens: int) -> list[dict[str, Any]]:
    requests = []
    for number in range(1, count + 1):
        messages = [{"role": "user", "content": f"Say {number} in words."}]
        body = {"model": served.model, "messages": messages, "max_tokens": tokens, "temperature": 0}
        requests.append({"custom_id": f"request-{number}", "method": "POST", "url": CHAT, "body": body})
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return requests


def test_two_twenty_and_five_hundred_that_are_cancelled(served: Deployment) -> None:
    rows = run(sys.executable, str(EXAMPLES / "openai_sdk.py"), served.url, "500")
    assert re.fullmatch(r"batch_\w+ is validating", rows[0])
    answers = [row for row in rows if row.startswith("request-")]
    assert [row.partition(":")[0] for row in answers] == ["request-1 (200)", "request-2 (200)"]
    assert rows.count("deleted: True") == 2
    assert "completed: 20 of 20, 0 failed" in rows
    assert "after cancel: cancelling" in rows
    end = re.fullmatch(r"in the end: cancelled, (\d+) of 500 answered", rows[-2])
    assert end and 0 < int(end[1]) < 500


def test_batch_story_with_curl(served: Deployment) -> None:
    rows = run("sh", str(EXAMPLES / "curl.sh"), served.url)
    assert rows[0].startswith("batch: batch_") and "status: completed" in rows
    names = [json.loads(row)["custom_id"] for row in rows if row.startswith("{")]
    assert names == ["request-1", "request-2", "request-3"]


def test_batch_story_hundred_requests_equal_single_answers(served: Deployment, tmp_path: Path) -> None:
    requests = write_requests(served, tmp_path / "requests.jsonl", 100, 4)
    rows = run("sh", str(EXAMPLES / "command_line.sh"), served.url, "requests.jsonl", cwd=tmp_path)
    assert re.fullmatch(r"batch_\w+: completed; 100 of 100 completed, 0 failed; \d+ s", rows[0])
    assert rows[1:] == ["answers.jsonl"]
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [request["custom_id"] for request in requests]
    for request, line in list(zip(requests, lines, strict=True))[::25]:
        single = served.post(CHAT, request["body"]).json()
        assert line["response"]["body"]["choices"] == single["choices"]
