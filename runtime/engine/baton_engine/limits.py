"""What one engine may take on: the numbers that its scheduler decides by."""

from __future__ import annotations

from dataclasses import dataclass


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
