"""
The calls of the well-known tutorials on OpenAI-compatible servers, against Baton.

Start Baton, then run this script. Both use the built-in model by default:

    baton up
    python examples/openai_tutorial.py http://127.0.0.1:8000

It calls chat (plain, with every parameter, streamed, with separate reasoning), completions and the list of
models. It also calls SGLang's `/get_model_info` and `/generate`, with which those servers warm up. Its output
stands in README.md.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

from openai import OpenAI

ADDRESS = sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "http://127.0.0.1:8000"

# A server without keys accepts any string, but the SDK requires one.
client = OpenAI(base_url=f"{ADDRESS}/v1", api_key="None")


def main() -> None:
    model = wait_for_server()
    show("GET /v1/models", model)
    chat(model)
    chat_with_parameters(model)
    chat_streamed(model)
    chat_with_thinking(model)
    completion(model)
    completion_with_parameters(model)
    sglang_generate()


def wait_for_server() -> str:
    """Return the first model. The tutorials retry without end, this script only as often as the SDK does."""
    models = client.with_options(max_retries=8).models.list()
    return models.data[0].id


def chat(model: str) -> None:
    response = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "List 3 countries and their capitals."}],
        temperature=0,
        max_tokens=64,
    )
    show("POST /v1/chat/completions", response)


def chat_with_parameters(model: str) -> None:
    response = client.chat.completions.create(
        model=model,
        messages=[
            {"role": "system", "content": "You know history well and answer in one sentence."},
            {"role": "user", "content": "Tell me about ancient Rome."},
            {"role": "assistant", "content": "Ancient Rome grew from a city on the Tiber to an empire."},
            {"role": "user", "content": "What did its people build?"},
        ],
        temperature=0.3,
        max_tokens=128,
        top_p=0.95,
        presence_penalty=0.2,
        frequency_penalty=0.2,
        n=1,
        seed=42,
    )
    show("POST /v1/chat/completions, every parameter", response.choices[0].message.content)


def chat_streamed(model: str) -> None:
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Say in a few words what a relay race is."}],
        temperature=0,
        max_tokens=64,
        stream=True,
    )
    print("\n--- POST /v1/chat/completions, streamed")
    for chunk in stream:
        if chunk.choices[0].delta.content is not None:
            print(chunk.choices[0].delta.content, end="", flush=True)
    print()


def chat_with_thinking(model: str) -> None:
    """With a reasoning model and `--reasoning-parser`, `reasoning_content` has the reasoning."""
    for thinking in (True, False):
        response = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "How many letters has the word relay?"}],
            temperature=0,
            max_tokens=64,
            extra_body={
                "chat_template_kwargs": {"enable_thinking": thinking},
                "separate_reasoning": True,
            },
        )
        message = response.choices[0].message.model_dump()
        print(f"\n--- POST /v1/chat/completions, enable_thinking={thinking}")
        print("reasoning_content:", message.get("reasoning_content"))
        print("content:", message["content"])


def completion(model: str) -> None:
    response = client.completions.create(
        model=model,
        prompt="List 3 countries and their capitals.",
        temperature=0,
        max_tokens=64,
        n=1,
        stop=None,
    )
    show("POST /v1/completions", response)


def completion_with_parameters(model: str) -> None:
    response = client.completions.create(
        model=model,
        prompt="Once upon a time a runner carried a baton",
        temperature=0.7,
        max_tokens=150,
        top_p=0.9,
        stop=["\n\n", "THE END"],
        presence_penalty=0.3,
        frequency_penalty=0.3,
        n=1,
        seed=123,
    )
    show("POST /v1/completions, every parameter", response.choices[0].text)


def sglang_generate() -> None:
    show("GET /get_model_info", ask("/get_model_info"))
    warm_up = {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    show("POST /generate", ask("/generate", warm_up))


def ask(path: str, body: dict[str, Any] | None = None) -> Any:
    """Send a POST if there is a body, else a GET."""
    request = urllib.request.Request(
        f"{ADDRESS}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def show(title: str, result: Any) -> None:
    print(f"\n--- {title}")
    print(result if isinstance(result, str) else json.dumps(plain(result), indent=2, ensure_ascii=False))


def plain(result: Any) -> Any:
    return result.model_dump() if hasattr(result, "model_dump") else result


if __name__ == "__main__":
    main()
