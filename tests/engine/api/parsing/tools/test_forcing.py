"""Forced calls: any model's output is read back as calls with arguments that fit."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import AutoTokenizer

from baton_api import limits
from baton_api.errors import InvalidRequest
from baton_api.sampling import Constraint
from baton_engine.api.parsing.tools.families import FAMILIES, family
from baton_engine.api.parsing.tools.family import ToolFamily
from baton_engine.api.parsing.tools.grammar import Layout
from baton_engine.api.parsing.tools.tagged_calls import GLM
from baton_engine.api.parsing.tools.toolbox import TextGrammar, Tool, Toolbox
from baton_engine.grammar.grammars import Grammars
from baton_engine.model.tokenizer import Tokenizer
from baton_engine.requests import GrammarMatcher
from baton_engine.sampling.token_masks import mask_words
from tests.engine import fake_model
from tests.engine.api.parsing.tools.answers import CODE, PLACE, SELECT, WEATHER, calls_of, read, words_of
from tests.engine.grammar.tokenizers import GRAMMARS, TOKENIZER
from tests.tokenizers import npm_tokenizer

TOOLS = (
    Tool(name="weather", parameters=WEATHER, strict=True),
    Tool(name="place", parameters=PLACE),
    Tool(name="now"),
    Tool(name="select", custom=True, grammar=SELECT),
    Tool(name="code", custom=True, grammar=CODE),
)
FORMS = {"select": r"SELECT [a-z]{1,5}(,[a-z]{1,5}){0,3}", "code": r'[0-9]{3}/[a-z"]{2}'}

REQUIRED = Toolbox(tools=TOOLS, choice="required")
NAMED = replace(REQUIRED, allowed=frozenset({"weather"}), parallel=False)
AUTO = Toolbox(tools=TOOLS)

REAL = {"hermes": "qwen3", "llama3": "llama3_1", "deepseek_v3": "deepseek_v3"}
"""Families with a tokenizer of theirs, whose marks are tokens."""


OPEN: list[Grammars] = []


@cache
def real(name: str) -> tuple[Tokenizer, Grammars]:
    loaded = AutoTokenizer.from_pretrained(npm_tokenizer(name))
    vocab = max(loaded.get_vocab().values()) + 1
    tokenizer = Tokenizer(loaded, dataclasses.replace(fake_model.SPEC, vocab=vocab))
    grammars = Grammars(tokenizer)
    OPEN.append(grammars)
    return tokenizer, grammars


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()
    real.cache_clear()


@cache
def liked(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Tokens that bring a text to its end."""
    firsts = (tokenizer.token_bytes(token)[:1] for token in range(tokenizer.vocab_size))
    return np.array([first in (b'"', b"}", b"]") for first in firsts])


def texts(
    tokenizer: Tokenizer, grammars: Grammars, constraint: Constraint | None, lead: str = "", count: int = 10
) -> Iterator[str]:
    """Texts by chance that begin with `lead`; one that does not end is left out."""
    assert constraint is not None
    matchers = grammars.matchers(constraint, None)
    for seed in range(count):
        text = _text(tokenizer, matchers(), random.Random(seed), tokenizer.encode(lead, False))
        if text is not None:
            yield text


def _text(
    tokenizer: Tokenizer, matcher: GrammarMatcher, chance: random.Random, lead: Sequence[int]
) -> str | None:
    tokens: list[int] = []
    mask = np.zeros(mask_words(tokenizer.vocab_size), dtype=np.int32)
    ends = list(tokenizer.eos_ids)
    for step in range(400):
        assert matcher.fill(mask)
        may = np.unpackbits(mask.view(np.uint8), bitorder="little")[: tokenizer.vocab_size].astype(bool)
        if step < len(lead):
            token = lead[step]
            assert may[token]
        elif may[ends].any() and chance.random() < 0.4:
            token = ends[0]
        else:
            good = may & liked(tokenizer) if chance.random() < 0.3 else may
            token = int(chance.choice(np.flatnonzero(good if good.any() else may)))
        if token in ends:
            break
        tokens.append(token)
        matcher.push(token)
        if matcher.finished:
            break
    else:
        return None
    return tokenizer.decode(tokens, skip_special_tokens=False)


def check(calls: Sequence[tuple[str, str]], toolbox: Toolbox) -> None:
    """Arguments that had to fit do."""
    for name, text in calls:
        tool = toolbox.callable[name]
        if name in FORMS:
            assert re.fullmatch(FORMS[name], text), (name, text)
        elif tool.strict or toolbox.forced:
            jsonschema.validate(json.loads(text), dict(tool.parameters))
        else:
            assert isinstance(json.loads(text), dict)


def beginning(name: str) -> str:
    """Words, and the mark at which a call begins; without marks, how an answer begins that is one."""
    layout = family(name).layout
    return f"Hi. {layout.triggers[0]}" if layout.opening.startswith(layout.triggers) else layout.bare


