"""Embeddings: inputs of every kind, both encodings, fewer dimensions, and what is refused."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from baton_api import metrics
from baton_api.errors import (
    ARRAY_ABOVE_MAX_LENGTH,
    CONTEXT_LENGTH_EXCEEDED,
    EMPTY_ARRAY,
    INTEGER_ABOVE_MAX_VALUE,
    INTEGER_BELOW_MIN_VALUE,
    INVALID_TYPE,
    INVALID_VALUE,
    MISSING_REQUIRED_PARAMETER,
    UNSUPPORTED_PARAMETER,
    InvalidRequest,
    ModelNotFound,
)
from baton_engine.api.embeddings import Truncation
from baton_engine.api.http import HttpServer
from baton_engine.api.prompts import PromptInput
from baton_engine.model.embedder import Embedder, NoEmbeddings
from baton_engine.model.tokenizer import Tokenizer
from baton_engine.requests import Pooling
from tests.engine import fake_model
from tests.engine.api.api import CONTEXT, MODEL, TOKENIZER, Api, eventually, open_api
from tests.plain_http import PLAIN

HIDDEN = TOKENIZER.vocab_size
"""The fake model's states are its logits."""


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with open_api(embedder=Embedder(pooling=Pooling.MEAN), hidden=HIDDEN) as api:
        yield api


async def embed(api: Api, **body: Any) -> httpx.Response:
    return await api.http.post("/v1/embeddings", json={"model": MODEL, "input": "Hi"} | body)


def expected(api: Api, tokens: Sequence[int], dimensions: int = HIDDEN) -> np.ndarray:
    states = torch.stack([api.model.logits(list(tokens[: end + 1])) for end in range(len(tokens))])
    vector = states.mean(0).numpy()[:dimensions]
    return np.asarray(vector / np.linalg.norm(vector))


def vectors(answer: httpx.Response) -> list[np.ndarray]:
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [(item["object"], item["index"]) for item in data] == [("embedding", i) for i in range(len(data))]
    return [np.array(item["embedding"]) for item in data]


async def test_embeddings_answer_has_every_field_of_the_api(api: Api) -> None:
    answer = await embed(api, input="Hi there", user="somebody")
    body = answer.json()
    assert body["object"] == "list" and body["model"] == MODEL
    assert body["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
    (vector,) = vectors(answer)
    assert vector.shape == (HIDDEN,)
    np.testing.assert_allclose(vector, expected(api, TOKENIZER.encode("Hi there")), atol=1e-6)


async def test_text_and_its_ids_have_one_vector_alone_and_in_lists(api: Api) -> None:
    ids = TOKENIZER.encode("Hi")
    for given in ("Hi", ["Hi"], ids, [ids]):
        (vector,) = vectors(await embed(api, input=given))
        np.testing.assert_allclose(vector, expected(api, ids), atol=1e-6)


async def test_embeddings_long_list_keeps_its_order(api: Api) -> None:
    texts = [f"text number {number} " * (number % 7 + 1) for number in range(150)]
    answer = await embed(api, input=texts)
    embedded = vectors(answer)
    assert len(embedded) == len(texts)
    for text, vector in zip(texts[::29], embedded[::29], strict=True):
        np.testing.assert_allclose(vector, expected(api, TOKENIZER.encode(text)), atol=1e-5)
    assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, texts))
    api.assert_all_blocks_back()


async def test_base64_is_the_same_numbers_in_little_endian(api: Api) -> None:
    (numbers,) = vectors(await embed(api, encoding_format="float"))
    text = (await embed(api, encoding_format="base64")).json()["data"][0]["embedding"]
    raw = base64.b64decode(text, validate=True)
    assert len(raw) == 4 * HIDDEN
    np.testing.assert_array_equal(np.frombuffer(raw, dtype="<f4"), numbers.astype(np.float32))


@pytest.mark.parametrize("fields", [{}, {"encoding_format": "float"}])
async def test_embeddings_sdk_reads_both_encodings(api: Api, fields: dict[str, Any]) -> None:
    async with (
        HttpServer(api.app, "127.0.0.1", 0, api.served.drain) as server,
        openai.AsyncOpenAI(
            base_url=f"http://{server.address}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(verify=PLAIN),
        ) as sdk,
    ):
        answer = await sdk.embeddings.create(model=MODEL, input=["Hi", "there"], **fields)
    assert [item.index for item in answer.data] == [0, 1]
    assert answer.usage.total_tokens == 7
    for item, text in zip(answer.data, ("Hi", "there"), strict=True):
        np.testing.assert_allclose(item.embedding, expected(api, TOKENIZER.encode(text)), atol=1e-6)


