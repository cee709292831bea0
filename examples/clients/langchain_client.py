"""
Baton through LangChain: models, chat, stream, tool, structured output, embeddings, errors.

    pip install langchain-openai
    python examples/clients/langchain_client.py http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Literal

import openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"


@tool
def get_weather(city: Literal["Madrid", "Rome"]) -> str:
    """The weather in a city."""
    return f"It is sunny in {city}."


class Capital(BaseModel):
    """A city that is a capital."""

    city: Literal["Madrid", "Rome", "Paris"]
    country: Literal["Spain", "Italy", "France"]


def main() -> None:
    print("client: langchain-openai", version("langchain-openai"))
    model = openai.OpenAI(base_url=BASE_URL, api_key="EMPTY").models.list().data[0].id
    print("model:", model)

    chat = ChatOpenAI(model=model, base_url=BASE_URL, api_key="EMPTY", temperature=0, max_tokens=200)
    question = "List 3 countries and their capitals."
    answer = chat.invoke(question)
    print("chat:", answer.content)
    print("usage:", answer.usage_metadata["input_tokens"], answer.usage_metadata["output_tokens"])

    print("stream:", "".join(chunk.content for chunk in chat.stream(question)))

    tool_answer = chat.bind_tools([get_weather], tool_choice="required").invoke(
        "What is the weather in Rome?"
    )
    print("tool:", tool_answer.tool_calls[0]["name"], tool_answer.tool_calls[0]["args"]["city"])
    print("tool said:", get_weather.invoke(tool_answer.tool_calls[0]["args"]))

    structured = chat.with_structured_output(Capital, method="json_schema")
    print("structured:", structured.invoke(question))

    # Baton takes texts; LangChain would send token ids of a tokenizer that is not this model's.
    embeddings = OpenAIEmbeddings(
        model=model, base_url=BASE_URL, api_key="EMPTY", check_embedding_ctx_length=False
    )
    try:
        embedded = embeddings.embed_documents(["a relay", "a baton"])
        print("embeddings:", len(embedded), "of", len(embedded[0]), "numbers")
    except openai.BadRequestError as refusal:
        print("embeddings: refused,", refusal.body["message"])

    try:
        ChatOpenAI(model="nope", base_url=BASE_URL, api_key="EMPTY").invoke(question)
    except openai.NotFoundError as refusal:
        print("error:", refusal.status_code, refusal.code)
    try:
        ChatOpenAI(model=model, base_url=BASE_URL, api_key="EMPTY", temperature=9).invoke(question)
    except openai.BadRequestError as refusal:
        print("error:", refusal.status_code, refusal.param)


if __name__ == "__main__":
    main()
