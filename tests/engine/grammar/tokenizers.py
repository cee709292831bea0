"""Tokenizers for tests of constraints: single bytes with special tokens, and the guides over them."""

from __future__ import annotations

import atexit
import dataclasses
import random
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from baton_api.sampling import Constraint, Thinking
from baton_engine.grammar.grammars import Grammars
from baton_engine.model.tokenizer import Tokenizer
from baton_engine.requests import GrammarMatcher
from baton_engine.sampling.token_masks import mask_words
from tests.engine import fake_model

SPECIALS = ("<|end|>", "<|stop|>", "<think>", "</think>", "<call>", "</call>")
PADDED = 300
"""Rows of the model's vocabulary: more than the tokenizer has words, as with many models."""


def make_tokenizer(*, ends: bool = True) -> Tokenizer:
    """Bytes 0 to 255 in the order of their letters, then `SPECIALS`, the first two of which may be ends."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=SPECIALS[0] if ends else None,
        additional_special_tokens=list(SPECIALS[1:]),
    )
    spec = dataclasses.replace(fake_model.SPEC, vocab=PADDED)
    return Tokenizer(tokenizer, spec, eos_ids=(len(alphabet), len(alphabet) + 1) if ends else ())


TOKENIZER = make_tokenizer()
END, STOP, THINK, SPEAK, CALL, CALLED = (TOKENIZER.encode(text)[0] for text in SPECIALS)
GRAMMARS = Grammars(TOKENIZER)
"""One for all tests: the process that it starts takes a second."""
atexit.register(GRAMMARS.close)


def matcher_of(kind: str, source: str, thinking: Thinking | None = None) -> GrammarMatcher:
    return GRAMMARS.matcher(Constraint(kind, source), thinking)


def allowed(matcher: GrammarMatcher, vocab: int = PADDED) -> set[int] | None:
    """Ids that may come next; None for all."""
    mask = np.zeros(mask_words(vocab), dtype=np.int32)
    if not matcher.fill(mask):
        return None
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab]
    return {int(token) for token in np.flatnonzero(bits)}


def ids(text: str) -> list[int]:
    """The ids of `text`; special tokens in it are recognized."""
    return TOKENIZER.encode(text)


def takes(kind: str, source: str, text: str | Sequence[int]) -> bool:
    """Whether `text`, every token of which the mask must have allowed, is whole by the grammar."""
    matcher = matcher_of(kind, source)
    for token in ids(text) if isinstance(text, str) else text:
        if token not in (allowed(matcher) or ()):
            return False
        matcher.push(token)
    return matcher.finished or END in (allowed(matcher) or ())


def drawn(matcher: GrammarMatcher, chance: random.Random, most: int = 4000) -> str:
    """A text that the guide allows, by chance; closing brackets and quotes are liked, so that it ends."""
    liked = set(ids('"]},'))
    text: list[int] = []
    for _ in range(most):
        may = sorted(allowed(matcher) or ())
        ends = [token for token in may if token in liked or token in matcher.ends]
        token = chance.choice(ends if ends and chance.random() < 0.4 else may)
        if token in matcher.ends:
            break
        text.append(token)
        matcher.push(token)
        if matcher.finished:
            break
    else:
        raise AssertionError("the text does not end")
    return TOKENIZER.decode(text)
