"""Text completions: prompts of every kind, echo, logprobs with offsets, several choices."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from baton_api import headers
from baton_api.hashing import block_hashes, root_hash
from baton_engine.client import AsyncEngine, Generation
from baton_engine.model.embedder import Embedder
from baton_engine.requests import Pooling, Request
from tests.engine.api.api import BLOCK_SIZE, MODEL, TOKENIZER, Api, events, open_api

GO = "<|assistant|>"


async def test_completion_has_every_field_of_the_api(api: Api) -> None:
    body = (await api.complete()).json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == MODEL
    (choice,) = body["choices"]
    assert choice["index"] == 0
    assert len(choice["text"]) == 16, "max_tokens is 16 unless said otherwise"
    assert choice["logprobs"] is None
    assert choice["finish_reason"] == "length"
    assert body["usage"]["prompt_tokens"] == 2


async def test_token_ids_are_the_same_prompt_as_their_text(api: Api) -> None:
    ids = TOKENIZER.encode("Hi there")
    text = (await api.complete(prompt="Hi there", temperature=0)).json()["choices"][0]["text"]
    for prompt in (ids, [ids], [float(token) for token in ids], ["Hi there"]):
        assert (await api.complete(prompt=prompt, temperature=0)).json()["choices"][0]["text"] == text


async def test_several_prompts_with_n_are_indexed_prompt_by_prompt(api: Api) -> None:
    prompts = ["one", "two", "three"]
    body = (await api.complete(prompt=prompts, n=2, seed=3, max_tokens=8)).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert body["usage"]["completion_tokens"] == 48
    for number, prompt in enumerate(prompts):
        single = (await api.complete(prompt=prompt, n=2, seed=3, max_tokens=8)).json()
        texts = [choice["text"] for choice in single["choices"]]
        assert texts == [choice["text"] for choice in body["choices"][2 * number : 2 * number + 2]]
    api.assert_all_blocks_back()


async def test_echo_puts_the_prompt_before_the_text(api: Api) -> None:
    plain = (await api.complete(temperature=0)).json()["choices"][0]["text"]
    assert (await api.complete(temperature=0, echo=True)).json()["choices"][0]["text"] == "Hi" + plain
    ids = TOKENIZER.encode("Hi")
    assert (await api.complete(temperature=0, echo=True, prompt=ids)).json()["choices"][0][
        "text"
    ] == "Hi" + plain


async def test_echo_without_tokens_is_the_prompt(api: Api) -> None:
    body = (await api.complete(echo=True, max_tokens=0)).json()
    assert body["choices"][0]["text"] == "Hi"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0


async def test_logprobs_are_parallel_arrays_with_character_offsets(api: Api) -> None:
    body = (await api.complete(logprobs=2, max_tokens=6)).json()
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {6}
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5]
    for token, logprob, tops, offset in zip(
        logprobs["tokens"],
        logprobs["token_logprobs"],
        logprobs["top_logprobs"],
        logprobs["text_offset"],
        strict=True,
    ):
        assert choice["text"][offset:].startswith(token)
        assert 2 <= len(tops) <= 3 and tops[token] == logprob


async def test_offsets_count_characters_not_tokens(api: Api) -> None:
    api.model.script = "é!"
    logprobs = (await api.complete(prompt=GO, logprobs=0)).json()["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 0, 1, 2]


async def test_completion_stream_joins_to_the_answer(api: Api) -> None:
    fields = {"temperature": 0, "max_tokens": 9, "logprobs": 1}
    whole = (await api.complete(**fields)).json()
    chunks = events((await api.complete(**fields, stream=True, stream_options={"include_usage": True})).text)
    *parts, last = chunks
    assert last["choices"] == [] and last["usage"] == whole["usage"] | {
        "prompt_tokens_details": last["usage"]["prompt_tokens_details"]
    }
    assert {part["usage"] for part in parts} == {None}
    choices = [part["choices"][0] for part in parts]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [choice["finish_reason"] for choice in choices] == [None] * 8 + ["length"]
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert offsets == whole["choices"][0]["logprobs"]["text_offset"]


async def test_completion_echo_stream_starts_with_the_prompt(api: Api) -> None:
    chunks = events((await api.complete(stream=True, echo=True, prompt=["ab", "cd"])).text)
    for index, prompt in enumerate(("ab", "cd")):
        of_choice = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert of_choice[0]["text"] == prompt
        assert [choice["finish_reason"] for choice in of_choice].count("length") == 1


async def test_token_ids_come_on_demand(api: Api) -> None:
    body = (await api.complete(return_token_ids=True, max_tokens=3)).json()
    (choice,) = body["choices"]
    assert choice["prompt_token_ids"] == TOKENIZER.encode("Hi")
    assert TOKENIZER.decode(choice["token_ids"]) == choice["text"]


async def test_completion_is_read_by_the_sdk(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=5, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None and answer.usage.completion_tokens == 20


@pytest.mark.parametrize("best_of", [None, 0, 1])
async def test_best_of_that_chooses_nothing_is_accepted(api: Api, best_of: int | None) -> None:
    assert (await api.complete(best_of=best_of)).status_code == 200


async def test_completion_constraint_holds_in_every_choice(api: Api) -> None:
    body = (await api.complete(prompt=["a", "b"], n=2, regex="[0-9]{3}-[0-9]{2}", max_tokens=20)).json()
    for choice in body["choices"]:
        assert re.fullmatch("[0-9]{3}-[0-9]{2}", choice["text"]) and choice["finish_reason"] == "stop"
    best = await api.complete(best_of=3, regex="(yes|no)", echo=True, logprobs=1)
    assert best.json()["choices"][0]["text"] in ("Hiyes", "Hino")


async def test_completion_suffix_is_rejected_by_name(api: Api) -> None:
    answer = await api.complete(suffix="the end")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")
    assert (await api.complete(suffix="")).status_code == 200


class Watched(AsyncEngine):
    """Remembers what it was asked, and on which thread."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.hashed: list[tuple[tuple[int, ...], bytes]] = []
        self.threads: set[int] = set()
        self.requests: list[Request] = []

    def hashes(self, prompt: Sequence[int], root: bytes) -> Sequence[bytes]:
        self.hashed.append((tuple(prompt), root))
        self.threads.add(threading.get_ident())
        return super().hashes(prompt, root)

    def generate(self, request: Request, *, together: bool = False) -> Generation:
        self.requests.append(request)
        return super().generate(request, together=together)


