"""What a worker is to those who choose among workers: a role, an address, and the load it reports."""

from __future__ import annotations

import enum

import msgspec


class Role(enum.StrEnum):
    """What a worker does with a prompt."""

    BOTH = "both"
    """Computes prompts and generates: a whole server by itself."""
    PREFILL = "prefill"
    """Computes prompts for decode workers and keeps the blocks until they were pulled."""
    DECODE = "decode"
    """Generates; has prompts computed by a prefill worker, or computes them where that is better."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """
    What `GET /load` answers, and what a prefill worker's heartbeat carries.

    Counts are of this moment; rates are moving averages over about ten seconds.
    """

    role: Role
    model: str
    """The name that stands in answers."""
    names: tuple[str, ...] = ()
    """Every name that requests may use, if there is more than `model`."""
    max_model_len: int = 0
    """Most tokens of prompt and answer together; 0 if it does not say."""
    running: int = 0
    """Requests in the batch."""
    queued: int = 0
    """Requests admitted by the API but not yet in the batch."""
    queued_tokens: int = 0
    """Prompt tokens that have still to be computed, of all requests."""
    step_s: float = 0.0
    """Seconds of a step in which requests generate, on average."""
    free_blocks: int = 0
    """KV blocks that a new request could have: free ones and cached ones that nobody uses."""
    total_blocks: int = 0
    block_size: int = 16
    draining: bool = False
    """No new work, please; what runs is being finished."""
    control: str = ""
    """`host:port` of the prefill control server; empty for a worker that has none."""
    epoch: str = ""
    """New at every start of the process: what was known of an earlier epoch is void."""
    compatibility: str = ""
    """The digest of `baton_api.messages.Hello`: only workers with equal ones can be a pair."""
    kv_events: str = ""
    """Where `baton_api.kv_events` are published, such as tcp://127.0.0.1:5557; empty if nowhere."""
    kv_replay: str = ""
    """Where they can be asked for again."""
