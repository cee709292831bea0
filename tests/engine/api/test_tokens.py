"""Text to tokens and back over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from baton_api.errors import (
    EMPTY_ARRAY,
    INTEGER_ABOVE_MAX_VALUE,
    INTEGER_BELOW_MIN_VALUE,
    INVALID_TYPE,
    MISSING_REQUIRED_PARAMETER,
    ModelNotFound,
)
from tests.engine.api.api import CONTEXT, MODEL, TOKENIZER, USER, Api, make_tokenizer, open_api
from tests.engine.api.test_validation import assert_error

TEXT = "Grüße, 世界 👋🏽!"
VOCAB = TOKENIZER.vocab_size


async def tokenize(api: Api, path: str = "/tokenize", **body: Any) -> Any:
    response = await api.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_text_goes_there_and_back(api: Api, prefix: str) -> None:
    reply = await tokenize(api, f"{prefix}/tokenize", prompt=TEXT)
    assert reply["tokens"] == TOKENIZER.encode(TEXT)
    assert (reply["count"], reply["max_model_len"], reply["token_strs"]) == (
        len(reply["tokens"]),
        CONTEXT,
        None,
    )
    back = (await api.http.post(f"{prefix}/detokenize", json={"tokens": reply["tokens"]})).json()
    assert back == {"text": TEXT, "prompt": TEXT}


async def test_several_prompts_give_lists(api: Api) -> None:
    reply = await tokenize(api, prompt=["ab", "", "c"], return_token_strs=True)
    assert reply["tokens"] == [TOKENIZER.encode("ab"), [], TOKENIZER.encode("c")]
    assert reply["count"] == [2, 0, 1]
    assert reply["token_strs"] == [["a", "b"], [], ["c"]]
    back = (await api.http.post("/detokenize", json={"tokens": reply["tokens"]})).json()
    assert back["text"] == ["ab", "", "c"]


async def test_special_tokens_are_skipped_unless_they_are_wanted(api: Api) -> None:
    ids = TOKENIZER.encode("<|user|>hi<|end|>")
    for skips, text in ((True, "hi"), (False, "<|user|>hi<|end|>")):
        body = {"tokens": ids, "skip_special_tokens": skips}
        assert (await api.http.post("/detokenize", json=body)).json()["text"] == text


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"mood": "glad"}},
        {"messages": [*USER, {"role": "assistant", "content": "Hel"}], "continue_final_message": True},
    ],
    ids=str,
)
async def test_tokenize_conversation_count_equals_prompt_tokens(api: Api, fields: dict[str, Any]) -> None:
    reply = await tokenize(api, **{"messages": USER} | fields)
    answered = (await api.chat(**fields)).json()
    assert reply["count"] == answered["usage"]["prompt_tokens"]


async def test_tokenize_text_over_the_context_is_counted(api: Api) -> None:
    assert (await tokenize(api, prompt="x" * 2 * CONTEXT))["count"] == 2 * CONTEXT
    long = [{"role": "user", "content": "x" * 2 * CONTEXT}]
    assert (await tokenize(api, messages=long))["count"] > 2 * CONTEXT


BAD: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("/tokenize", {}, MISSING_REQUIRED_PARAMETER, "prompt"),
    ("/tokenize", {"prompt": 7}, INVALID_TYPE, "prompt"),
    ("/tokenize", {"prompt": []}, EMPTY_ARRAY, "prompt"),
    ("/tokenize", {"prompt": [7]}, INVALID_TYPE, "prompt[0]"),
    ("/tokenize", {"prompt": ["a", ["b"]]}, INVALID_TYPE, "prompt[1]"),
    ("/tokenize", {"prompt": "a", "messages": USER}, None, "messages"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, INVALID_TYPE, "add_special_tokens"),
    ("/tokenize", {"prompt": "a", "return_token_strs": "no"}, INVALID_TYPE, "return_token_strs"),
    ("/tokenize", {"messages": []}, EMPTY_ARRAY, "messages"),
    ("/detokenize", {}, MISSING_REQUIRED_PARAMETER, "tokens"),
    ("/detokenize", {"tokens": "abc"}, INVALID_TYPE, "tokens"),
    ("/detokenize", {"tokens": ["a"]}, INVALID_TYPE, "tokens[0]"),
    ("/detokenize", {"tokens": [True]}, INVALID_TYPE, "tokens[0]"),
    ("/detokenize", {"tokens": [VOCAB]}, INTEGER_ABOVE_MAX_VALUE, "tokens[0]"),
    ("/detokenize", {"tokens": [-1]}, INTEGER_BELOW_MIN_VALUE, "tokens[0]"),
    ("/detokenize", {"tokens": [[1], 2]}, INVALID_TYPE, "tokens[1]"),
    ("/detokenize", {"tokens": [1, [2]]}, INVALID_TYPE, "tokens[1]"),
    ("/detokenize", {"tokens": [[1], [VOCAB]]}, INTEGER_ABOVE_MAX_VALUE, "tokens[1][0]"),
]


async def test_tokenize_invalid_request_names_its_field(api: Api) -> None:
    for path, body, code, param in BAD:
        assert_error(await api.http.post(path, json=body), 400, code, param)
        assert_error(await api.http.post(f"/v1{path}", json=body), 400, code, param)


async def test_tokenize_other_model_is_a_404(api: Api) -> None:
    assert (await tokenize(api, prompt="a", model=MODEL))["count"] == 1
    response = await api.http.post("/tokenize", json={"prompt": "a", "model": "nope"})
    assert_error(response, 404, ModelNotFound.code, "model")


async def test_tokenize_empty_text_is_accepted(api: Api) -> None:
    assert await tokenize(api, prompt="") == {
        "tokens": [],
        "count": 0,
        "max_model_len": CONTEXT,
        "token_strs": None,
    }
    assert (await api.http.post("/detokenize", json={"tokens": []})).json()["text"] == ""


async def test_tokenize_model_without_template_counts_text() -> None:
    tokenizer = make_tokenizer()
    tokenizer._tokenizer.chat_template = None
    async with open_api(tokenizer=tokenizer) as api:
        response = await api.http.post("/tokenize", json={"messages": USER})
        assert_error(response, 400, None, "messages")
        assert (await tokenize(api, prompt="ab"))["count"] == 2
