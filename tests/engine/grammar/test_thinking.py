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


def test_a_thought_may_say_anything_but_an_end_of_the_whole() -> None:
    matcher = matcher_of(*ANSWER, thinking())
    may = allowed(matcher)
    assert may is not None
    assert may >= {*ids("x\n9"), SPEAK, THINK}
    assert may.isdisjoint({END, STOP})


def test_the_constraint_begins_after_the_end_of_the_thought() -> None:
    matcher = push(matcher_of(*ANSWER, thinking()), *ids("so what 12"), SPEAK)
    assert allowed(matcher) == set(ids("0123456789"))
    assert not matcher.finished
    push(matcher, *ids("42"))
    assert matcher.finished


def test_who_may_think_may_also_answer_at_once() -> None:
    matcher = matcher_of(*ANSWER, thinking(start=(THINK,)))
    assert allowed(matcher) == {THINK, *ids("0123456789")}
    push(matcher, *ids("42"))
    assert matcher.finished


def test_who_begins_to_think_thinks() -> None:
    matcher = push(matcher_of(*ANSWER, thinking(start=(THINK,))), THINK, *ids("hm"), SPEAK, *ids("42"))
    assert matcher.finished


def test_neither_a_thought_nor_an_answer_is_an_error() -> None:
    with pytest.raises(ConstraintBroken):
        matcher_of(*ANSWER, thinking(start=(THINK,))).push(*ids("x"))


def test_a_mark_of_letters_may_be_the_beginning_of_the_answer_too() -> None:
    mark = tuple(ids("<t>"))
    source = ("regex", "(<tab>|<b>)[0-9]")
    matcher = push(matcher_of(*source, thinking(start=mark)), *ids("<t"))
    assert allowed(matcher) == set(ids("a>"))
    push(matcher, *ids("ab>7"))
    assert matcher.finished
    matcher = push(matcher_of(*source, thinking(start=mark)), *ids("<t>deep"), SPEAK, *ids("<b>7"))
    assert matcher.finished


def test_a_mark_that_no_answer_begins_with_is_written_to_its_end() -> None:
    matcher = push(matcher_of(*ANSWER, thinking(start=tuple(ids("<t>")))), *ids("<"))
    assert allowed(matcher) == set(ids("t"))


def test_a_budget_forces_the_end_token_by_token() -> None:
    end = tuple(ids("</t>"))
    matcher = push(matcher_of(*ANSWER, thinking(*end, budget=3)), *ids("abc"))
    for token in end:
        assert allowed(matcher) == {token}
        matcher.push(token)
    assert allowed(matcher) == set(ids("0123456789"))


def test_an_end_that_has_begun_when_the_budget_is_spent_goes_on() -> None:
    end = tuple(ids("</t>"))
    matcher = push(matcher_of(*ANSWER, thinking(*end, budget=3)), *ids("ab<"))
    assert allowed(matcher) == set(ids("/"))
    push(matcher, *ids("/t>"))
    assert allowed(matcher) == set(ids("0123456789"))


def test_no_budget_at_all_means_no_thought() -> None:
    assert allowed(matcher_of(*ANSWER, thinking(budget=0))) == {SPEAK}


def test_what_is_no_thought_yet_costs_no_budget() -> None:
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


def test_without_a_constraint_and_without_a_thought_all_stays_free() -> None:
    matcher = push(GRAMMARS.matcher(None, thinking(start=(THINK,), budget=0)), *ids("hello"), THINK)
    assert allowed(matcher) is None


def test_law_the_end_is_found_wherever_it_stands() -> None:
    """Ends that contain their own beginnings are the hard ones."""
    chance = random.Random(3)
    for _ in range(500):
        end = [chance.randrange(2) for _ in range(chance.randint(1, 4))]
        text = [chance.randrange(2) for _ in range(20)]
        count, found = 0, -1
        for position, token in enumerate(text):
            count = matched(end, count, token)
            if count == len(end):
                found = position + 1 - len(end)
                break
        naive = next((at for at in range(20) if text[at : at + len(end)] == end), -1)
        assert found == naive


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
