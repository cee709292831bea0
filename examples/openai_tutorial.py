"""
The calls of the well-known tutorials on OpenAI-compatible servers, against Baton.

Start Baton, then run this; both take the built-in model if nothing else is said:

    baton up
    python examples/openai_tutorial.py http://127.0.0.1:8080

Chat (plain, with every parameter, streamed, with a thought apart), completions, the list of models, and the
native `/get_model_info` and `/generate` that those servers warm up with. What it printed is in README.md.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

from openai import OpenAI

ADDRESS = sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "http://127.0.0.1:8080"

# Without a key at the server any string is accepted; the SDK wants one.
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
    native()


def wait_for_server() -> str:
    """The tutorials ask for the models until they are told: here at most until the SDK's retries end."""
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
    """With a model that thinks, and `--reasoning-parser`, the thought stands in `reasoning_content`."""
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


def native() -> None:
    show("GET /get_model_info", ask("/get_model_info"))
    warm_up = {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    show("POST /generate", ask("/generate", warm_up))


def ask(path: str, body: dict[str, Any] | None = None) -> Any:
    """GET, or POST if there is a body."""
    request = urllib.request.Request(
        f"{ADDRESS}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def show(what: str, found: Any) -> None:
    print(f"\n--- {what}")
    print(found if isinstance(found, str) else json.dumps(plain(found), indent=2, ensure_ascii=False))


def plain(found: Any) -> Any:
    return found.model_dump() if hasattr(found, "model_dump") else found


if __name__ == "__main__":
    main()
