"""A client with one question."""

from __future__ import annotations

import openai


def ask(url: str, model: str, question: str = "What is the capital of France?", tokens: int = 16) -> str:
    """Return the answer. Raises the errors of the SDK."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            max_tokens=tokens,
            temperature=0,
        )
    return answer.choices[0].message.content or ""
