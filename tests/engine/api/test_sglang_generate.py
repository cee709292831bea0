"""SGLang's native endpoint."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from baton_api.errors import (
    CONTEXT_LENGTH_EXCEEDED,
    DECIMAL_ABOVE_MAX_VALUE,
    INTEGER_ABOVE_MAX_VALUE,
    INTEGER_BELOW_MIN_VALUE,
    INVALID_TYPE,
    MISSING_REQUIRED_PARAMETER,
    UNSUPPORTED_PARAMETER,
)
from tests.engine.api.api import CONTEXT, TOKENIZER, Api, events
from tests.engine.api.test_validation import assert_error

GREEDY = {"temperature": 0, "max_new_tokens": 8}


async def generate(api: Api, **body: Any) -> Any:
    response = await api.http.post("/generate", json={"text": "Hi", "sampling_params": GREEDY} | body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_generate_warm_up_of_the_tutorials(api: Api) -> None:
    body = {"text": "The capital city of France is", "sampling_params": GREEDY}
    reply = (await api.http.post("/generate", json=body)).json()
    assert set(reply) == {"text", "output_ids", "meta_info"}
    assert TOKENIZER.decode(reply["output_ids"]) == reply["text"]
    meta = reply["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (29, 8, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert meta["id"] and meta["e2e_latency"] > 0
    completed = (await api.complete(prompt=body["text"], temperature=0, max_tokens=8)).json()
    assert completed["choices"][0]["text"] == reply["text"]


async def test_token_ids_are_the_same_prompt(api: Api) -> None:
    by_text = await generate(api)
    response = await api.http.post(
        "/generate", json={"input_ids": TOKENIZER.encode("Hi"), "sampling_params": GREEDY}
    )
    assert response.json()["text"] == by_text["text"]


async def test_generate_stream_events_are_cumulative(api: Api) -> None:
    whole = await generate(api)
    response = await api.http.post(
        "/generate", json={"text": "Hi", "sampling_params": GREEDY, "stream": True}
    )
    reply = events(response.text)
    texts = [event["text"] for event in reply]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert (texts[-1], reply[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    assert [event["meta_info"]["finish_reason"] for event in reply[:-1]] == [None] * (len(reply) - 1)
    assert reply[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
    assert [event["meta_info"]["completion_tokens"] for event in reply] == list(range(1, 9))


async def test_generate_prompt_list_and_n_give_lists(api: Api) -> None:
    reply = await generate(api, text=["a", "bc"], sampling_params=GREEDY | {"n": 2})
    assert [one["meta_info"]["prompt_tokens"] for one in reply] == [1, 1, 2, 2]
    assert len(await generate(api, text=["a"])) == 1
    response = await api.http.post(
        "/generate", json={"text": ["a", "bc"], "sampling_params": GREEDY, "stream": True}
    )
    assert {event["index"] for event in events(response.text)} == {0, 1}


async def test_generate_stop_string_is_named_and_cut(api: Api) -> None:
    api.model.script = "abc STOP def"
    reply = await generate(
        api, text="<|assistant|>", sampling_params=GREEDY | {"stop": " STOP", "max_new_tokens": 40}
    )
    assert reply["text"] == "abc"
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": " STOP"}


async def test_logprobs_come_as_rows(api: Api) -> None:
    reply = await generate(api, return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True)
    meta = reply["meta_info"]
    assert [row[1] for row in meta["output_token_logprobs"]] == reply["output_ids"]
    assert "".join(row[2] for row in meta["output_token_logprobs"]) == reply["text"]
    for row, tops in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert len(tops) == 2 and row[0] <= 0
        assert tops[0][:2] == row[:2], "greedy"
    plain = await generate(api, return_logprob=True)
    assert plain["meta_info"]["output_token_logprobs"][0][2] is None


async def test_generate_prompt_logprobs_equal_an_echo(api: Api) -> None:
    fields = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    meta = (await generate(api, text="abcd", **fields))["meta_info"]
    echoed = await api.complete(prompt="abcd", echo=True, logprobs=1, max_tokens=0)
    expected = echoed.json()["choices"][0]["logprobs"]["token_logprobs"]
    assert [row[0] for row in meta["input_token_logprobs"]] == expected
    assert [row[1] for row in meta["input_token_logprobs"]] == TOKENIZER.encode("abcd")
    assert meta["input_top_logprobs"][0] is None
    assert [len(tops) for tops in meta["input_top_logprobs"][1:]] == [1, 1, 1]
    later = await generate(api, text="abcd", **fields | {"logprob_start_len": 2})
    assert later["meta_info"]["input_token_logprobs"] == meta["input_token_logprobs"][2:]
    only = await generate(api, text="abcd", return_logprob=True)
    assert only["meta_info"]["input_token_logprobs"] == []


async def test_generate_rid_is_the_answers_id(api: Api) -> None:
    assert (await generate(api, rid="mine"))["meta_info"]["id"] == "mine"


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, MISSING_REQUIRED_PARAMETER, "text"),
        ({"text": "a", "input_ids": [1]}, None, "text"),
        ({"text": 7}, INVALID_TYPE, "text"),
        ({"input_ids": [-1]}, INTEGER_BELOW_MIN_VALUE, "input_ids[0]"),
        ({"text": "a", "sampling_params": []}, INVALID_TYPE, "sampling_params"),
        ({"text": "a", "sampling_params": {"min_p": 3}}, DECIMAL_ABOVE_MAX_VALUE, "sampling_params.min_p"),
        ({"text": "a", "sampling_params": {"n": 0}}, INTEGER_BELOW_MIN_VALUE, "sampling_params.n"),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": -1}},
            INTEGER_BELOW_MIN_VALUE,
            "sampling_params.max_new_tokens",
        ),
        ({"text": "a", "sampling_params": {"max_new_tokens": CONTEXT}}, CONTEXT_LENGTH_EXCEEDED, "text"),
        ({"text": "a", "stream": "yes"}, INVALID_TYPE, "stream"),
        ({"text": "a", "return_logprob": 1}, INVALID_TYPE, "return_logprob"),
        ({"text": "a", "top_logprobs_num": 21}, INTEGER_ABOVE_MAX_VALUE, "top_logprobs_num"),
        (
            {"text": "a", "return_logprob": True, "logprob_start_len": 0, "stream": True},
            None,
            "logprob_start_len",
        ),
        ({"text": "a", "image_data": "x"}, UNSUPPORTED_PARAMETER, "image_data"),
        ({"text": "a", "rid": 7}, INVALID_TYPE, "rid"),
    ],
    ids=str,
)  # fmt: skip
async def test_generate_invalid_field_is_named(
    api: Api, body: dict[str, Any], code: str | None, param: str
) -> None:
    assert_error(await api.http.post("/generate", json=body), 400, code, param)


async def test_many_tokens_stay_one_json_object_an_event(api: Api) -> None:
    response = await api.http.post(
        "/generate", json={"text": "Hi", "sampling_params": {"max_new_tokens": 100}, "stream": True}
    )
    for line in response.text.split("\n\n")[:-2]:
        msgspec.json.decode(line.removeprefix("data: "))
