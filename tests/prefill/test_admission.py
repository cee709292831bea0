"""Valid requests of a decode worker, and the errors for invalid ones."""

from __future__ import annotations

import math
from typing import Any

import pytest

from baton_api.errors import InvalidRequest
from baton_api.hashing import block_hashes, chain_hash, root_hash
from baton_api.messages import Prefill
from baton_api.sampling import SamplingParams, Thinking
from baton_prefill.server import PromptLimits, check_prompt

LIMITS = PromptLimits(vocab=100, max_tokens=64, block_size=16)
TOKENS = list(range(40))
HASHES = block_hashes(TOKENS, 16, root_hash())


def prefill(sampling: dict[str, Any] | None = None, **changes: Any) -> Prefill:
    fields: dict[str, Any] = {
        "session": "r",
        "epoch": 1,
        "tokens": TOKENS,
        "start_block": 0,
        "parent": root_hash(),
        "sampling": SamplingParams(**{"seed": 1, **(sampling or {})}),
    }
    return Prefill(**{**fields, **changes})


@pytest.mark.parametrize("start, parent", [(0, root_hash()), (1, HASHES[0]), (2, HASHES[1])])
def test_admission_returns_the_prompts_chain_hashes(start: int, parent: bytes) -> None:
    tail = chain_hash(HASHES[1], TOKENS[32:])
    assert check_prompt(prefill(start_block=start, parent=parent), LIMITS) == [*HASHES, tail]


def test_admission_salt_is_part_of_the_chain() -> None:
    assert (
        check_prompt(prefill(salt="t", parent=root_hash("t")), LIMITS)[-1]
        != check_prompt(prefill(), LIMITS)[-1]
    )
    with pytest.raises(InvalidRequest):
        check_prompt(prefill(salt="t"), LIMITS)


REFUSED: dict[str, tuple[Prefill, str]] = {
    "no tokens": (prefill(tokens=[]), "has 0 tokens, not 1 to 64"),
    "too many tokens": (prefill(tokens=[0] * 65), "has 65 tokens, not 1 to 64"),
    "a token outside the vocabulary": (prefill(tokens=[5, 100]), "has token 100, but the vocabulary has 100"),
    "a negative token": (prefill(tokens=[-1]), "vocabulary"),
    "a start past the end": (prefill(start_block=3), "block 3 is asked for, but the prompt has 3"),
    "a negative start": (prefill(start_block=-1), "block -1 is asked for"),
    "another parent": (prefill(start_block=1), "before block 1 are not those that the decode worker has"),
    "a parent of another length": (prefill(parent=b""), "before block 0"),
    "a session without a name": (prefill(session=""), "name has 0 characters"),
    "a session with a long name": (prefill(session="x" * 513), "name has 513 characters"),
    "no time": (prefill(deadline_s=0.0), "the deadline of 0.0 s"),
    "time without end": (prefill(deadline_s=math.inf), "the deadline of inf s"),
    "time that is no number": (prefill(deadline_s=math.nan), "the deadline of nan s"),
    "a temperature that is no number": (prefill({"temperature": math.nan}), "not finite"),
    "an infinite bias": (prefill({"logit_bias": ((5, math.inf),)}), "not finite"),
    "a negative temperature": (prefill({"temperature": -0.1}), "a temperature outside its range"),
    "a huge seed": (prefill({"seed": 2**64}), "a seed outside 64 bits"),
    "a top_p over 1": (prefill({"top_p": 1.1}), "a top_p outside its range"),
    "a top_p that is no number": (prefill({"top_p": math.nan}), "not finite"),
    "a min_p below 0": (prefill({"min_p": -1.0}), "a min_p outside its range"),
    "a negative top_k": (prefill({"top_k": -1}), "a negative top_k"),
    "a repetition penalty of 0": (prefill({"repetition_penalty": 0.0}), "repetition_penalty outside"),
    "too many logprobs": (prefill({"logprobs": 21}), "too many logprobs"),
    "a bias outside the vocabulary": (prefill({"logit_bias": ((100, 1.0),)}), "outside the vocabulary"),
    "a stop id outside the vocabulary": (prefill({"stop_ids": [100]}), "outside the vocabulary"),
    "an allowed id outside the vocabulary": (prefill({"allowed_ids": [5, 100]}), "outside the vocabulary"),
    "a bad word outside the vocabulary": (prefill({"bad_words": [[1], [2, 100]]}), "outside the vocabulary"),
    "a bad word of no token": (prefill({"bad_words": [[]]}), "a bad word without tokens"),
    "a thought's end outside the vocabulary": (
        prefill({"thinking": Thinking(start=(), end=(100,))}),
        "outside the vocabulary",
    ),
    "a thought that never ends": (
        prefill({"thinking": Thinking(start=(1,), end=())}),
        "reasoning without an end",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_admission_invalid_request_is_rejected_with_the_value(case: str) -> None:
    request, message = REFUSED[case]
    with pytest.raises(InvalidRequest) as error:
        check_prompt(request, LIMITS)
    assert message in str(error.value)