@pytest.mark.one_process("watches the process's hashes")
async def test_completions_hash_each_prompt_once_off_the_event_loop() -> None:
    """The choices of a prompt share its hashes; a long one would hold up every stream of the worker."""
    prompts = [list(range(40)), list(range(3, 60))]
    async with open_api(client=Watched) as api:
        watched = api.served.engine
        assert isinstance(watched, Watched)
        response = await api.http.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": prompts, "n": 3, "max_tokens": 2},
            headers={headers.SALT: "t"},
        )
        assert response.status_code == 200, response.text
        assert watched.hashed == [(tuple(prompt), root_hash("t")) for prompt in prompts]
        assert threading.get_ident() not in watched.threads
        assert len(watched.requests) == 6
        for request in watched.requests:
            assert request.hashes == tuple(block_hashes(request.prompt, BLOCK_SIZE, root_hash("t")))


async def test_embeddings_hash_inputs_off_the_event_loop() -> None:
    embedder = Embedder(pooling=Pooling.MEAN)
    async with open_api(client=Watched, embedder=embedder, hidden=TOKENIZER.vocab_size) as api:
        watched = api.served.engine
        assert isinstance(watched, Watched)
        body = {"model": MODEL, "input": ["one text that is long enough", "another one"]}
        assert (await api.http.post("/v1/embeddings", json=body)).status_code == 200
        assert len(watched.hashed) == 2 and threading.get_ident() not in watched.threads
        for request in watched.requests:
            assert request.hashes == tuple(block_hashes(request.prompt, BLOCK_SIZE, root_hash()))