def try_family(name: str, tokenizer: Tokenizer, grammars: Grammars, count: int) -> None:
    tokens = tokenizer.added_tokens
    ended = 0
    for toolbox in (REQUIRED, NAMED):
        for text in texts(tokenizer, grammars, family(name).constraint(toolbox, tokens), count=count):
            parts = read(name, [text], toolbox)
            calls = calls_of(parts)
            assert calls, text
            assert not words_of(parts), text
            assert toolbox is REQUIRED or [called for called, _ in calls] == ["weather"]
            check(calls, toolbox)
            ended += 1
    constraint = family(name).constraint(AUTO, tokens)
    for text in texts(tokenizer, grammars, constraint, beginning(name), count):
        calls = calls_of(read(name, [text], AUTO))
        assert calls, text
        check(calls, AUTO)
        ended += 1
    assert ended > count  # of three times as many


@pytest.mark.parametrize("name", FAMILIES)
def test_forced_calls_are_read_back(name: str) -> None:
    try_family(name, TOKENIZER, GRAMMARS, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_forced_calls_are_read_back_with_tokens_of_a_real_model(name: str) -> None:
    try_family(name, *real(REAL[name]), 4)


@pytest.mark.parametrize("name", FAMILIES)
def test_free_text_stays_free(name: str) -> None:
    constraint = family(name).constraint(AUTO, TOKENIZER.added_tokens)
    lead = "What a day! [1] {a: <b>} \N{GRINNING FACE}\n\n</p> <tool>"
    for text in texts(TOKENIZER, GRAMMARS, constraint, lead, 3):
        assert text.startswith(lead)


def forced_text(name: str, toolbox: Toolbox, answer: Constraint | None = None, lead: str = "") -> list[str]:
    constraint = family(name).constraint(toolbox, TOKENIZER.added_tokens, answer)
    return list(texts(TOKENIZER, GRAMMARS, constraint, lead, 6))


def test_constraint_is_unset_unless_needed() -> None:
    free = Toolbox(tools=(Tool(name="f", parameters=WEATHER), Tool(name="c", custom=True)))
    hermes, answer = family("hermes"), Constraint("regex", "a+")
    assert hermes.constraint(free, {}) is None
    assert hermes.constraint(None, {}) is None
    assert hermes.constraint(None, {}, answer) is answer
    assert hermes.constraint(replace(REQUIRED, choice="none"), {}, answer) is answer
    assert hermes.constraint(replace(free, allowed=frozenset({"f"})), {}) is not None


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "qwen3_coder"])
def test_constraint_answer_fits_a_schema_or_is_a_call(name: str) -> None:
    schema = {"properties": {"x": {"const": 1}}, "required": ["x"], "additionalProperties": False}
    answer = Constraint("json_schema", json.dumps({"type": "object"} | schema))
    free = Toolbox(tools=(Tool(name="now"),))
    answers = 0
    for text in forced_text(name, free, answer):
        if not calls_of(read(name, [text], free)):
            assert json.loads(text) == {"x": 1}
            answers += 1
    beginning = family(name).layout.triggers[0] if name != "llama3" else '{"name'
    for text in forced_text(name, free, answer, beginning):
        assert calls_of(read(name, [text], free)), text
    assert answers


@pytest.mark.parametrize("kind", ["regex", "lark", "ebnf", "structural_tag"])
def test_constraint_on_whole_text_covers_its_calls(kind: str) -> None:
    answer = Constraint(kind, "whatever")
    assert family("hermes").constraint(AUTO, {}, answer) is answer


@pytest.mark.parametrize("name", ["pythonic", "qwen3_coder", "glm45", "minimax_m2"])
@pytest.mark.parametrize(
    ("schema", "fine"),
    [
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"b": {"type": "null"}},
                                               "required": ["b"]}}}, True),
        ({"type": "object", "properties": {"b": {"type": ["integer", "null"]}}, "required": ["b"]}, True),
        ({"type": "object", "anyOf": [{"required": ["b"]}]}, False),
    ],
    ids=["reference", "types", "alternatives"],
)  # fmt: skip
def test_strict_parameters_are_forced_one_by_one_or_refused(
    name: str, schema: dict[str, Any], fine: bool
) -> None:
    toolbox = Toolbox(
        tools=(Tool(name="f", parameters=schema, strict=True),), choice="required", parallel=False
    )
    if not fine:
        with pytest.raises(InvalidRequest, match="cannot be enforced"):
            family(name).constraint(toolbox, {})
        return
    for text in forced_text(name, toolbox):
        [(_, arguments)] = calls_of(read(name, [text], toolbox))
        jsonschema.validate(json.loads(arguments), schema)


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "enum": ["a b", "c"]},
        {"type": "string", "pattern": "^[a-c]{2}/[0-9]$"},
        {"type": "string", "minLength": 2, "maxLength": 3},
        {"anyOf": [{"type": "string", "enum": ["x"]}, {"type": "null"}]},
        {"const": "y"},
    ],
    ids=str,
)
def test_bounds_of_strings_between_tags_hold(schema: dict[str, Any], name: str) -> None:
    parameters = {
        "type": "object",
        "properties": {"s": schema},
        "required": ["s"],
        "additionalProperties": False,
    }
    toolbox = Toolbox(
        tools=(Tool(name="f", parameters=parameters, strict=True),), choice="required", parallel=False
    )
    for text in forced_text(name, toolbox):
        [(_, arguments)] = calls_of(read(name, [text], toolbox))
        jsonschema.validate(json.loads(arguments), parameters)


