"""The same short story with each client that people use, and the tutorials' calls: the examples, run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.deployment import TIMEOUT_S, Deployment
from tests.conformance.environments import run_client
from tests.conformance.scripted import ANSWER

EXAMPLES = Path(__file__).parents[2] / "examples"

CLIENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "openai 3": ("openai_sdk.py", ("openai==3.54.0",)),
    "openai 2": ("openai_sdk.py", ("openai==2.54.0",)),
    "langchain-openai": ("langchain_client.py", ("langchain-openai==1.7.3",)),
    "litellm": ("litellm_client.py", ("litellm==1.106.2", "mcp==2.3.0")),
}
"""The script, and the packages that it runs with."""


@pytest.mark.parametrize("client", CLIENTS)
def test_story_is_the_same_with_every_library(thinker: Deployment, client: str) -> None:
    script, packages = CLIENTS[client]
    printed = run_client(EXAMPLES / "clients" / script, f"{thinker.url}/v1", packages)
    lines = dict(line.split(": ", 1) for line in printed.splitlines() if not line.startswith("error"))
    library, version = packages[0].split("==")
    assert lines["client"] == f"{library} {version}"
    assert lines["model"] == "thinker"
    assert lines["chat"] == lines["stream"] == ANSWER
    prompt_tokens, completion_tokens = map(int, lines["usage"].split())
    assert prompt_tokens > 10 and completion_tokens > len(thinker.tokenize(ANSWER))
    assert lines["tool"] in ("get_weather Rome", "get_weather Madrid")
    assert re.fullmatch(r"city='(Madrid|Rome|Paris)' country='(Spain|Italy|France)'", lines["structured"])
    assert lines["embeddings"] == "2 of 64 numbers"
    errors = [line for line in printed.splitlines() if line.startswith("error")]
    assert len(errors) == 2 and errors[0].startswith("error: 404") and errors[1].startswith("error: 400")


def test_story_is_the_same_with_curl(thinker: Deployment) -> None:
    printed = run_client(EXAMPLES / "clients" / "curl.sh", f"{thinker.url}/v1")
    client, *rows = printed.splitlines()
    assert client.startswith("client: curl ")
    parsed = []
    for row in rows:
        match = re.fullmatch(r"(\w+): (\d{3}) (.*)", row)
        assert match, row
        parsed.append((match[1], int(match[2]), match[3]))
    assert [(name, status) for name, status, _ in parsed] == [
        ("model", 200),
        ("chat", 200),
        ("stream", 200),
        ("tool", 200),
        ("structured", 200),
        ("embeddings", 200),
        ("error", 404),
        ("error", 400),
    ]
    bodies = {name: body for name, _, body in parsed}
    assert json.loads(bodies["chat"])["choices"][0]["message"]["content"] == ANSWER
    events = bodies["stream"].split(" data: ")
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == ANSWER
    call = json.loads(bodies["tool"])["choices"][0]["message"]["tool_calls"][0]["function"]
    assert call["name"] == "get_weather" and json.loads(call["arguments"])["city"] in ("Rome", "Madrid")
    filled = json.loads(json.loads(bodies["structured"])["choices"][0]["message"]["content"])
    assert set(filled) == {"city", "country"}
    assert len(json.loads(bodies["embeddings"])["data"]) == 2


SECTIONS = (
    "GET /v1/models",
    "POST /v1/chat/completions",
    "POST /v1/chat/completions, every parameter",
    "POST /v1/chat/completions, streamed",
    "POST /v1/chat/completions, enable_thinking=True",
    "POST /v1/chat/completions, enable_thinking=False",
    "POST /v1/completions",
    "POST /v1/completions, every parameter",
    "GET /get_model_info",
    "POST /generate",
)


def test_tutorial_calls_are_answered(served: Deployment) -> None:
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / "openai_tutorial.py"), served.url],
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    parts = re.split(r"^--- (.*)\n", ended.stdout, flags=re.MULTILINE)[1:]
    printed = dict(zip(parts[::2], (part.strip() for part in parts[1::2]), strict=True))
    assert tuple(printed) == SECTIONS
    assert printed["GET /v1/models"] == served.model
    chat = json.loads(printed["POST /v1/chat/completions"])
    choice = chat["choices"][0]
    assert chat["object"] == "chat.completion" and choice["message"]["content"]
    assert "matched_stop" in choice and choice["message"].get("reasoning_content") is None
    assert printed["POST /v1/chat/completions, every parameter"]
    assert printed["POST /v1/chat/completions, streamed"]
    for thinking in (True, False):
        part = printed[f"POST /v1/chat/completions, enable_thinking={thinking}"]
        assert re.fullmatch(r"reasoning_content: None\ncontent: .+", part, re.DOTALL)
    completion = json.loads(printed["POST /v1/completions"])
    assert completion["object"] == "text_completion" and completion["choices"][0]["text"]
    assert completion["usage"]["completion_tokens"] == 64 or completion["choices"][0]["matched_stop"]
    assert printed["POST /v1/completions, every parameter"]
    info = json.loads(printed["GET /get_model_info"])
    assert info["model_path"] and info["is_generation"] is True
    generated = json.loads(printed["POST /generate"])
    assert generated["text"] and generated["meta_info"]["completion_tokens"] == 8
