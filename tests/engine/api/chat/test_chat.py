"""Chat completions, not streamed: the shape of the answer and what decides its text."""

from __future__ import annotations

import openai
import pytest

from baton_api import headers as header_names
from baton_api.errors import ModelNotFound
from tests.engine.api.api import CONTEXT, END, LETTERS, MODEL, TOKENIZER, USER, Api, open_api


async def test_chat_answer_has_every_field_of_the_api(api: Api) -> None:
    api.model.script = "Hello."
    response = await api.chat(max_tokens=50)
    assert response.status_code == 200
    body = response.json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert isinstance(body["created"], int)
    assert body["model"] == MODEL
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": "Hello.",
            "refusal": None,
            "annotations": [],
            "reasoning_content": None,
            "reasoning": None,
        },
        "logprobs": None,
        "finish_reason": "stop",
        "matched_stop": END,
        "stop_reason": None,
    }
    prompt = len(TOKENIZER.encode("<|user|>Hi<|end|><|assistant|>"))
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": len("Hello.") + 1,
        "total_tokens": prompt + len("Hello.") + 1,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


async def test_chat_answer_is_read_by_the_sdk(api: Api, sdk: openai.AsyncOpenAI) -> None:
    api.model.script = "Grüße 🎉"
    answer = await sdk.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
    assert answer.choices[0].message.content == "Grüße 🎉"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == len("Grüße 🎉".encode()) + 1


