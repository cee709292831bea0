"""H: usage and the prefix cache."""

from __future__ import annotations

import random
from typing import Any

from tests.conformance.deployment import Deployment

COUNT = 1000


def fresh_prompt(served: Deployment, seed: int) -> list[int]:
    """A thousand tokens that no request has had before."""
    return random.Random(f"{served.way} {seed}").choices(range(1000, 20_000), k=COUNT)


def test_H1_a_long_prompt_is_computed_once(served: Deployment) -> None:
    prompt = fresh_prompt(served, 1)
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
    first, second = (served.complete(prompt, **fields) for _ in range(2))
    assert first.choices[0].text == second.choices[0].text
    assert first.usage and second.usage and second.usage.prompt_tokens_details
    assert first.usage.prompt_tokens_details
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens
    assert 900 <= second.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens == COUNT


def test_H2_a_salt_keeps_prefixes_apart(served: Deployment) -> None:
    """A client that salts its prompts is not served from another one's cache, and is from its own."""
    prompt = fresh_prompt(served, 2)[:200]
    served.post_completion(prompt, max_tokens=1, cache_salt="mine").raise_for_status()

    def cached(**more: Any) -> int:
        answer = served.post_completion(prompt, max_tokens=1, **more).raise_for_status()
        tokens: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    assert cached(cache_salt="yours") == 0
    assert cached() == 0
    assert cached(cache_salt="mine") >= 160


def test_H3_usage_has_both_details_everywhere(served: Deployment) -> None:
    for answer in (
        served.post_chat(max_tokens=1).json(),
        served.post_completion("a", max_tokens=1).json(),
        served.stream_chat(max_tokens=1, stream_options={"include_usage": True})[-1],
        served.stream_completion("a", max_tokens=1, stream_options={"include_usage": True})[-1],
    ):
        usage = answer["usage"]
        prompt, completion = usage["prompt_tokens_details"], usage["completion_tokens_details"]
        assert {"cached_tokens", "audio_tokens"} <= set(prompt)
        assert {
            "reasoning_tokens",
            "audio_tokens",
            "accepted_prediction_tokens",
            "rejected_prediction_tokens",
        } <= set(completion)
        assert all(isinstance(value, int) for value in (*prompt.values(), *completion.values()))
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_H4_the_token_that_ends_an_answer_is_counted(served: Deployment) -> None:
    answer = served.post_chat(temperature=0, max_tokens=20, regex="ab", return_token_ids=True)
    body = answer.raise_for_status().json()
    assert body["choices"][0]["message"]["content"] == "ab"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len(body["choices"][0]["token_ids"])
