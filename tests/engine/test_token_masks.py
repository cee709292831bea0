"""Token masks on logits: they remove every forbidden token and keep every allowed one."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from baton_api.sampling import SamplingParams
from baton_engine.sampling import token_masks
from baton_engine.sampling.state import SamplingState
from baton_engine.sampling.token_masks import MaskFiller, TokenMask, mask_words

VOCABS = (1, 31, 32, 33, 97, 128, 1000)


def mask_of(allowed: set[int], vocab: int) -> NDArray[np.int32]:
    bits = np.zeros(mask_words(vocab) * 32, dtype=np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def tokens_of(mask: NDArray[np.int32]) -> set[int]:
    return {int(token) for token in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))}


@pytest.mark.parametrize("way", ["on the host", "where the logits are"])
@pytest.mark.parametrize("vocab", VOCABS)
def test_law_only_what_is_allowed_is_left(way: str, vocab: int) -> None:
    chance = random.Random(vocab)
    logits = torch.randn((5, vocab), generator=torch.Generator().manual_seed(vocab))
    before = logits.clone()
    sets = {row: {token for token in range(vocab) if chance.random() < 0.3} for row in (0, 2, 3)}
    masks = [(row, mask_of(allowed, vocab)) for row, allowed in sets.items()]
    if way == "on the host":
        token_masks.apply_on_cpu(logits.numpy(), masks)
    else:
        token_masks.apply_on_device(logits, masks)
    for row in range(5):
        kept = sets.get(row, set(range(vocab)))
        for token in range(vocab):
            expected = before[row, token] if token in kept else -torch.inf
            assert logits[row, token] == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator")
def test_token_masks_gpu_equals_cpu() -> None:
    logits = torch.randn(3, 1000)
    masks = [(1, mask_of({1, 5, 999}, 1000))]
    on_gpu = logits.to("cuda")
    token_masks.apply(on_gpu, masks)
    token_masks.apply(logits, masks)
    assert torch.equal(on_gpu.cpu(), logits)


def test_without_masks_nothing_is_touched() -> None:
    logits = torch.randn(2, 50)
    before = logits.clone()
    token_masks.apply(logits, [])
    assert torch.equal(logits, before)


class Only:
    """A guide that allows a few ids."""

    finished = False

    def __init__(self, *ids: int, ends: tuple[int, ...] = ()) -> None:
        self._ids = set(ids)
        self.ends = ends

    def fill(self, mask: NDArray[np.int32]) -> bool:
        mask[:] = mask_of(self._ids, len(mask) * 32)
        return True

    def push(self, token: int) -> None:
        assert token in self._ids


def permitted(token_mask: TokenMask | None, vocab: int = 40) -> set[int] | None:
    assert token_mask is not None
    mask = np.full(mask_words(vocab), 0x5A5A5A5A, dtype=np.int32)  # left over from the last step
    return tokens_of(mask) if token_mask.fill(mask, vocab) else None


PLAIN = SamplingParams()
EARLY = SamplingParams(stop_ids=frozenset({7}))


def test_token_mask_without_constraints_is_unset() -> None:
    assert TokenMask.of(PLAIN, None) is None
    assert TokenMask.of(replace(PLAIN, min_tokens=5, stop_ids=frozenset({1})), None) is None


CASES: dict[str, tuple[SamplingParams, Only | None, set[int]]] = {
    "the guide alone": (PLAIN, Only(3, 4), {3, 4}),
    "ids beyond the vocabulary": (PLAIN, Only(3, 45), {3}),
    "allowed ids": (replace(PLAIN, allowed_ids=(1, 2, 99)), None, {1, 2}),
    "allowed ids and the guide": (replace(PLAIN, allowed_ids=(1, 3)), Only(3, 4), {3}),
    "allowed ids against the guide": (replace(PLAIN, allowed_ids=(1, 2)), Only(3, 4), {3, 4}),
    "a bad word of one id": (replace(PLAIN, bad_words=((3,),)), Only(3, 4), {4}),
    "nothing but a bad word": (replace(PLAIN, bad_words=((3,),)), Only(3), {3}),
    "a bad word that has not begun": (replace(PLAIN, bad_words=((4, 3),)), Only(3, 4), {3, 4}),
    "an end that would end nothing": (PLAIN, Only(3, 7, ends=(7,)), {3}),
    "nothing but such an end": (PLAIN, Only(7, ends=(7,)), {7}),
    "an end that ends": (EARLY, Only(3, 7, ends=(7,)), {3, 7}),
    "an end too early": (replace(EARLY, min_tokens=2), Only(3, 7, ends=(7,)), {3}),
    "nothing but an early end": (replace(EARLY, min_tokens=2), Only(7, ends=(7,)), {7}),
    "allowed ids that all end": (replace(EARLY, min_tokens=2, allowed_ids=(7,)), None, {7}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_token_mask_matcher_wins_and_leaves_a_token(case: str) -> None:
    params, matcher, expected = CASES[case]
    assert permitted(TokenMask.of(params, matcher)) == expected


def test_token_mask_forbids_the_last_token_of_a_bad_word() -> None:
    token_mask = TokenMask.of(replace(PLAIN, bad_words=((1, 2, 3), (2, 5))), None)
    assert token_mask is not None
    assert permitted(token_mask) is None
    for token, forbidden in ((1, set[int]()), (2, {3, 5}), (9, set[int]()), (2, {5})):
        token_mask.push(token)
        may = permitted(token_mask)
        assert (set(range(40)) - may if may is not None else set()) == forbidden


def test_token_mask_min_tokens_ends_after_that_many() -> None:
    params = replace(PLAIN, allowed_ids=(1, 7), stop_ids=frozenset({7}), min_tokens=2)
    token_mask = TokenMask.of(params, None)
    assert token_mask is not None
    seen = []
    for _ in range(3):
        seen.append(permitted(token_mask))
        token_mask.push(1)
    assert seen == [{1}, {1}, {1, 7}]


def test_masks_of_many_rows_are_their_own() -> None:
    masks = MaskFiller(40)
    matchers = [None if row % 3 == 0 else Only(row % 40) for row in range(100)]
    for count in (1, 100, 7, 64):
        states = [SamplingState(PLAIN, (1,), matcher) for matcher in matchers[:count]]
        filled = masks.begin([state.token_mask for state in states]).wait()
        assert len(filled) == count
        for row, mask in enumerate(filled):
            if row % 3 == 0:
                assert mask is None
            else:
                assert isinstance(mask, np.ndarray)
                assert tokens_of(mask) == {row % 40}
    masks.close()