async def test_last_pooling_and_no_normalisation_are_as_the_model_says() -> None:
    embedder = Embedder(pooling=Pooling.LAST, normalized=False)
    async with open_api(embedder=embedder, hidden=HIDDEN) as api:
        (vector,) = vectors(await embed(api))
        np.testing.assert_allclose(vector, api.model.logits(TOKENIZER.encode("Hi")), atol=1e-5)


async def test_fewer_dimensions_are_a_beginning_of_length_one() -> None:
    embedder = Embedder(pooling=Pooling.MEAN, shortens=True)
    async with open_api(embedder=embedder, hidden=HIDDEN) as api:
        for dimensions in (1, 8, HIDDEN):
            (vector,) = vectors(await embed(api, dimensions=dimensions))
            np.testing.assert_allclose(vector, expected(api, TOKENIZER.encode("Hi"), dimensions), atol=1e-6)
            assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)


async def test_embeddings_untrained_dimensions_are_rejected() -> None:
    embedder = Embedder(pooling=Pooling.MEAN, shortens=True, lengths=(8, 32))
    async with open_api(embedder=embedder, hidden=HIDDEN) as api:
        assert vectors(await embed(api, dimensions=32))[0].shape == (32,)
        answer = await embed(api, dimensions=9)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "dimensions")
        assert "8, 32" in answer.json()["error"]["message"]


REFUSED: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "no input": ({"input": None}, "input", MISSING_REQUIRED_PARAMETER),
    "an empty text": ({"input": ""}, "input", None),
    "an empty text in a list": ({"input": ["a", ""]}, "input[1]", None),
    "an empty list": ({"input": []}, "input", EMPTY_ARRAY),
    "a list of an empty list": ({"input": [[]]}, "input[0]", EMPTY_ARRAY),
    "a number": ({"input": 7}, "input", INVALID_TYPE),
    "a mixed list": ({"input": ["a", 7]}, "input[1]", INVALID_TYPE),
    "ids and a text": ({"input": [7, "a"]}, "input[1]", INVALID_TYPE),
    "a negative id": ({"input": [-1]}, "input[0]", INTEGER_BELOW_MIN_VALUE),
    "an id beyond the vocabulary": ({"input": [[HIDDEN]]}, "input[0][0]", INTEGER_ABOVE_MAX_VALUE),
    "too many texts": ({"input": ["a"] * 2049}, "input", ARRAY_ABOVE_MAX_LENGTH),
    "a text over the context": ({"input": "x" * (CONTEXT + 1)}, "input", CONTEXT_LENGTH_EXCEEDED),
    "an unknown encoding": ({"encoding_format": "hex"}, "encoding_format", INVALID_VALUE),
    "no dimensions": ({"dimensions": 0}, "dimensions", INTEGER_BELOW_MIN_VALUE),
    "too many dimensions": ({"dimensions": HIDDEN + 1}, "dimensions", INTEGER_ABOVE_MAX_VALUE),
    "dimensions that the model has not said to have": (
        {"dimensions": 8},
        "dimensions",
        UNSUPPORTED_PARAMETER,
    ),
    "truncation to nothing": ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", INVALID_VALUE),
    "truncation beyond the context": (
        {"truncate_prompt_tokens": CONTEXT + 1},
        "truncate_prompt_tokens",
        INTEGER_ABOVE_MAX_VALUE,
    ),
    "truncation in the middle": ({"truncation_side": "middle"}, "truncation_side", INVALID_VALUE),
    "a user that is none": ({"user": 7}, "user", INVALID_TYPE),
    "no model": ({"model": None}, "model", MISSING_REQUIRED_PARAMETER),
}


