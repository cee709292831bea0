"""Thoughts are free and bounded; the constraint begins where they end."""

from __future__ import annotations

import random

import pytest

from baton_api.errors import ConstraintBroken
from baton_engine.grammar.thinking import matched
from baton_engine.requests import Guide, Thinking
from tests.engine.grammar.words import END, GRAMMARS, SPEAK, STOP, THINK, allowed, guide_of, ids

ANSWER = ("regex", "[0-9]{2}")


def push(guide: Guide, *tokens: int) -> Guide:
    for token in tokens:
        may = allowed(guide)
        assert may is None or token in may, f"{token} is not allowed"
        guide.push(token)
    return guide


def thinking(*end: int, start: tuple[int, ...] = (), budget: int | None = None) -> Thinking:
    return Thinking(start, end or (SPEAK,), budget)


def test_a_thought_may_say_anything_but_an_end_of_the_whole() -> None:
    guide = guide_of(*ANSWER, thinking())
    may = allowed(guide)
    assert may is not None
    assert may >= {*ids("x\n9"), SPEAK, THINK}
    assert may.isdisjoint({END, STOP})


def test_the_constraint_begins_after_the_end_of_the_thought() -> None:
    guide = push(guide_of(*ANSWER, thinking()), *ids("so what 12"), SPEAK)
    assert allowed(guide) == set(ids("0123456789"))
    assert not guide.finished
    push(guide, *ids("42"))
    assert guide.finished


def test_who_may_think_may_also_answer_at_once() -> None:
    guide = guide_of(*ANSWER, thinking(start=(THINK,)))
    assert allowed(guide) == {THINK, *ids("0123456789")}
    push(guide, *ids("42"))
    assert guide.finished


def test_who_begins_to_think_thinks() -> None:
    guide = push(guide_of(*ANSWER, thinking(start=(THINK,))), THINK, *ids("hm"), SPEAK, *ids("42"))
    assert guide.finished


def test_neither_a_thought_nor_an_answer_is_an_error() -> None:
    with pytest.raises(ConstraintBroken):
        guide_of(*ANSWER, thinking(start=(THINK,))).push(*ids("x"))


def test_a_mark_of_letters_may_be_the_beginning_of_the_answer_too() -> None:
    mark = tuple(ids("<t>"))
    source = ("regex", "(<tab>|<b>)[0-9]")
    guide = push(guide_of(*source, thinking(start=mark)), *ids("<t"))
    assert allowed(guide) == set(ids("a>"))
    push(guide, *ids("ab>7"))
    assert guide.finished
    guide = push(guide_of(*source, thinking(start=mark)), *ids("<t>deep"), SPEAK, *ids("<b>7"))
    assert guide.finished


def test_a_mark_that_no_answer_begins_with_is_written_to_its_end() -> None:
    guide = push(guide_of(*ANSWER, thinking(start=tuple(ids("<t>")))), *ids("<"))
    assert allowed(guide) == set(ids("t"))


def test_a_budget_forces_the_end_token_by_token() -> None:
    end = tuple(ids("</t>"))
    guide = push(guide_of(*ANSWER, thinking(*end, budget=3)), *ids("abc"))
    for token in end:
        assert allowed(guide) == {token}
        guide.push(token)
    assert allowed(guide) == set(ids("0123456789"))


def test_an_end_that_has_begun_when_the_budget_is_spent_goes_on() -> None:
    end = tuple(ids("</t>"))
    guide = push(guide_of(*ANSWER, thinking(*end, budget=3)), *ids("ab<"))
    assert allowed(guide) == set(ids("/"))
    push(guide, *ids("/t>"))
    assert allowed(guide) == set(ids("0123456789"))


def test_no_budget_at_all_means_no_thought() -> None:
    assert allowed(guide_of(*ANSWER, thinking(budget=0))) == {SPEAK}


def test_what_is_no_thought_yet_costs_no_budget() -> None:
    guide = push(guide_of(*ANSWER, thinking(start=(THINK,), budget=2)), THINK, *ids("ab"))
    assert allowed(guide) == {SPEAK}


def test_without_a_constraint_only_the_budget_counts() -> None:
    guide = GRAMMARS.guide(None, thinking(start=(THINK,), budget=2))
    assert allowed(guide) is None
    push(guide, THINK, *ids("ab"))
    assert allowed(guide) == {SPEAK}
    push(guide, SPEAK, *ids("anything"))
    assert allowed(guide) is None
    assert not guide.finished
    assert guide.ends == ()


def test_without_a_constraint_and_without_a_thought_all_stays_free() -> None:
    guide = push(GRAMMARS.guide(None, thinking(start=(THINK,), budget=0)), *ids("hello"), THINK)
    assert allowed(guide) is None


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
        guide = GRAMMARS.guide(None, thinking(*end, budget=budget))
        text: list[int] = []
        while tuple(text[-3:]) != end:
            may = allowed(guide)
            token = chance.choice(ids("ab") if may is None else sorted(may))
            text.append(token)
            guide.push(token)
        assert len(text) <= budget + len(end)
