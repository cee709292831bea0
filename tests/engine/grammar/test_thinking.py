"""Thoughts are free and bounded; the constraint begins where they end."""

from __future__ import annotations

import random

import pytest

from baton_api.errors import ConstraintBroken
from baton_api.sampling import Thinking
from baton_engine.grammar.matchers import matched
from baton_engine.requests import GrammarMatcher
from tests.engine.grammar.tokenizers import END, GRAMMARS, SPEAK, STOP, THINK, allowed, ids, matcher_of

ANSWER = ("regex", "[0-9]{2}")


def push(matcher: GrammarMatcher, *tokens: int) -> GrammarMatcher:
    for token in tokens:
        may = allowed(matcher)
        assert may is None or token in may, f"{token} is not allowed"
        matcher.push(token)
    return matcher


def thinking(*end: int, start: tuple[int, ...] = (), budget: int | None = None) -> Thinking:
    return Thinking(start, end or (SPEAK,), budget)


def test_thinking_allows_any_token_but_the_answers_end() -> None:
    matcher = matcher_of(*ANSWER, thinking())
    may = allowed(matcher)
    assert may is not None
    assert may >= {*ids("x\n9"), SPEAK, THINK}
    assert may.isdisjoint({END, STOP})


def test_thinking_constraint_starts_after_the_thought() -> None:
    matcher = push(matcher_of(*ANSWER, thinking()), *ids("so what 12"), SPEAK)
    assert allowed(matcher) == set(ids("0123456789"))
    assert not matcher.finished
    push(matcher, *ids("42"))
    assert matcher.finished


def test_thinking_optional_thought_allows_an_answer_at_once() -> None:
    matcher = matcher_of(*ANSWER, thinking(start=(THINK,)))
    assert allowed(matcher) == {THINK, *ids("0123456789")}
    push(matcher, *ids("42"))
    assert matcher.finished


def test_thinking_started_thought_is_free_until_its_end() -> None:
    matcher = push(matcher_of(*ANSWER, thinking(start=(THINK,))), THINK, *ids("hm"), SPEAK, *ids("42"))
    assert matcher.finished


def test_neither_a_thought_nor_an_answer_is_an_error() -> None:
    with pytest.raises(ConstraintBroken):
        matcher_of(*ANSWER, thinking(start=(THINK,))).push(*ids("x"))


def test_thinking_mark_of_letters_may_also_begin_the_answer() -> None:
    mark = tuple(ids("<t>"))
    source = ("regex", "(<tab>|<b>)[0-9]")
    matcher = push(matcher_of(*source, thinking(start=mark)), *ids("<t"))
    assert allowed(matcher) == set(ids("a>"))
    push(matcher, *ids("ab>7"))
    assert matcher.finished
    matcher = push(matcher_of(*source, thinking(start=mark)), *ids("<t>deep"), SPEAK, *ids("<b>7"))
    assert matcher.finished


def test_thinking_unambiguous_mark_is_completed() -> None:
    matcher = push(matcher_of(*ANSWER, thinking(start=tuple(ids("<t>")))), *ids("<"))
    assert allowed(matcher) == set(ids("t"))


def test_thinking_budget_forces_the_end_token_by_token() -> None:
    end = tuple(ids("</t>"))
    matcher = push(matcher_of(*ANSWER, thinking(*end, budget=3)), *ids("abc"))
    for token in end:
        assert allowed(matcher) == {token}
        matcher.push(token)
    assert allowed(matcher) == set(ids("0123456789"))


def test_thinking_started_end_continues_past_the_budget() -> None:
    end = tuple(ids("</t>"))
    matcher = push(matcher_of(*ANSWER, thinking(*end, budget=3)), *ids("ab<"))
    assert allowed(matcher) == set(ids("/"))
    push(matcher, *ids("/t>"))
    assert allowed(matcher) == set(ids("0123456789"))


def test_thinking_zero_budget_allows_no_thought() -> None:
    assert allowed(matcher_of(*ANSWER, thinking(budget=0))) == {SPEAK}


def test_thinking_tokens_before_the_mark_cost_no_budget() -> None:
    matcher = push(matcher_of(*ANSWER, thinking(start=(THINK,), budget=2)), THINK, *ids("ab"))
    assert allowed(matcher) == {SPEAK}


def test_without_a_constraint_only_the_budget_counts() -> None:
    matcher = GRAMMARS.matcher(None, thinking(start=(THINK,), budget=2))
    assert allowed(matcher) is None
    push(matcher, THINK, *ids("ab"))
    assert allowed(matcher) == {SPEAK}
    push(matcher, SPEAK, *ids("anything"))
    assert allowed(matcher) is None
    assert not matcher.finished
    assert matcher.ends == ()


def test_thinking_without_constraint_or_thought_is_free() -> None:
    matcher = push(GRAMMARS.matcher(None, thinking(start=(THINK,), budget=0)), *ids("hello"), THINK)
    assert allowed(matcher) is None


def test_law_the_end_is_found_wherever_it_stands() -> None:
    """Ends that contain their own beginnings are the hard ones."""
    chance = random.Random(3)
    for _ in range(500):
        end = [chance.randrange(2) for _ in range(chance.randint(1, 4))]
        text = [chance.randrange(2) for _ in range(20)]
        count, end_at = 0, -1
        for position, token in enumerate(text):
            count = matched(end, count, token)
            if count == len(end):
                end_at = position + 1 - len(end)
                break
        naive = next((at for at in range(20) if text[at : at + len(end)] == end), -1)
        assert end_at == naive


def test_law_a_budget_is_never_exceeded() -> None:
    chance = random.Random(4)
    end = tuple(ids("aab"))
    for _ in range(200):
        budget = chance.randrange(8)
        matcher = GRAMMARS.matcher(None, thinking(*end, budget=budget))
        text: list[int] = []
        while tuple(text[-3:]) != end:
            may = allowed(matcher)
            token = chance.choice(ids("ab") if may is None else sorted(may))
            text.append(token)
            matcher.push(token)
        assert len(text) <= budget + len(end)
