"""A guide allows exactly what continues a text of its grammar, and knows when nothing more can come."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from baton_api.errors import BatonError, ConstraintBroken
from baton_api.sampling import Constraint, Thinking
from baton_engine.sampling.token_masks import mask_words
from tests.engine.grammar.tokenizers import END, GRAMMARS, PADDED, STOP, allowed, drawn, ids, matcher_of


def test_matcher_allows_only_tokens_that_can_continue() -> None:
    matcher = matcher_of("regex", "a[bc]|d")
    assert allowed(matcher) == set(ids("ad"))
    matcher.push(*ids("a"))
    assert allowed(matcher) == set(ids("bc"))


def test_matcher_is_finished_when_only_an_end_can_follow() -> None:
    matcher = matcher_of("regex", "ab?")
    matcher.push(*ids("a"))
    assert not matcher.finished
    assert allowed(matcher) == {*ids("b"), END, STOP}
    matcher.push(*ids("b"))
    assert matcher.finished
    assert allowed(matcher) == {END, STOP}


def test_matcher_every_end_token_finishes() -> None:
    for end in (END, STOP):
        matcher = matcher_of("regex", "a+")
        matcher.push(*ids("a"))
        matcher.push(end)
        assert matcher.finished
    assert set(matcher.ends) == {END, STOP}


def test_ids_beyond_the_tokenizer_are_never_allowed() -> None:
    matcher = matcher_of("regex", r"(.|\n)*")
    assert max(allowed(matcher) or ()) <= STOP
    assert PADDED > STOP + 6


def test_matcher_forbidden_token_is_an_error_that_names_it() -> None:
    matcher = matcher_of("regex", "[0-9]+")
    with pytest.raises(ConstraintBroken, match=f"last token, {ids('x')[0]}"):
        matcher.push(*ids("x"))


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [
        ("regex", "a<call>b", "a<call>b"),
        ("lark", 'start: "<call>" "b"?\n', "<call>b"),
        ("ebnf", 'root ::= "<call>"', "<call>"),
        ("json_schema", '{"const": "</call>"}', '"</call>"'),
    ],
)
def test_matcher_letters_of_a_special_token_are_text(kind: str, source: str, text: str) -> None:
    matcher = matcher_of(kind, source)
    for letter in text:
        (token,) = ids(letter)
        assert allowed(matcher) == {token} or token in (allowed(matcher) or ())
        matcher.push(token)
    assert matcher.finished


def test_matchers_of_one_grammar_are_independent() -> None:
    first, second = matcher_of("regex", "abc"), matcher_of("regex", "abc")
    for token in ids("ab"):
        first.push(token)
    assert (allowed(first), allowed(second)) == (set(ids("c")), set(ids("a")))


def test_characters_of_several_tokens_are_kept_whole() -> None:
    matcher = matcher_of("regex", "é|ü")
    first, second = ids("é")
    matcher.push(first)
    assert allowed(matcher) == {second, ids("ü")[1]}


EBNF = 'root ::= pair ("," pair)*\npair ::= [a-c]+ "=" ("yes" | "no" | pair)'
CASES = {
    "regex": (Constraint("regex", "[0-9]{3}-[0-9]{4}"), r"[0-9]{3}-[0-9]{4}"),
    "alternatives": (Constraint("regex", "(foo|bar){1,3}!?"), r"(foo|bar){1,3}!?"),
    "a slash and quotes": (Constraint("regex", 'a/b"c"\\n'), 'a/b"c"\n'),
    "anchors": (Constraint("regex", "^a{2,5}$"), "a{2,5}"),
    "choice": (Constraint("lark", 'start: "a" | "ab" | "b c"'), "a|ab|b c"),
    "ebnf": (Constraint("ebnf", EBNF), "([a-c]+=)+(yes|no)(,([a-c]+=)+(yes|no))*"),
}


@pytest.mark.parametrize("case", CASES)
def test_law_whatever_is_drawn_matches(case: str) -> None:
    constraint, pattern = CASES[case]
    chance = random.Random(5)
    for _ in range(60):
        text = drawn(GRAMMARS.matcher(constraint, None), chance)
        assert re.fullmatch(pattern, text), text


def test_matcher_broken_mask_is_an_error_of_its_request() -> None:
    matcher = matcher_of("regex", "[0-9]+")
    with pytest.raises(BatonError):
        matcher.push(*ids("x"))
    with pytest.raises(BatonError, match="cannot continue"):
        matcher.fill(np.zeros(mask_words(PADDED), dtype=np.int32))


def test_matchers_without_constraint_or_thought_are_rejected() -> None:
    with pytest.raises(ValueError, match="neither `constraint` nor `thinking` is set"):
        GRAMMARS.matchers(None, None)
    with pytest.raises(ValueError, match="never end"):
        GRAMMARS.matchers(None, Thinking((), ()))
