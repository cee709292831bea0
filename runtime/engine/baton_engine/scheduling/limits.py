"""
Limits of one engine, and the check whether a request can ever be served.

The check depends only on the request and the engine's sizes, so it runs before the request is queued.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton_api.errors import ContextTooLong, InvalidRequest, PromptTooLarge
from baton_engine.requests import Request

MOST_DRAFTED = 256
"""Maximum tokens of a pass with draft tokens, unless there are more sequences. Their logits take memory, and
on a GPU the pass should fit a captured one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits that are fixed at startup. `baton_engine.settings` documents them for users."""

    max_model_len: int
    """Maximum tokens of a sequence, prompt and output together."""
    chunk_tokens: int = 512
    """Maximum tokens of a pass. Generating sequences always take part; prompts share the rest."""
    mixed_chunk_tokens: int = 0
    """Maximum prompt tokens of a pass with generating sequences. 0 disables this limit."""
    max_running: int = 64
    """Maximum requests in the batch, including those whose prompt is being fetched."""
    max_queued: int = 4096
    """Maximum queued requests. Further requests are rejected."""
    local_prefill_tokens: int = 64
    """Prompts with at most this many missing tokens are computed locally instead of being fetched."""
    last_chunk_tokens: int = 0
    """Least tokens of the parts into which an exported prompt's last chunk is halved. 0: it stays whole."""
    whole_prompts: bool = False
    """Whether a prompt is computed in one pass, because an encoder attends to all tokens. A pass then has at
    least the longest prompt's tokens."""
    speculation_tokens: int = 0
    """Maximum draft tokens of a generating sequence in a pass. 0 disables speculation."""
    overlap: bool = False
    """Whether decode passes are launched before the host has read the tokens of the last one."""
    quarantine_limit: float = 0.25
    """Fraction of quarantined blocks above which the process must be restarted."""

    @property
    def results(self) -> int:
        """Maximum tokens of a pass whose logits are needed: one of each sequence, and draft tokens."""
        drafted = min(MOST_DRAFTED, self.max_running * (1 + self.speculation_tokens))
        return max(self.max_running, drafted)

    def prompt_tokens(self, generating: int) -> int:
        """Return the tokens of a pass for prompts, besides `generating` sequences; may be negative."""
        most = max(self.chunk_tokens, self.max_model_len) if self.whole_prompts else self.chunk_tokens
        left = most - generating
        return min(left, self.mixed_chunk_tokens) if generating and self.mixed_chunk_tokens else left


def check(request: Request, *, vocab: int, max_model_len: int, blocks: int, block_size: int) -> None:
    """
    Raise InvalidRequest, ContextTooLong or PromptTooLarge for a request that can never be served.

    Rejects ids outside the vocabulary, because they would break the pass for all its requests.
    """
    length = len(request.prompt)
    if not length:
        raise InvalidRequest("The prompt has no tokens.", param="prompt")
    generated = 1 if request.generates else 0
    if length + generated > max_model_len:
        raise ContextTooLong(length, generated, max_model_len, param="prompt")
    if max(request.prompt) >= vocab or min(request.prompt) < 0:
        raise InvalidRequest(f"The prompt has token ids outside 0 to {vocab - 1}.", param="prompt")
    for token, _ in request.sampling.logit_bias:
        if not 0 <= token < vocab:
            raise InvalidRequest(
                f"Invalid 'logit_bias': token id {token} is outside 0 to {vocab - 1}.", param="logit_bias"
            )
    needed = -(-length // block_size)
    if needed > blocks:
        raise PromptTooLarge(needed, blocks, block_size)
