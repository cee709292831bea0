"""
Baton through OpenAI's SDK, major 2 or 3: models, chat, stream, tool, structured output, embeddings, errors.

    pip install openai
    python examples/clients/openai_sdk.py http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Madrid", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class Capital(BaseModel):
    city: Literal["Madrid", "Rome", "Paris"]
    country: Literal["Spain", "Italy", "France"]


def main() -> None:
    print("client: openai", openai.__version__)
    client = openai.OpenAI(base_url=BASE_URL, api_key="EMPTY")

    model = client.models.list().data[0].id
    print("model:", model)

    question = [{"role": "user", "content": "List 3 countries and their capitals."}]
    answer = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=64)
    print("chat:", answer.choices[0].message.content)
    print("usage:", answer.usage.prompt_tokens, answer.usage.completion_tokens)

    stream = client.chat.completions.create(
        model=model, messages=question, temperature=0, max_tokens=64, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    print("stream:", "".join(pieces))

    tool_answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the weather in Rome?"}],
        tools=[TOOL],
        tool_choice="required",
        max_tokens=200,
    )
    call = tool_answer.choices[0].message.tool_calls[0].function
    print("tool:", call.name, json.loads(call.arguments)["city"])

    parsed = client.chat.completions.parse(
        model=model, messages=question, response_format=Capital, max_tokens=200
    )
    print("structured:", parsed.choices[0].message.parsed)

    try:
        embedded = client.embeddings.create(model=model, input=["a relay", "a baton"])
        print("embeddings:", len(embedded.data), "of", len(embedded.data[0].embedding), "numbers")
    except openai.BadRequestError as refusal:
        print("embeddings: refused,", refusal.body["message"])

    try:
        client.chat.completions.create(model="nope", messages=question)
    except openai.NotFoundError as refusal:
        print("error:", refusal.status_code, refusal.code)
    try:
        client.chat.completions.create(model=model, messages=question, temperature=9)
    except openai.BadRequestError as refusal:
        print("error:", refusal.status_code, refusal.param)


if __name__ == "__main__":
    main()
