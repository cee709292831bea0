"""Log probabilities of a prompt: echoed before an answer, or by vLLM's `prompt_logprobs`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import openai
import pytest
import torch

from baton_engine.api.completions import echo_of
from baton_engine.api.logprobs import FLOOR, chat_logprobs, echoed_logprobs
from baton_engine.api.prompts import PromptInput
from tests.engine.api.api import CONTEXT, END, GO, LETTERS, MODEL, TOKENIZER, USER, Api, events

TEXT = "Hi there"
IDS = TOKENIZER.encode(TEXT)


def expected(api: Api, ids: Sequence[int]) -> list[float]:
    """Of each token but the first."""
    rows = [api.model.logits(list(ids[:end])).log_softmax(-1) for end in range(1, len(ids))]
    return [max(float(row[token]), FLOOR) for row, token in zip(rows, ids[1:], strict=True)]


def arrays(body: dict[str, Any]) -> dict[str, list[Any]]:
    logprobs = body["logprobs"]
    assert len({len(values) for values in logprobs.values()}) == 1
    return dict(logprobs)


@pytest.mark.parametrize("prompt", [TEXT, IDS], ids=["text", "ids"])
async def test_echo_has_prompt_logprobs_before_the_answers(api: Api, prompt: Any) -> None:
    plain = (await api.complete(prompt=prompt, temperature=0, max_tokens=4, logprobs=2)).json()["choices"][0]
    answer = (await api.complete(prompt=prompt, temperature=0, max_tokens=4, logprobs=2, echo=True)).json()
    (choice,) = answer["choices"]
    shown = arrays(choice)
    assert choice["text"] == TEXT + plain["text"]
    assert shown["tokens"] == [*TEXT, *plain["text"]]
    assert shown["token_logprobs"][0] is None and shown["top_logprobs"][0] is None
    assert shown["token_logprobs"][1 : len(IDS)] == pytest.approx(expected(api, IDS), abs=1e-4)
    assert shown["token_logprobs"][len(IDS) :] == plain["logprobs"]["token_logprobs"]
    assert shown["top_logprobs"][len(IDS) :] == plain["logprobs"]["top_logprobs"]
    for token, offset in zip(shown["tokens"], shown["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    for token, logprob, tops in list(
        zip(shown["tokens"], shown["token_logprobs"], shown["top_logprobs"], strict=True)
    )[1:]:
        assert 2 <= len(tops) <= 3 and tops[token] == logprob
    assert answer["usage"]["prompt_tokens"] == len(IDS) and answer["usage"]["completion_tokens"] == 4


async def test_scoring_alone_generates_nothing(api: Api) -> None:
    body = (await api.complete(prompt=[TEXT, "you", "a"], max_tokens=0, logprobs=0, echo=True)).json()
    for choice, text in zip(body["choices"], (TEXT, "you", "a"), strict=True):
        shown = arrays(choice)
        assert choice["text"] == text and choice["finish_reason"] == "length"
        assert shown["tokens"] == list(text)
        ids = TOKENIZER.encode(text)
        assert shown["token_logprobs"][1:] == pytest.approx(expected(api, ids), abs=1e-4)
    assert body["usage"]["completion_tokens"] == 0
    assert body["usage"]["prompt_tokens"] == len(TEXT) + 4


async def test_echo_prompt_that_fills_the_context_is_scored(api: Api) -> None:
    prompt = "x" * CONTEXT
    answer = await api.complete(prompt=prompt, max_tokens=0, logprobs=0, echo=True)
    assert answer.status_code == 200 and len(arrays(answer.json()["choices"][0])["tokens"]) == CONTEXT
    assert (await api.complete(prompt=prompt, max_tokens=1)).status_code == 400


async def test_echo_stream_has_the_prompt_in_each_first_chunk(api: Api) -> None:
    fields = {"prompt": [TEXT, "you"], "n": 2, "max_tokens": 3, "seed": 5, "logprobs": 1, "echo": True}
    whole = (await api.complete(**fields)).json()["choices"]
    chunks = [chunk["choices"][0] for chunk in events((await api.complete(**fields, stream=True)).text)]
    for index, choice in enumerate(whole):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        prompt = (TEXT, "you")[index // 2]
        assert own[0]["text"] == prompt and own[0]["logprobs"]["tokens"] == list(prompt)
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for chunk in own for value in (chunk["logprobs"] or {}).get(name, [])] == values
    api.assert_all_blocks_back()


async def test_echo_choices_share_the_prompts_logprobs(api: Api) -> None:
    body = (await api.complete(prompt=TEXT, n=3, max_tokens=2, logprobs=1, echo=True, seed=1)).json()
    first, *others = [arrays(choice)["token_logprobs"][: len(IDS)] for choice in body["choices"]]
    assert others == [first, first] and len(set(first)) > 2
    assert body["usage"]["completion_tokens"] == 6


async def test_offsets_count_the_characters_of_the_prompt_as_it_came(api: Api) -> None:
    text = "é <|user|>!"
    body = (await api.complete(prompt=text, max_tokens=1, logprobs=0, echo=True)).json()
    shown = arrays(body["choices"][0])
    assert body["choices"][0]["text"].startswith(text)
    assert shown["text_offset"] == [0, 0, 1, 2, 10, 11]
    assert shown["tokens"][3] == "<|user|>"


async def test_tokens_are_named_by_their_ids_on_demand(api: Api) -> None:
    body = (
        await api.complete(
            max_tokens=2, logprobs=1, echo=True, return_tokens_as_token_ids=True, temperature=0
        )
    ).json()
    shown = arrays(body["choices"][0])
    prompt = TOKENIZER.encode("Hi")
    assert shown["tokens"][:2] == [f"token_id:{token}" for token in prompt]
    assert all(name.startswith("token_id:") for tops in shown["top_logprobs"][1:] for name in tops)
    body = (
        await api.chat(logprobs=True, top_logprobs=1, max_tokens=1, return_tokens_as_token_ids=True)
    ).json()
    (entry,) = body["choices"][0]["logprobs"]["content"]
    token = int(entry["token"].removeprefix("token_id:"))
    assert token in LETTERS and bytes(entry["bytes"]).decode() == TOKENIZER.decode([token])
    assert entry["top_logprobs"][0]["token"].startswith("token_id:")


async def test_logprob_token_ids_replace_the_likeliest(api: Api) -> None:
    requested = [LETTERS[3], END, LETTERS[7], LETTERS[3]]
    fields = {"temperature": 0, "max_tokens": 2, "logprob_token_ids": requested}
    body = (await api.complete(**fields, logprobs=0, echo=True)).json()
    shown = arrays(body["choices"][0])
    ids = TOKENIZER.encode("Hi")
    for tops, drawn in zip(shown["top_logprobs"][2:], shown["tokens"][2:], strict=True):
        values = api.model.logits(ids).log_softmax(-1)
        assert tops.keys() == {*(TOKENIZER.token_text(token) for token in requested), drawn}
        for token in requested:
            assert tops[TOKENIZER.token_text(token)] == pytest.approx(
                max(float(values[token]), FLOOR), abs=1e-4
            )
        ids += TOKENIZER.encode(drawn)
    assert [len(tops) for tops in shown["top_logprobs"][1:2]] == [1], "an echo has as many as it asks for"
    (entry, _) = (await api.chat(**fields, logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    tops = entry["top_logprobs"]
    assert {top["token"] for top in tops} == {TOKENIZER.token_text(token) for token in requested}
    assert [top["logprob"] for top in tops] == sorted((top["logprob"] for top in tops), reverse=True)


async def test_prompt_logprobs_are_maps_by_token_id(api: Api) -> None:
    body = (await api.complete(prompt=[TEXT, "you"], n=2, prompt_logprobs=2, max_tokens=1)).json()
    assert len(body["choices"]) == 4
    for choice in body["choices"]:
        ids = TOKENIZER.encode((TEXT, "you")[choice["index"] // 2])
        first, *rest = choice["prompt_logprobs"]
        assert first is None and choice["logprobs"] is None
        for end, (token, logprob, entries) in enumerate(
            zip(ids[1:], expected(api, ids), rest, strict=True), start=1
        ):
            values = api.model.logits(ids[:end])
            own = entries[str(token)]
            assert next(iter(entries)) == str(token)
            assert own["logprob"] == pytest.approx(logprob, abs=1e-4)
            assert own["rank"] == int((values > values[token]).sum()) + 1
            assert own["decoded_token"] == TOKENIZER.token_text(token)
            assert {entry["rank"] for entry in entries.values()} >= {1, 2}
            assert values.argmax() == int(next(key for key in entries if entries[key]["rank"] == 1))
            assert 2 <= len(entries) <= 3


async def test_prompt_logprobs_and_an_echo_need_not_agree_on_how_many(api: Api) -> None:
    fields = {"prompt": TEXT, "max_tokens": 1, "echo": True}
    body = (await api.complete(**fields, logprobs=3, prompt_logprobs=1)).json()["choices"][0]
    assert {len(tops) for tops in body["logprobs"]["top_logprobs"][1:]} <= {3, 4}
    assert {len(entries) for entries in body["prompt_logprobs"][1:]} <= {1, 2}
    body = (await api.complete(**fields, logprobs=0, prompt_logprobs=4)).json()["choices"][0]
    assert {len(tops) for tops in body["logprobs"]["top_logprobs"][1:]} == {1}
    assert {len(entries) for entries in body["prompt_logprobs"][1:]} <= {4, 5}


async def test_chat_prompt_logprobs_are_returned_once(api: Api) -> None:
    body = (await api.chat(prompt_logprobs=0, n=2, max_tokens=2, return_token_ids=True)).json()
    ids = body["prompt_token_ids"]
    assert ids[-1] == GO and len(body["choices"]) == 2
    first, *rest = body["prompt_logprobs"]
    assert first is None
    for token, logprob, entries in zip(ids[1:], expected(api, ids), rest, strict=True):
        assert entries == {
            str(token): {
                "logprob": pytest.approx(logprob, abs=1e-4),
                "rank": entries[str(token)]["rank"],
                "decoded_token": TOKENIZER.token_text(token),
            }
        }
    assert "prompt_logprobs" not in (await api.chat(max_tokens=1)).json()


async def test_asking_about_a_prompt_changes_nothing_of_the_answer(api: Api) -> None:
    fields = {"prompt": TEXT, "seed": 11, "max_tokens": 12, "n": 2}
    texts = [choice["text"] for choice in (await api.complete(**fields)).json()["choices"]]
    for more in ({"prompt_logprobs": 5}, {"logprobs": 2, "echo": True}):
        body = (await api.complete(**fields, **more)).json()
        assert [choice["text"].removeprefix(TEXT) for choice in body["choices"]] == texts


async def test_echo_sdk_scores_a_text(sdk: openai.AsyncOpenAI, api: Api) -> None:
    answer = await sdk.completions.create(model=MODEL, prompt=TEXT, max_tokens=0, echo=True, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.tokens is not None
    assert logprobs.token_logprobs[0] is None and "".join(logprobs.tokens) == TEXT
    assert logprobs.token_logprobs[1:] == pytest.approx(expected(api, IDS), abs=1e-4)
    chat = await sdk.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=1,
        extra_body={"prompt_logprobs": 1},
    )
    assert chat.model_extra is not None and chat.model_extra["prompt_logprobs"][0] is None
    assert USER[0]["content"] == "Hi"


async def test_best_of_returns_the_likeliest_completions(api: Api) -> None:
    fields = {"prompt": [TEXT, "you"], "seed": 3, "max_tokens": 6}
    body = (await api.complete(**fields, n=8, logprobs=0)).json()
    answer = (await api.complete(**fields, n=2, best_of=8)).json()
    assert answer["usage"] == body["usage"] | {
        "prompt_tokens_details": answer["usage"]["prompt_tokens_details"]
    }
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for prompt in (0, 1):
        drawn = body["choices"][8 * prompt : 8 * prompt + 8]
        means = {
            choice["text"]: math.fsum(choice["logprobs"]["token_logprobs"]) / len(choice["text"])
            for choice in drawn
        }
        best = sorted(means, key=lambda text: -means[text])[:2]
        chosen = answer["choices"][2 * prompt : 2 * prompt + 2]
        assert [choice["text"] for choice in chosen] == best
        assert all(choice["logprobs"] is None for choice in chosen)
    api.assert_all_blocks_back()


async def test_best_of_with_echo_and_logprobs(api: Api) -> None:
    answer = await api.complete(prompt=TEXT, n=1, best_of=4, max_tokens=5, seed=2, logprobs=1, echo=True)
    (choice,) = answer.json()["choices"]
    assert choice["text"].startswith(TEXT) and len(arrays(choice)["tokens"]) == len(IDS) + 5
    assert answer.json()["usage"]["completion_tokens"] == 20


def test_echo_truncated_prompt_is_as_the_model_got_it() -> None:
    given = PromptInput(tuple(IDS), TEXT)
    echo = echo_of(given, IDS[2:], TOKENIZER, located=True)
    assert (echo.text, list(echo.offsets)) == (TEXT[2:], list(range(6)))
    assert list(echo_of(given, IDS, TOKENIZER, located=False).offsets) == []


def test_ids_in_the_middle_of_a_character_begin_where_it_does() -> None:
    ids = TOKENIZER.encode("aé!")
    echo = echo_of(PromptInput(tuple(ids), None), ids, TOKENIZER, located=True)
    assert (echo.text, list(echo.offsets)) == ("aé!", [0, 1, 1, 2])
    cut = echo_of(PromptInput((ids[1],), None), ids[1:2], TOKENIZER, located=True)
    assert cut.text == TOKENIZER.decode(ids[1:2]) and list(cut.offsets) == [0]
    ended = echo_of(PromptInput((*ids, END), None), [*ids, END], TOKENIZER, located=True)
    assert (ended.text, list(ended.offsets)) == ("aé!", [0, 1, 1, 2, 3])


def test_minus_infinity_has_a_number_that_json_can_say() -> None:
    from baton_api.messages import TokenChoice
    from baton_engine.requests import PromptLogprobs

    infinite = -math.inf
    choice = TokenChoice(token=LETTERS[0], logprob=infinite, top=[(LETTERS[1], infinite)])
    (entry,) = chat_logprobs(TOKENIZER, [choice], 1)["content"]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == FLOOR
    scores = PromptLogprobs(
        torch.tensor([infinite]).numpy(),
        torch.tensor([5]).numpy(),
        torch.tensor([[LETTERS[1]]]).numpy(),
        torch.tensor([[infinite]]).numpy(),
    )
    shown = echoed_logprobs(TOKENIZER.token_text, LETTERS[:2], scores, [0, 1], 1)
    assert shown["token_logprobs"] == [None, FLOOR] and shown["top_logprobs"][1] == {"b": FLOOR}
