"""Constrained requests in the engine: how they continue, end, fail and run beside others."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_api.errors import BatonError, ConstraintBroken, InternalError, InvalidRequest
from baton_api.messages import TokenChoice
from baton_api.sampling import Constraint, Thinking
from baton_engine.requests import FetchResult, FinishReason, Request
from tests.engine import fake_model
from tests.engine.fake_model import FakeModel
from tests.engine.grammar.tokenizers import END, GRAMMARS, PADDED, SPEAK, STOP, THINK, TOKENIZER, ids
from tests.engine.serving import Prefiller, Recipient, Serving, request_of

ENDS = frozenset({END, STOP})


class Speaker(FakeModel):
    """A fake model with the words of these tests, which likes letters better than anything else."""

    def __init__(self) -> None:
        super().__init__(dataclasses.replace(fake_model.SPEC, vocab=PADDED))
        self._bias = torch.full((PADDED,), -6.0)
        self._bias[ids("abcdefghijklmnopqrstuvwxyz")] = 0.0

    def logits(self, tokens: list[int]) -> Tensor:
        return super().logits(tokens) + self._bias


def serving_of(**how: Any) -> Serving:
    return Serving(model=Speaker(), **how)


def guided(name: str, pattern: str, *, thinking: Thinking | None = None, **fields: Any) -> Request:
    constraint = Constraint("regex", pattern)
    usual: dict[str, Any] = {"max_tokens": 60, "stop_ids": ENDS, "constraint": constraint}
    matcher = GRAMMARS.matcher(constraint, thinking)
    return request_of(name, **{**usual, "thinking": thinking, **fields}, matcher=matcher)


def text_of(serving: Serving, name: str) -> str:
    return TOKENIZER.decode(serving.tokens(name), skip_special_tokens=False)


def test_guided_text_fits_the_constraint() -> None:
    with serving_of() as serving:
        serving.submit(guided("q", "[0-9]{3}-[0-9]{4}"))
        assert re.fullmatch("[0-9]{3}-[0-9]{4}", text_of(serving, "q"))


def test_guided_complete_answer_ends_without_another_pass() -> None:
    with serving_of() as serving:
        serving.submit(guided("q", "[0-9]{5}"))
        last = serving.ended("q")
        assert (last.finish, last.stop_id) == (FinishReason.STOP, None)
        assert len(serving.so_far("q")) == serving.model.passes == 5


def test_guided_open_answer_ends_by_a_stop_id() -> None:
    with serving_of() as serving:
        serving.submit(guided("q", "7(xx)*", logit_bias=((END, 50.0),)))
        last = serving.ended("q")
        assert (last.finish, last.stop_id) == (FinishReason.STOP, END)
        assert serving.so_far("q") == [*ids("7"), END]


def test_guided_max_tokens_cuts_only_an_incomplete_answer() -> None:
    with serving_of() as serving:
        serving.submit(guided("cut", "[0-9]{5}", max_tokens=4), guided("whole", "[0-9]{5}", max_tokens=5))
        assert serving.ended("cut").finish is FinishReason.LENGTH
        assert serving.ended("whole").finish is FinishReason.STOP


def test_guided_ignore_eos_answer_continues_while_possible() -> None:
    """`ignore_eos`: an end that would complete the answer is drawn only where nothing else can follow."""
    with serving_of() as serving:
        longest = guided("longest", "7{2,9}", stop_ids=frozenset(), logit_bias=((END, 50.0),))
        endless = guided("endless", "7+", stop_ids=frozenset(), max_tokens=30, logit_bias=((END, 50.0),))
        serving.submit(longest, endless)
        assert text_of(serving, "longest") == "7" * 9
        assert serving.ended("longest").finish is FinishReason.STOP
        assert text_of(serving, "endless") == "7" * 30
        assert serving.ended("endless").finish is FinishReason.LENGTH


def test_guided_min_tokens_holds_until_the_answer_is_complete() -> None:
    with serving_of() as serving:
        bias = ((END, 50.0), (STOP, 50.0))
        serving.submit(
            guided("more", "7+", min_tokens=5, logit_bias=bias),
            guided("complete", "77", min_tokens=5, logit_bias=bias),
            guided("nothing", "", min_tokens=5, logit_bias=bias),
        )
        assert text_of(serving, "more")[:5] == "7" * 5
        assert (text_of(serving, "complete"), serving.ended("complete").finish) == ("77", FinishReason.STOP)
        assert serving.tokens("nothing")[0] in ENDS
        assert serving.ended("nothing").finish is FinishReason.STOP


def test_guided_stop_id_ends_the_text_early() -> None:
    with serving_of() as serving:
        (middle,) = ids("b")
        serving.submit(guided("q", "abc", stop_ids=ENDS | {middle}))
        last = serving.ended("q")
        assert (last.finish, last.stop_id) == (FinishReason.STOP, middle)
        assert text_of(serving, "q") == "ab"


def test_logprobs_are_those_of_the_model_whatever_is_allowed() -> None:
    with serving_of() as serving:
        serving.submit(guided("q", "7", logprobs=2))
        (choice,) = serving.ended("q").tokens
        logprobs = serving.model.logits(list(request_of("q").prompt)).log_softmax(-1)
        assert choice.logprob == pytest.approx(float(logprobs[choice.token]))
        assert [token for token, _ in choice.top] == logprobs.topk(2).indices.tolist()


def test_allowed_ids_are_the_only_ones_that_are_drawn() -> None:
    with serving_of() as serving:
        few = tuple(ids("xyz"))
        serving.submit(request_of("q", max_tokens=40, temperature=1.5, seed=3, allowed_ids=few))
        assert set(serving.tokens("q")) == set(few)


def test_bad_words_are_never_completed() -> None:
    with serving_of() as serving:
        a, b, c = ids("abc")
        few, words = (a, b, c), ((a, b, b), (c,), (b, a, a))
        serving.submit(
            request_of("q", max_tokens=200, temperature=1.5, seed=3, allowed_ids=few, bad_words=words)
        )
        text = text_of(serving, "q")
        assert len(text) == 200
        assert [word for word in ("abb", "c", "baa") if word in text] == []
        assert set(text) == {"a", "b"}


def test_guided_contradictory_masks_ignore_the_last() -> None:
    with serving_of() as serving:
        (x,) = ids("x")
        serving.submit(
            guided("other", "[0-9]{2}", allowed_ids=(x,)),
            request_of("bad", max_tokens=3, allowed_ids=(x,), bad_words=((x,),)),
            request_of("end", max_tokens=3, allowed_ids=(END,), min_tokens=2, stop_ids=ENDS),
        )
        assert re.fullmatch("[0-9]{2}", text_of(serving, "other"))
        assert text_of(serving, "bad") == "xxx"
        assert serving.tokens("end") == [END]


def test_guided_thought_is_cut_at_its_budget() -> None:
    with serving_of() as serving:
        serving.submit(guided("q", "[0-9]{3}", thinking=Thinking((), (SPEAK,), budget=6)))
        assert re.fullmatch(r"[^0-9]{6}</think>[0-9]{3}", text_of(serving, "q"))


def test_guided_thought_budget_without_constraint_frees_the_rest() -> None:
    with serving_of() as serving:
        thinking = Thinking((THINK,), (SPEAK,), budget=2)
        matcher = GRAMMARS.matcher(None, thinking)
        bias = ((THINK, 50.0),)
        serving.submit(request_of("q", max_tokens=12, thinking=thinking, logit_bias=bias, matcher=matcher))
        tokens = serving.tokens("q")
        assert (tokens[0], tokens[3]) == (THINK, SPEAK)
        assert serving.ended("q").finish is FinishReason.LENGTH


LAW = ("[0-9]{3}-[0-9]{4}", "([a-f]{2} ){3,9}!", "(yes|no)(, (yes|no)){4,12}", "x{1,5}[0-9]+y")


def law_request(number: int) -> Request:
    return guided(
        f"q{number}",
        LAW[number % len(LAW)],
        temperature=1.2,
        seed=number,
        prompt=tuple((number * 7 + place) % 90 for place in range(5 + number % 9)),
        max_tokens=40,
    )


def test_law_retraction_and_company_change_nothing() -> None:
    """Guides follow the tokens, not the blocks: what is sent back and resumed says the same."""
    with serving_of(blocks=512) as roomy:
        expected = [roomy.run(law_request(number))[0] for number in range(24)]
    with serving_of(blocks=40) as crowded:
        requests = [law_request(number) for number in range(24)]
        assert crowded.run(*requests) == expected
        assert crowded.at_rest().totals.retractions > 0
        assert [
            crowded.ended(request.id).finish
            for request in requests
            if crowded.ended(request.id).finish not in (FinishReason.STOP, FinishReason.LENGTH)
        ] == []


def test_guided_and_free_requests_share_a_pass() -> None:
    with serving_of() as serving:
        free = request_of("free", seed=4, max_tokens=12)
        expected = serving.reference(request_of("free", seed=4, max_tokens=12))
        serving.submit(guided("guided", "[0-9]{12}"), free)
        assert serving.tokens("free") == expected
        assert text_of(serving, "guided").isdigit()


def test_guided_abort_frees_all_blocks() -> None:
    with serving_of() as serving:
        serving.submit(guided("q", "[a-z]+", max_tokens=900, logit_bias=((END, -100.0), (STOP, -100.0))))
        serving.wait(lambda: len(serving.so_far("q")) > 3)
        serving.engine.abort("q")
        assert serving.ended("q").finish is FinishReason.ABORT
        serving.at_rest()


class Contrary:
    """A guide with a will of its own."""

    ends = ()
    finished = False

    def __init__(self, *, fills: Exception | None = None, takes: Exception | None = None) -> None:
        self._fills = fills
        self._takes = takes

    def fill(self, mask: NDArray[np.int32]) -> bool:
        if self._fills is not None:
            raise self._fills
        return False

    def push(self, token: int) -> None:
        if self._takes is not None:
            raise self._takes


class Empty(Contrary):
    def fill(self, mask: NDArray[np.int32]) -> bool:
        mask.fill(0)
        return True


FAILING = {
    "no mask": (Contrary(fills=InvalidRequest("too complex")), InvalidRequest),
    "a mask of our own mistake": (Contrary(fills=ZeroDivisionError()), InternalError),
    "a mask without any token": (Empty(), InvalidRequest),
    "a token that is not taken": (Contrary(takes=ConstraintBroken(7)), ConstraintBroken),
    "a token of our own mistake": (Contrary(takes=ZeroDivisionError()), InternalError),
}


@pytest.mark.parametrize("case", FAILING)
def test_guided_failing_matcher_ends_only_its_request(case: str) -> None:
    matcher, kind = FAILING[case]
    with serving_of() as serving:
        broken, free = request_of("broken", matcher=matcher), request_of("free", seed=2)
        expected = serving.reference(request_of("free", seed=2))
        serving.submit(broken, free)
        last = serving.ended("broken")
        assert last.finish is FinishReason.ERROR
        assert isinstance(last.error, kind) and isinstance(last.error, BatonError)
        assert serving.so_far("broken") == []
        assert serving.tokens("free") == expected
        serving.at_rest()


def remote(serving: Serving, name: str, pattern: str, **fields: Any) -> tuple[Request, Prefiller]:
    prefiller = Prefiller(serving)
    request = guided(name, pattern, remote=prefiller, prompt=tuple(range(20)), **fields)
    return request, prefiller


def test_guided_remote_first_token_advances_the_matcher() -> None:
    with serving_of(local_prefill_tokens=0) as serving:
        request, prefiller = remote(serving, "q", "a[0-9]b|c[0-9]d")
        serving.submit(request)
        fetch = prefiller.fetch()
        assert (fetch.sampling.constraint, fetch.sampling.stop_ids) == (request.sampling.constraint, ENDS)
        prefiller.write(fetch)
        first = TokenChoice(token=ids("c")[0])
        serving.engine.fetched(FetchResult("q", len(fetch.blocks), first=first))
        assert re.fullmatch("c[0-9]d", text_of(serving, "q"))


def test_guided_remote_first_token_may_complete_the_answer() -> None:
    with serving_of(local_prefill_tokens=0) as serving:
        request, prefiller = remote(serving, "q", "c")
        serving.submit(request)
        fetch = prefiller.fetch()
        prefiller.write(fetch)
        serving.engine.fetched(FetchResult("q", len(fetch.blocks), first=TokenChoice(token=ids("c")[0])))
        assert serving.ended("q").finish is FinishReason.STOP
        assert serving.model.passes == 0
        serving.at_rest()


def test_guided_forbidden_remote_first_token_ends_the_request() -> None:
    with serving_of(local_prefill_tokens=0) as serving:
        request, prefiller = remote(serving, "q", "[0-9]+")
        serving.submit(request)
        fetch = prefiller.fetch()
        prefiller.write(fetch)
        serving.engine.fetched(FetchResult("q", len(fetch.blocks), first=TokenChoice(token=ids("c")[0])))
        assert isinstance(serving.ended("q").error, ConstraintBroken)
        serving.at_rest()


def test_guided_failed_fetch_is_computed_locally() -> None:
    with serving_of(local_prefill_tokens=0) as serving:
        request, prefiller = remote(serving, "q", "[0-9]{4}")
        serving.submit(request)
        prefiller.fail(prefiller.fetch(), arrived=2)
        assert re.fullmatch("[0-9]{4}", text_of(serving, "q"))


def test_guided_exported_first_token_is_constrained() -> None:
    with serving_of() as serving:
        serving.submit(guided("q", "[0-9]{4}", export=Recipient(), max_tokens=1))
        assert text_of(serving, "q").isdigit()
        assert serving.ended("q").finish is FinishReason.LENGTH
        serving.engine.release("q")
        serving.at_rest()
