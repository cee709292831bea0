"""
What of a request's sampling decides its first token, as two workers say it to each other, and back again.

The prefill worker draws that token: whatever could change it has to come along, and both directions stand
here together so that nothing is forgotten in one of them.
"""

from __future__ import annotations

from baton_api import messages
from baton_engine.requests import Constraint, SamplingParams, Thinking


def to_wire(sampling: SamplingParams) -> messages.Sampling:
    """What of `sampling` decides the first token."""
    constraint, thinking = sampling.constraint, sampling.thinking
    return messages.Sampling(
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        logprobs=sampling.logprobs,
        logprob_ids=list(sampling.logprob_ids),
        drawn=sampling.drawn,
        min_tokens=min(sampling.min_tokens, sampling.drawn + 1),
        stop_ids=sorted(sampling.stop_ids),
        allowed_ids=list(sampling.allowed_ids),
        bad_words=[list(word) for word in sampling.bad_words],
        constraint=None
        if constraint is None
        else messages.Constraint(kind=constraint.kind, source=constraint.source),
        thinking=None
        if thinking is None
        else messages.Thinking(start=list(thinking.start), end=list(thinking.end), budget=thinking.budget),
    )


def sampling_params(sampling: messages.Sampling) -> SamplingParams:
    """How the first token, and no other, is drawn."""
    constraint, thinking = sampling.constraint, sampling.thinking
    return SamplingParams(
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=tuple(sampling.logit_bias.items()),
        logprobs=sampling.logprobs,
        logprob_ids=tuple(sampling.logprob_ids),
        max_tokens=1,
        drawn=sampling.drawn,
        min_tokens=sampling.min_tokens,
        stop_ids=frozenset(sampling.stop_ids),
        allowed_ids=tuple(sampling.allowed_ids),
        bad_words=tuple(tuple(word) for word in sampling.bad_words),
        constraint=None if constraint is None else Constraint(constraint.kind, constraint.source),
        thinking=None
        if thinking is None
        else Thinking(tuple(thinking.start), tuple(thinking.end), thinking.budget),
    )
