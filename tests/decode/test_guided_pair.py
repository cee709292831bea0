"""Constrained answers through a pair: the constraint holds for the prefill worker's first token too."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from baton_api.errors import InvalidRequest
from baton_api.sampling import Constraint, Thinking
from baton_engine.requests import FinishReason, GrammarMatcher
from tests.decode.pair import Pair, Side, no_matcher, open_pair, tokens
from tests.engine.fake_model import make_cache
from tests.engine.grammar.tokenizers import END, GRAMMARS, SPEAK, STOP, TOKENIZER
from tests.engine.test_guided import Speaker

PROMPT = tuple(range(30))
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "by chance": {"temperature": 1.3, "seed": 5},
    "with logprobs": {"temperature": 0.0, "logprobs": 3},
    "with a minimum": {"temperature": 1.0, "seed": 2, "min_tokens": 3},
    "with allowed ids": {"temperature": 1.0, "seed": 3, "allowed_ids": tuple(TOKENIZER.encode("13579-"))},
    "with bad words": {"temperature": 0.0, "bad_words": tuple((one,) for one in TOKENIZER.encode("0123"))},
    "without ends": {"temperature": 1.0, "seed": 4, "stop_ids": frozenset()},
    "after a thought": {"temperature": 0.0, "thinking": Thinking((), (SPEAK,), budget=2)},
    "without a thought": {"temperature": 0.0, "thinking": Thinking((), (SPEAK,), budget=0)},
}
PATTERN = "[0-9]{2}(-[0-9]){0,3}"
ANSWER = rf"(.*</think>)?{PATTERN}(<\|end\|>|<\|stop\|>)?"
"""Pattern of a drawn answer: a thought may come first, an end last."""


def side(name: str) -> Side:
    return Side.make(name, Speaker(), make_cache(64))


async def answer(pair: Pair, *, remote: bool = True, pattern: str = PATTERN, **how: Any) -> str:
    constraint = Constraint("regex", pattern)
    parameters: dict[str, Any] = {"stop_ids": frozenset({END, STOP}), "max_tokens": 24, **how}
    matcher: GrammarMatcher = GRAMMARS.matcher(constraint, parameters.get("thinking"))
    request = pair.request(PROMPT, remote=remote, matcher=matcher, constraint=constraint, **parameters)
    outputs = await pair.decode.generate(request)
    assert outputs[-1].finish is FinishReason.STOP, outputs[-1]
    return TOKENIZER.decode(tokens(outputs), skip_special_tokens=False)


@pytest.mark.parametrize("case", CASES)
async def test_guided_pair_equals_one_worker(case: str) -> None:
    async with open_pair(side("prefill"), side("decode"), matchers=GRAMMARS.prepare) as pair:
        expected = await answer(pair, remote=False, **CASES[case])
        answered = await answer(pair, **CASES[case])
        assert answered == expected
        assert re.fullmatch(ANSWER, answered)
        assert pair.prefills.outcomes["whole"] == 1


async def test_guided_pair_first_token_may_be_the_whole_answer() -> None:
    async with open_pair(side("prefill"), side("decode"), matchers=GRAMMARS.prepare) as pair:
        assert await answer(pair, pattern="7") == "7"


async def test_guided_pair_prefill_rejection_is_served_by_decode() -> None:
    requested: list[Constraint | None] = []

    async def refuse(
        constraint: Constraint | None, thinking: Thinking | None, tenant: str
    ) -> Callable[[], GrammarMatcher]:
        requested.append(constraint)
        return await no_matcher(constraint, thinking, tenant)

    async with open_pair(side("prefill"), side("decode"), matchers=refuse) as pair:
        assert re.fullmatch(ANSWER, await answer(pair, temperature=0.0))
        assert requested == [Constraint("regex", PATTERN)], "it is not asked a second time"
        assert pair.prefills.outcomes["rejected"] == 1


async def test_guided_pair_broken_prefill_matcher_is_recomputed() -> None:
    class Broken:
        ends = ()
        finished = False

        def fill(self, mask: object) -> bool:
            raise InvalidRequest("too complex")

        def push(self, token: int) -> None:
            raise AssertionError("nothing was drawn")

    async def broken(
        constraint: Constraint | None, thinking: Thinking | None, tenant: str
    ) -> Callable[[], GrammarMatcher]:
        return Broken

    async with open_pair(side("prefill"), side("decode"), matchers=broken) as pair:
        assert re.fullmatch(ANSWER, await answer(pair, temperature=0.0))
        assert pair.prefills.outcomes["rejected"] == 1
