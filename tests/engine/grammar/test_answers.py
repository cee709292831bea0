"""Random answers through the engine fit their schemas, 200 of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

import jsonschema
import pytest
from transformers import AutoTokenizer

from baton_api.sampling import Constraint, SamplingParams
from baton_engine.grammar.grammars import Grammars
from baton_engine.grammar.texts import schema as schema_source
from baton_engine.model.tokenizer import Tokenizer
from baton_engine.requests import FinishReason, Request
from tests.engine import fake_model
from tests.engine.grammar.random_model import RandomModel
from tests.engine.grammar.schemas import Maker, Schema
from tests.engine.grammar.tokenizers import GRAMMARS, TOKENIZER
from tests.engine.serving import Serving
from tests.tokenizers import npm_tokenizer

SCHEMAS = 200


def fits(schema: Schema, text: str) -> list[str]:
    """Return the reason why the answer does not fit."""
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    return [error.message for error in validator.iter_errors(json.loads(text))]


def closers(tokenizer: Tokenizer, liking: float) -> dict[int, float]:
    """Tokens that bring a text to its end: an end of a string more than brackets, which strings may hold."""
    firsts = {b'"': liking, b"]": liking / 2, b"}": liking / 2}
    begun = {
        token: firsts.get(tokenizer.token_bytes(token)[:1], 0.0) for token in range(tokenizer.vocab_size)
    }
    return begun | dict.fromkeys(tokenizer.eos_ids, liking)


def texts(
    schemas: Sequence[Schema], tokenizer: Tokenizer, grammars: Grammars, liking: float
) -> Iterator[tuple[Schema, str]]:
    """Return the engine's answer to each schema at temperatures from 1 to 1.5, many at once."""
    model = RandomModel(tokenizer.vocab_size, closers(tokenizer, liking))
    ends = frozenset(tokenizer.eos_ids)
    with Serving(blocks=8000, block_size=16, model=model, max_model_len=4000, max_running=32) as serving:
        for number, schema in enumerate(schemas):
            constraint = Constraint("json_schema", schema_source(schema))
            sampling = SamplingParams(
                seed=number,
                temperature=1.0 + number % 6 / 10,
                max_tokens=3900,
                stop_ids=ends,
                constraint=constraint,
            )
            matcher = grammars.matcher(constraint, None)
            serving.submit(Request(f"s{number}", (1, 2, 3), sampling, matcher=matcher))
        for number, schema in enumerate(schemas):
            ended = serving.ended(f"s{number}")
            assert (ended.finish, ended.error) == (FinishReason.STOP, None), (number, schema)
            yield schema, tokenizer.decode(serving.so_far(f"s{number}"))
        serving.at_rest()


def test_law_two_hundred_schemas_fit_without_exception() -> None:
    schemas = [Maker(seed).make() for seed in range(SCHEMAS)]
    wrong = {
        text: problems
        for schema, text in texts(schemas, TOKENIZER, GRAMMARS, liking=3.0)
        if (problems := fits(schema, text))
    }
    assert wrong == {}


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[Tokenizer, Grammars]]:
    """A tokenizer of 150,000 tokens that cut across every boundary of JSON."""
    loaded = AutoTokenizer.from_pretrained(npm_tokenizer("qwen3"))
    tokenizer = Tokenizer(loaded, dataclasses.replace(fake_model.SPEC, vocab=151_936))
    grammars = Grammars(tokenizer)
    yield tokenizer, grammars
    grammars.close()


def test_law_tokens_of_many_characters_fit_as_well(real: tuple[Tokenizer, Grammars]) -> None:
    tokenizer, grammars = real
    schemas = [Maker(seed).make() for seed in range(SCHEMAS, SCHEMAS + 10)]
    wrong = {
        text: problems
        for schema, text in texts(schemas, tokenizer, grammars, liking=9.0)
        if (problems := fits(schema, text))
    }
    assert wrong == {}
