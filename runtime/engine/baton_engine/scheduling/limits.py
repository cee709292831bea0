"""
Limits of one engine, and the check whether a request fits them at all.

The check reads the request and the engine's sizes only, so it can be made before the request is queued.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton_api.errors import ContextTooLong, InvalidRequest, PromptTooLarge
from baton_engine.requests import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """All of them are decided at start; see `baton_engine.settings` for what they mean to a user."""

    max_model_len: int
    """Most tokens of one sequence, prompt and output together."""
    chunk_tokens: int = 512
    """Most tokens of one pass. Rows that generate always take part; prompts share what they leave."""
    mixed_chunk_tokens: int = 0
    """Most prompt tokens of a pass in which other requests generate; 0 is no bound of its own."""
    max_running: int = 64
    """Most requests in the batch, those whose prompt is being fetched included."""
    max_queued: int = 4096
    """Requests that may wait; one more is refused."""
    local_prefill_tokens: int = 64
    """A prompt with no more than this many missing tokens is computed here even if it could be fetched."""
    quarantine_limit: float = 0.25
    """Share of the blocks that may be quarantined before the process has to be restarted."""

    def prompt_tokens(self, generating: int) -> int:
        """What a pass has for prompts beside `generating` requests with one token each; may be negative."""
        left = self.chunk_tokens - generating
        return min(left, self.mixed_chunk_tokens) if generating and self.mixed_chunk_tokens else left


def check(request: Request, *, vocab: int, max_model_len: int, blocks: int, block_size: int) -> None:
    """
    Raise InvalidRequest, ContextTooLong or PromptTooLarge for what no waiting would make fit.

    Ids beyond the vocabulary are looked for here, since they would break the pass of everybody in it.
    """
    length = len(request.prompt)
    if not length:
        raise InvalidRequest("The prompt has no tokens.", param="prompt")
    generated = 1 if request.generates else 0
    if length + generated > max_model_len:
        raise ContextTooLong(length, generated, max_model_len, param="prompt")
    if max(request.prompt) >= vocab or min(request.prompt) < 0:
        raise InvalidRequest(f"The prompt has token ids outside of 0 to {vocab - 1}.", param="prompt")
    for token, _ in request.sampling.logit_bias:
        if not 0 <= token < vocab:
            raise InvalidRequest(
                f"logit_bias names token {token}, outside of 0 to {vocab - 1}.", param="logit_bias"
            )
    needed = -(-length // block_size)
    if needed > blocks:
        raise PromptTooLarge(needed, blocks, block_size)
