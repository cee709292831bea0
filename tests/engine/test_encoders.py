"""Encoders over the API of a real worker: the vectors and scores that transformers computes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers

from baton_api.errors import SetupError
from baton_engine.api.app import create_app
from baton_engine.service import served_of
from baton_engine.settings import WorkerSettings
from baton_engine.worker import Worker, open_worker
from tests.engine.encoders import CONTEXT, make_encoder
from tests.engine.models import CORPUS

QUERY = "the capital of japan"
TEXTS = [*CORPUS, "paris", "a relay has runners, and japan has tokyo"]


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """A worker sets what belongs to its whole process; tests give it back."""
    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    yield
    torch.set_num_threads(threads)
    sys.setswitchinterval(interval)


@dataclass
class Opened:
    worker: Worker
    http: httpx.AsyncClient

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json={"model": self.worker.model_name} | body)

    async def embed(self, texts: Any) -> np.ndarray:
        answer = await self.post("/v1/embeddings", input=texts)
        assert answer.status_code == 200, answer.text
        return np.array([row["embedding"] for row in answer.json()["data"]])


@contextlib.asynccontextmanager
async def opened(folder: Path, **given: Any) -> AsyncIterator[Opened]:
    settings = WorkerSettings.model_validate({"model": str(folder), "threads": 1, **given})
    async with open_worker(settings) as worker:
        transport = httpx.ASGITransport(app=create_app(served_of(worker)))
        async with httpx.AsyncClient(transport=transport, base_url="http://worker") as http:
            yield Opened(worker, http)


def tokenizer_of(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


@torch.inference_mode()
def states(folder: Path, text: str) -> np.ndarray:
    """transformers' final states of one text, without padding and truncation."""
    model: Any = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    given = tokenizer_of(folder)(text, return_tensors="pt", truncation=False, padding=False)
    given.pop("token_type_ids", None)
    final: np.ndarray = model(**given).last_hidden_state[0].numpy()
    return final


@torch.inference_mode()
def logits(folder: Path, first: str, second: str) -> float:
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    encoding = tokenizer_of(folder).backend_tokenizer
    encoding.no_truncation()
    pair = encoding.encode(first, second)
    types = {"token_type_ids": torch.tensor([pair.type_ids])}
    return float(model(torch.tensor([pair.ids]), **types).logits[0, 0])


EMBEDDERS = [
    ("bert", "cls_token", True),
    ("bert", "mean_tokens", False),
    ("bert with gelu_new", "mean_tokens", True),
    ("roberta", "cls_token", False),
    ("xlm-roberta", "mean_tokens", True),
]


@pytest.mark.parametrize(("variant", "pooling", "normalizes"), EMBEDDERS)
async def test_encoder_oracle_embeddings_equal_transformers(
    tmp_path: Path, variant: str, pooling: str, normalizes: bool
) -> None:
    folder = make_encoder(tmp_path, variant, pooling=pooling, normalizes=normalizes)
    async with opened(folder) as worker:
        vectors = await worker.embed(TEXTS)
    for text, vector in zip(TEXTS, vectors, strict=True):
        final = states(folder, text)
        expected = final[0] if pooling == "cls_token" else final.mean(0)
        expected = expected / np.linalg.norm(expected) if normalizes else expected
        np.testing.assert_allclose(vector, expected, atol=1e-5)


