"""
Batches by OpenAI's SDK: two requests, twenty that are watched, and many that are cancelled on the way.

    baton up
    python examples/batches/openai_sdk.py http://127.0.0.1:8000 [REQUESTS_TO_CANCEL]
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from openai import OpenAI
from openai.types import Batch

ADDRESS = sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "http://127.0.0.1:8000"
MANY = int(sys.argv[2]) if len(sys.argv) > 2 else 500

client = OpenAI(base_url=f"{ADDRESS}/v1", api_key="None")


def main() -> None:
    model = client.models.list().data[0].id
    two_requests(model)
    watched(model)
    cancelled(model)


def two_requests(model: str) -> None:
    batch = submit(
        [
            chat(1, model, 50, "Tell me a joke about programming"),
            chat(2, model, 50, "What is Python?", system="You are a helpful assistant."),
        ]
    )
    print(f"{batch.id} is {batch.status}")
    while batch.status not in ("completed", "failed", "cancelled"):
        time.sleep(1)
        batch = client.batches.retrieve(batch.id)
        print(f"{batch.id} is {batch.status}")
    assert batch.output_file_id, batch.errors
    results = client.files.content(batch.output_file_id).read().decode()
    for line in filter(None, results.split("\n")):
        result = json.loads(line)
        answer = result["response"]["body"]["choices"][0]["message"]["content"]
        print(f"{result['custom_id']} ({result['response']['status_code']}): {answer!r}")
    print("deleted:", client.files.delete(batch.output_file_id).deleted)


def watched(model: str) -> None:
    batch = submit([chat(number, model, 64, f"Say {number} in words.") for number in range(1, 21)])
    while batch.status not in ("completed", "failed", "cancelled"):
        time.sleep(1)
        batch = client.batches.retrieve(batch.id)
        counts = batch.request_counts
        assert counts is not None
        print(f"{batch.status}: {counts.completed} of {counts.total}, {counts.failed} failed")


def cancelled(model: str) -> None:
    batch = submit([chat(number, model, 128, f"Count to {number}.") for number in range(1, MANY + 1)])
    while batch.status == "validating" or not (batch.request_counts and batch.request_counts.completed):
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    batch = client.batches.cancel(batch.id)
    print("after cancel:", batch.status)
    while batch.status == "cancelling":
        time.sleep(1)
        batch = client.batches.retrieve(batch.id)
    counts = batch.request_counts
    assert counts is not None
    print(f"in the end: {batch.status}, {counts.completed} of {counts.total} answered")
    print("deleted:", client.files.delete(batch.input_file_id).deleted)


def chat(number: int, model: str, tokens: int, question: str, system: str = "") -> dict[str, Any]:
    """One line: a request as it would be sent alone, under a name."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0}
    return {"custom_id": f"request-{number}", "method": "POST", "url": "/chat/completions", "body": body}


def submit(requests: list[dict[str, Any]]) -> Batch:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "batch_requests.jsonl"
        path.write_text("".join(json.dumps(request) + "\n" for request in requests))
        with path.open("rb") as file:
            uploaded = client.files.create(file=file, purpose="batch")
    return client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
    )


if __name__ == "__main__":
    main()
