"""Whether a request can be served at all, told from the request and the engine's sizes alone."""

from __future__ import annotations

from baton_api.errors import ContextTooLong, InvalidRequest, PromptTooLarge
from baton_engine.requests import Request


def check(request: Request, *, vocab: int, max_model_len: int, blocks: int, block_size: int) -> None:
    """
    Raise InvalidRequest, ContextTooLong or PromptTooLarge for what no waiting would make fit.

    Ids beyond the vocabulary are looked for here, since they would break the pass of everybody in it.
    """
    length = len(request.prompt)
    if not length:
        raise InvalidRequest("The prompt has no tokens.", param="prompt")
    following = 1 if request.draws else 0
    if length + following > max_model_len:
        raise ContextTooLong(length, following, max_model_len, param="prompt")
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