@pytest.mark.parametrize("variant", ["bert", "xlm-roberta"])
async def test_encoder_law_a_row_does_not_depend_on_others(tmp_path: Path, variant: str) -> None:
    folder = make_encoder(tmp_path, variant, pooling="mean_tokens")
    rng = random.Random(variant)
    words = " ".join(CORPUS).split()
    texts = [" ".join(rng.choices(words, k=rng.randint(1, 12))) for _ in range(40)]
    async with opened(folder, chunk_tokens=96) as worker:
        single = [(await worker.embed(text))[0] for text in texts]
        together = await worker.embed(texts)
        several = await asyncio.gather(*(worker.embed(texts[start::4]) for start in range(4)))
    # torch's products add in another order for another number of rows. 1.1e-5 was seen.
    near = partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-5)
    for index, vector in enumerate(single):
        near(together[index], vector)
        near(several[index % 4][index // 4], vector)


@pytest.mark.parametrize("variant", ["bert cross encoder", "xlm-roberta cross encoder"])
@pytest.mark.parametrize("raw", [False, True])
async def test_encoder_oracle_scores_equal_transformers(tmp_path: Path, variant: str, raw: bool) -> None:
    more: dict[str, Any] = (
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"} if raw else {}
    )
    folder = make_encoder(tmp_path, variant, **more)
    expected = np.array([logits(folder, QUERY, text) for text in TEXTS])
    expected = expected if raw else 1 / (1 + np.exp(-expected))
    async with opened(folder) as worker:
        scored = await worker.post("/v1/score", text_1=QUERY, text_2=TEXTS)
        ranked = await worker.post("/v1/rerank", query=QUERY, documents=TEXTS, top_n=2)
        refused = await worker.post("/v1/embeddings", input="a")
    assert scored.status_code == 200, scored.text
    body = scored.json()
    assert body["object"] == "list" and body["id"].startswith("score-")
    scores = np.array([row["score"] for row in body["data"]])
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    best = ranked.json()["results"]
    assert [row["index"] for row in best] == list(np.argsort(-expected)[:2])
    assert [row["document"]["text"] for row in best] == [TEXTS[row["index"]] for row in best]
    assert best[0]["relevance_score"] == pytest.approx(expected.max(), abs=1e-5)
    assert refused.status_code == 400 and "/v1/rerank" in refused.json()["error"]["message"]


async def test_encoder_embedder_scores_by_cosine(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, "bert", pooling="mean_tokens")
    async with opened(folder) as worker:
        vectors = await worker.embed([QUERY, *TEXTS])
        units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
            answer = await worker.post(path, query=QUERY, documents=TEXTS, return_documents=False)
            results = answer.json()["results"]
            for row in results:
                cosine = units[0] @ units[1 + row["index"]]
                assert row["relevance_score"] == pytest.approx(cosine, abs=1e-5)
            assert "document" not in results[0] and len(results) == len(TEXTS)
            scores = [row["relevance_score"] for row in results]
            assert scores == sorted(scores, reverse=True)
        pairs = await worker.post("/score", text_1=TEXTS, text_2=TEXTS)
        assert [row["score"] for row in pairs.json()["data"]] == pytest.approx([1.0] * len(TEXTS), abs=1e-5)


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no query": ("/v1/rerank", {"documents": ["a"]}, "query"),
    "no documents": ("/v1/rerank", {"query": "a"}, "documents"),
    "an empty list": ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
    "an empty text": ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, "documents[1]"),
    "a number": ("/v1/rerank", {"query": "a", "documents": [5]}, "documents[0]"),
    "a negative number": ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    "a long text": ("/v1/rerank", {"query": "a", "documents": ["japan " * CONTEXT]}, "documents[0]"),
    "truncation": ("/v1/rerank", {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 9},
                   "truncate_prompt_tokens"),
    "different lengths": ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
    "one side": ("/v1/score", {"text_1": "a"}, "text_2"),
    "a generation": ("/v1/completions", {"prompt": "a"}, "model"),
}  # fmt: skip


async def test_encoder_errors_name_the_field(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, "bert cross encoder")
    async with opened(folder) as worker:
        for name, (path, body, param) in WRONG.items():
            answer = await worker.post(path, **body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), name


async def test_encoder_classifier_does_not_rank(tmp_path: Path) -> None:
    async with opened(make_encoder(tmp_path, "bert classifier")) as worker:
        answer = await worker.post("/v1/rerank", query="a", documents=["b"])
    assert answer.status_code == 400 and "3 classes" in answer.json()["error"]["message"]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a pair's role": ({}, {"role": "decode"}, "baton serve"),
    "a long context": ({}, {"max_model_len": CONTEXT + 1}, "max-model-len"),
    "an unknown activation": ({"hidden_act": "relu"}, {}, "hidden_act"),
    "a decoder": ({"is_decoder": True}, {}, "is_decoder"),
    "pooling by the last token": ({}, {"pooling": "last"}, "last token"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_encoder_unsupported_is_refused(tmp_path: Path, name: str) -> None:
    config, given, message = REFUSED[name]
    folder = make_encoder(tmp_path, "bert", **config)
    with pytest.raises(SetupError, match=message):
        async with opened(folder, **given):
            pass


async def test_encoder_without_modules_needs_a_pooling(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, "bert")
    async with opened(folder) as worker:
        answer = await worker.post("/v1/embeddings", input="a")
        assert answer.status_code == 400 and "--pooling cls" in answer.json()["error"]["message"]
    async with opened(folder, pooling="cls") as worker:
        vector = (await worker.embed("japan"))[0]
    expected = states(folder, "japan")[0]
    np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), atol=1e-5)
