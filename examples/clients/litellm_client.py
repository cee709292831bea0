"""
Baton through LiteLLM: models, chat, stream, tool, structured output, embeddings, errors.

    pip install litellm mcp
    python examples/clients/litellm_client.py http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from typing import Literal

from pydantic import BaseModel

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # prices are not fetched from the internet

import litellm

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
    },
}


class Capital(BaseModel, extra="forbid"):
    city: Literal["Madrid", "Rome", "Paris"]
    country: Literal["Spain", "Italy", "France"]


def main() -> None:
    print("client: litellm", version("litellm"))
    litellm.suppress_debug_info = True
    model = litellm.get_valid_models(
        check_provider_endpoint=True, custom_llm_provider="openai", api_base=BASE_URL, api_key="EMPTY"
    )[0].removeprefix("openai/")
    print("model:", model)
    served = {"model": f"openai/{model}", "api_base": BASE_URL, "api_key": "EMPTY"}

    question = [{"role": "user", "content": "List 3 countries and their capitals."}]
    answer = litellm.completion(**served, messages=question, temperature=0, max_tokens=64)
    print("chat:", answer.choices[0].message.content)
    print("usage:", answer.usage.prompt_tokens, answer.usage.completion_tokens)

    stream = litellm.completion(**served, messages=question, temperature=0, max_tokens=64, stream=True)
    print("stream:", "".join(chunk.choices[0].delta.content or "" for chunk in stream))

    tool_answer = litellm.completion(
        **served,
        messages=[{"role": "user", "content": "What is the weather in Rome?"}],
        tools=[TOOL],
        tool_choice="required",
        max_tokens=200,
    )
    call = tool_answer.choices[0].message.tool_calls[0].function
    print("tool:", call.name, json.loads(call.arguments)["city"])

    schema = {
        "type": "json_schema",
        "json_schema": {"name": "capital", "schema": Capital.model_json_schema(), "strict": True},
    }
    filled = litellm.completion(**served, messages=question, response_format=schema, max_tokens=200)
    print("structured:", Capital.model_validate_json(filled.choices[0].message.content))

    try:
        embedded = litellm.embedding(**served, input=["a relay", "a baton"], encoding_format="float")
        print("embeddings:", len(embedded.data), "of", len(embedded.data[0]["embedding"]), "numbers")
    except litellm.BadRequestError as refusal:
        print("embeddings: refused,", refusal.message)

    try:
        litellm.completion(**{**served, "model": "openai/nope"}, messages=question)
    except litellm.NotFoundError as refusal:
        print("error:", refusal.status_code, refusal.code)
    try:
        litellm.completion(**served, messages=question, temperature=9)
    except litellm.BadRequestError as refusal:
        print("error:", refusal.status_code, refusal.param)


if __name__ == "__main__":
    main()