@pytest.mark.parametrize(("body", "param", "code"), REFUSED.values(), ids=REFUSED.keys())
async def test_embeddings_invalid_field_is_named(
    api: Api, body: dict[str, Any], param: str, code: str | None
) -> None:
    answer = await embed(api, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert code is None or error["code"] == code
    assert vectors(await embed(api, input="x" * CONTEXT)), "it serves on, to the last token of the context"


async def test_embeddings_input_is_truncated_to_the_requested_tokens(api: Api) -> None:
    ids = TOKENIZER.encode("Hi there")
    for given, two in (("Hi there", "Hi"), (ids, ids[:2])):
        answer = await embed(api, input=[given, two], truncate_prompt_tokens=5)
        last, short = vectors(answer)
        np.testing.assert_allclose(last, expected(api, ids[-5:]), atol=1e-6)
        np.testing.assert_allclose(short, expected(api, ids[:2]), atol=1e-6)
        assert answer.json()["usage"]["prompt_tokens"] == 7
        (first,) = vectors(await embed(api, input=given, truncate_prompt_tokens=5, truncation_side="right"))
        np.testing.assert_allclose(first, expected(api, ids[:5]), atol=1e-6)
    answer = await embed(api, input="x" * (CONTEXT * 99), truncate_prompt_tokens=-1)
    assert answer.json()["usage"]["prompt_tokens"] == CONTEXT


def test_truncation_keeps_the_tokens_around_a_text() -> None:
    words = ["[CLS]", "[SEP]", "a", "b", "c", "d"]
    backend = Backend(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), fake_model.SPEC)
    given = PromptInput(tuple(tokenizer.encode("a b c d")), "a b c d")
    left = Truncation(4, "left").applied(given, tokenizer)
    assert tokenizer.decode(left.tokens, skip_special_tokens=False) == "[CLS] c d [SEP]"
    right = Truncation(3, "right").applied(given, tokenizer)
    assert tokenizer.decode(right.tokens, skip_special_tokens=False) == "[CLS] a [SEP]"
    with pytest.raises(InvalidRequest, match="the model adds 2 tokens"):
        Truncation(2, "left").applied(given, tokenizer)


async def test_another_model_is_not_found(api: Api) -> None:
    answer = await embed(api, model="nope")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, ModelNotFound.code)


async def test_embeddings_generating_model_is_rejected() -> None:
    async with open_api(embedder=NoEmbeddings("it was made to generate")) as api:
        answer = await embed(api)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "model")
        assert "it was made to generate" in error["message"]


async def test_embeddings_model_without_head_cannot_generate() -> None:
    embedder = Embedder(pooling=Pooling.MEAN)
    async with open_api(embedder=embedder, hidden=HIDDEN, generates=False) as api:
        assert vectors(await embed(api))
        for answer in (await api.complete(), await api.chat()):
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


async def test_embeddings_disconnect_ends_the_computation(api: Api) -> None:
    api.model.go.clear()
    task = asyncio.create_task(embed(api, input=["Hi"] * 200))
    await eventually(lambda: api.model.inside.is_set())
    assert await api.metric(metrics.WORKER_RUNNING.name) > 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    api.model.go.set()
    await api.served.engine.idle()
    await eventually(api.at_rest)
    api.assert_all_blocks_back()


async def test_embeddings_call_is_aborted_by_its_id(api: Api) -> None:
    api.model.go.clear()
    task = asyncio.create_task(embed(api, input=["Hi"] * 200, rid="mine"))
    await eventually(lambda: api.model.inside.is_set())
    assert (await api.http.post("/abort_request", json={"rid": "mine"})).status_code == 200
    api.model.go.set()
    assert (await task).status_code == 499
    assert vectors(await embed(api))
    api.assert_all_blocks_back()


async def test_embeddings_full_queue_is_a_503_for_the_whole_call() -> None:
    embedder = Embedder(pooling=Pooling.MEAN)
    async with open_api(embedder=embedder, hidden=HIDDEN, max_queued=3, max_running=1) as api:
        api.model.go.clear()  # else it may compute inputs as fast as they come
        answer = await embed(api, input=["Hi there"] * 60)
        api.model.go.set()
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        await eventually(lambda: api.served.computing.snapshot().queued == 0)
        assert vectors(await embed(api, input=["Hi"] * 2))
        api.assert_all_blocks_back()


async def test_calls_are_counted_and_remembered(api: Api) -> None:
    await embed(api, input=["Hi", "there"])
    await embed(api, input="")
    (entry,) = (await api.http.get("/debug/requests")).json()["data"]
    assert (entry["path"], entry["status"], entry["prompt_tokens"]) == ("/v1/embeddings", 200, 7)
    assert entry["finish_reasons"] == ["stop"] and entry["completion_tokens"] == 0