async def test_chat_without_max_tokens_ends_with_the_context(api: Api) -> None:
    body = (await api.chat(max_tokens=None, ignore_eos=True)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == CONTEXT


async def test_max_completion_tokens_wins_over_max_tokens(api: Api) -> None:
    body = (await api.chat(max_tokens=9, max_completion_tokens=3)).json()
    assert body["usage"]["completion_tokens"] == 3
    assert body["choices"][0]["finish_reason"] == "length"


async def test_chat_repeated_prompt_is_cached(api: Api) -> None:
    messages = [{"role": "user", "content": "x" * 100}]
    first = (await api.chat(messages=messages, temperature=0)).json()
    second = (await api.chat(messages=messages, temperature=0)).json()
    assert second["choices"] == first["choices"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert 90 <= second["usage"]["prompt_tokens_details"]["cached_tokens"] < 103


async def test_equal_seeds_give_equal_answers_and_others_do_not(api: Api) -> None:
    async def text(**body: object) -> str:
        return str((await api.chat(max_tokens=24, **body)).json()["choices"][0]["message"]["content"])

    assert await text(seed=5) == await text(seed=5)
    assert await text(seed=5) != await text(seed=6)
    assert await text() != await text()
    assert await text(seed=-1) == await text(seed=-1)


async def test_chat_n_choices_differ_and_first_equals_n_1(api: Api) -> None:
    many = (await api.chat(n=4, seed=5, max_tokens=16, ignore_eos=True)).json()
    again = (await api.chat(n=4, seed=5, max_tokens=16, ignore_eos=True)).json()
    one = (await api.chat(seed=5, max_tokens=16, ignore_eos=True)).json()
    texts = [choice["message"]["content"] for choice in many["choices"]]
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert many["choices"] == again["choices"]
    assert one["choices"][0] == many["choices"][0]
    assert many["usage"]["completion_tokens"] == 64
    assert many["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    api.assert_all_blocks_back()


async def test_n_greedy_choices_are_equal(api: Api) -> None:
    body = (await api.chat(n=2, temperature=0)).json()
    assert body["choices"][0]["message"] == body["choices"][1]["message"]


async def test_chat_n_choices_share_the_cached_prompt(api: Api) -> None:
    await api.chat(n=8, messages=[{"role": "user", "content": "y" * 200}], max_tokens=2)
    assert await api.metric('baton_worker_prompt_tokens_total{source="cached"}') >= 7 * 200


@pytest.mark.parametrize("body", [{"top_p": 0}, {"temperature": 1e-9}, {"top_k": 1}], ids=str)
async def test_chat_sampling_without_alternatives_is_greedy(api: Api, body: dict[str, float]) -> None:
    greedy = (await api.chat(temperature=0)).json()["choices"]
    assert (await api.chat(**body)).json()["choices"] == greedy


async def test_chat_logprobs_cover_every_token_and_spell_the_text(api: Api) -> None:
    body = (await api.chat(logprobs=True, top_logprobs=3, temperature=0)).json()
    (choice,) = body["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"] == 8
    assert choice["logprobs"]["refusal"] is None
    assert (
        bytes(byte for entry in content for byte in entry["bytes"]).decode() == choice["message"]["content"]
    )
    for entry in content:
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(tops) == 3 and tops == sorted(tops, reverse=True)
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert -9999.0 <= entry["logprob"] <= 0


async def test_chat_logit_bias_decides_the_token(api: Api) -> None:
    body = (await api.chat(logit_bias={str(LETTERS[3]): 100}, max_tokens=4, ignore_eos=True)).json()
    assert body["choices"][0]["message"]["content"] == "dddd"


async def test_min_tokens_holds_the_end_back(api: Api) -> None:
    api.model.script = "ab"
    body = (await api.chat(min_tokens=6, max_tokens=12)).json()
    assert body["usage"]["completion_tokens"] == 7
    assert (await api.chat(ignore_eos=True)).json()["usage"]["completion_tokens"] == 8


async def test_text_parts_and_developer_messages_reach_the_template(api: Api) -> None:
    api.model.script = ""
    messages = [
        {"role": "developer", "content": "Be."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    body = (await api.chat(messages=messages, return_token_ids=True)).json()
    expected = "<|system|>Be.<|end|><|user|>a\nb<|end|><|assistant|>"
    assert TOKENIZER.decode(body["prompt_token_ids"], skip_special_tokens=False) == expected
    assert body["choices"][0]["token_ids"] == [END]


async def test_chat_final_assistant_message_is_continued(api: Api) -> None:
    messages = [*USER, {"role": "assistant", "content": "Once upon"}]
    body = (await api.chat(messages=messages, continue_final_message=True, return_token_ids=True)).json()
    prompt = TOKENIZER.decode(body["prompt_token_ids"], skip_special_tokens=False)
    assert prompt == "<|user|>Hi<|end|><|assistant|>Once upon"


async def test_chat_template_variables_reach_the_template(api: Api) -> None:
    body = (
        await api.chat(chat_template_kwargs={"mood": "!", "enable_thinking": True}, return_token_ids=True)
    ).json()
    prompt = TOKENIZER.decode(body["prompt_token_ids"], skip_special_tokens=False)
    assert prompt == "<|user|>Hi<|end|>!<|assistant|>"


async def test_special_tokens_are_shown_on_demand(api: Api) -> None:
    api.model.script = "a<|user|>b"
    hidden = (await api.chat()).json()["choices"][0]["message"]["content"]
    shown = (await api.chat(skip_special_tokens=False)).json()["choices"][0]["message"]["content"]
    assert (hidden, shown) == ("ab", "a<|user|>b")


async def test_unknown_fields_and_nulls_change_nothing(api: Api) -> None:
    nullable = [
        "max_tokens", "temperature", "top_p", "n", "stop", "presence_penalty", "logit_bias",
        "logprobs", "top_logprobs", "seed", "response_format", "stream", "tools", "tool_choice",
        "metadata", "store", "service_tier", "user", "reasoning_effort", "verbosity", "modalities", "audio",
        "prediction", "parallel_tool_calls", "safety_identifier", "prompt_cache_key", "stream_options",
        "frequency_penalty",
    ]  # fmt: skip
    response = await api.chat(foo=1, **dict.fromkeys(nullable))
    assert response.status_code == 200


async def test_metadata_comes_back(api: Api) -> None:
    assert (await api.chat(metadata={"run": "7"})).json()["metadata"] == {"run": "7"}
    tags = {"tags": ["a", "b"], "trace_version": "1"}
    assert (await api.chat(metadata=tags)).json()["metadata"] == {"tags": '["a","b"]', "trace_version": "1"}


async def test_models_are_listed_and_found_with_their_slash(api: Api, sdk: openai.AsyncOpenAI) -> None:
    (listed,) = [model async for model in sdk.models.list()]
    assert (await sdk.models.retrieve(MODEL)).model_dump() == listed.model_dump()
    assert listed.id == MODEL and listed.object == "model" and listed.created > 0
    with pytest.raises(openai.NotFoundError) as caught:
        await sdk.models.retrieve("nope")
    assert (caught.value.code, caught.value.param) == (ModelNotFound.code, "model")


async def test_chat_router_headers_start_a_remote_prefill() -> None:
    requested: list[tuple[str, str, str]] = []

    def remote(address: str, ticket: str, request_id: str) -> None:
        requested.append((address, ticket, request_id))

    async with open_api(remote=remote) as api:
        headers = {
            header_names.PREFILL: "10.0.0.1:7000",
            header_names.TICKET: "v1.x",
            header_names.REQUEST_ID: "r-1",
        }
        body = {"model": MODEL, "messages": USER, "max_tokens": 1, "n": 2}
        assert (await api.http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
        await api.chat()
    assert requested == [("10.0.0.1:7000", "v1.x", "r-1")]