def test_strings_may_end_with_a_tag_that_is_a_token() -> None:
    tags = dataclasses.replace(GLM, value="<call>", value_end="</call>")
    assert tags.value_end in TOKENIZER.added_tokens
    form = ToolFamily(
        name="tokens",
        keeps=frozenset({tags.value, tags.value_end}),
        read=lambda source: tags.read(source, tags.start),
        layout=Layout(triggers=(tags.start,), opening=tags.start, call=tags.call, closing=""),
    )
    toolbox = Toolbox(tools=(Tool(name="weather", parameters=WEATHER),), choice="required", parallel=False)
    forced = list(texts(TOKENIZER, GRAMMARS, form.constraint(toolbox, TOKENIZER.added_tokens), count=6))
    assert forced
    for text in forced:
        reader = form.reader(toolbox)
        [(_, arguments)] = calls_of([*reader.push(text), *reader.flush()])
        jsonschema.validate(json.loads(arguments), WEATHER)


HARD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "page": {"$ref": "#/$defs/Page[Item]"},
        "price": {"type": "string", "maxLength": 3, "pattern": "^(?!-x)[0-9.-]*$"},
        "size": {"oneOf": [{"type": "boolean"}, {"$ref": "#/$defs/Size"}]},
        "id": {"type": "integer", "minimum": -(2**63), "maximum": 5},
        "more": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"n": {"enum": [1]}}}]},
    },
    "required": ["page", "price", "size", "id", "more"],
    "$defs": {
        "Page[Item]": {"type": "object", "properties": {"n": {"enum": [1, 2]}}},
        "Size": {"enum": ["s", "m"]},
    },
}
EASY: dict[str, Any] = json.loads(
    json.dumps(HARD)
    .replace('"pattern"', '"title"')
    .replace('"type": "object"', '"type": "object", "additionalProperties": false')
)


@pytest.mark.parametrize("name", FAMILIES)
def test_forced_call_of_a_tool_that_is_not_strict_is_closed_and_drops_what_no_grammar_expresses(
    name: str,
) -> None:
    toolbox = Toolbox(tools=(Tool(name="f", parameters=HARD),), choice="required", parallel=False)
    ended = forced_text(name, toolbox)
    assert ended
    for text in ended:
        [(_, arguments)] = calls_of(read(name, [text], toolbox))
        jsonschema.validate(json.loads(arguments), EASY)


@pytest.mark.parametrize("name", FAMILIES)
def test_forced_call_of_a_strict_tool_is_refused_with_the_tool_and_the_place(name: str) -> None:
    tools = (Tool(name="fine"), Tool(name="f", parameters=HARD, strict=True))
    constraint = family(name).constraint(Toolbox(tools=tools), TOKENIZER.added_tokens)
    with pytest.raises(InvalidRequest, match="function 'f', at /properties/price") as error:
        GRAMMARS.check(constraint)
    assert "look-around" in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [(TextGrammar("lark", "start: nobody"), "nobody"), (TextGrammar("regex", "(?=a)b"), "look-around")],
    ids=["lark", "regex"],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_grammar_of_a_custom_tool_is_refused_with_the_tool(
    name: str, grammar: TextGrammar, reason: str
) -> None:
    tools = (Tool(name="fine"), Tool(name="sql", custom=True, grammar=grammar))
    constraint = family(name).constraint(Toolbox(tools=tools), TOKENIZER.added_tokens)
    with pytest.raises(InvalidRequest, match="'sql'") as error:
        GRAMMARS.check(constraint)
    assert reason in str(error.value) and len(str(error.value)) < 250


@pytest.mark.parametrize("name", FAMILIES)
def test_forced_call_of_a_tool_with_the_longest_name_is_read_back(name: str) -> None:
    longest = "mcp__" + "n" * (limits.TOOL_NAME.most - 5)
    toolbox = Toolbox(tools=(Tool(name=longest),), choice="required", parallel=False)
    for text in forced_text(name, toolbox):
        assert calls_of(read(name, [text], toolbox)) == [(longest, "{}")]
