"""
The settings of one worker process, each with its unit, default and reason.

Built once where the process starts and passed down; nothing else reads the environment. Each field is
a flag of `baton serve` (`--kv-cache-memory`) and the environment variable `BATON_<NAME>`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from baton_api.sizes import Bytes
from baton_api.workers import Role


class WorkerSettings(BaseSettings):
    """One worker."""

    model_config = SettingsConfigDict(
        env_prefix="BATON_",
        frozen=True,
        use_attribute_docstrings=True,
        extra="forbid",
        protected_namespaces=(),
    )

    model: str = "smollm2"
    """A Hugging Face folder, a .gguf file, a hub id, or the built-in name smollm2."""

    served_model_name: str = ""
    """The name clients use. Empty: the model as it was given, a path by its last part."""

    role: Role = Role.BOTH
    """both, prefill or decode."""

    name: str = ""
    """What the worker is called in logs, metrics and headers. Empty: the role and the port."""

    host: str = "127.0.0.1"
    """Address of the OpenAI API. Other machines can reach it only if this says so."""

    port: int = Field(default=8000, ge=0, le=65535)
    """Port of the OpenAI API; 0 takes a free one."""

    control_host: str = "127.0.0.1"
    """Address at which decode workers reach a prefill worker's control server."""

    control_port: int = Field(default=0, ge=0, le=65535)
    """Port of the control server; 0 takes a free one."""

    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: cuda if there is one."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of weights and KV cache. auto: bfloat16 where the processor computes in it, else float32."""

    threads: int = Field(default=0, ge=0)
    """CPU threads of one forward pass. 0: all cores this process may use."""

    max_model_len: int = Field(default=0, ge=0)
    """Most tokens of prompt and answer together. 0: the model's own context."""

    kv_cache_memory: Bytes = Field(default=0, ge=0)
    """Bytes for the KV cache. 0: a tenth of the memory that is free at start, at most 4 GiB on a CPU;
    nine tenths of what the weights leave free on a GPU."""

    chunk_tokens: int = Field(default=0, ge=0)
    """Most tokens of one forward pass: longer prompts are computed in chunks. 0: 512 on a CPU, where it
    bounds the pause that running streams see, 4096 on a GPU."""

    mixed_chunk_tokens: int = Field(default=0, ge=0)
    """Most prompt tokens of a forward pass in which other requests generate: a smaller chunk, for their sake.
    0: 128 on a CPU, chunk_tokens on a GPU."""

    max_running: int = Field(default=0, ge=0)
    """Most requests in one batch. 0: 64 on a CPU, 256 on a GPU."""

    max_queued: int = Field(default=4096, ge=1)
    """Requests that may wait; one more is refused with 503."""

    transfer: Literal["nixl", "loopback"] = "nixl"
    """How KV blocks move. loopback works within one process only and never stands in for nixl."""

    local_prefill_tokens: int = Field(default=64, ge=0)
    """A decode worker computes a prompt itself if no more than this many tokens of it are missing
    from its own cache: asking would take longer."""

    ticket_secret: str = ""
    """Shared by router and prefill workers; with it, a prefill worker wants a signed ticket. Set it by
    environment, not by flag, where others can list processes."""

    transfer_deadline_s: float = Field(default=30.0, gt=0)
    """Seconds that one read of KV blocks may take before it is given up and its blocks quarantined."""

    quarantine_limit: float = Field(default=0.25, gt=0, le=1)
    """Share of the KV blocks that may be quarantined before the process stops: a restart frees them."""

    drain_s: float = Field(default=60.0, ge=0)
    """Seconds that running requests get to finish after a SIGTERM."""

    api_key: str = ""
    """With it, /v1 wants `Authorization: Bearer <key>`."""
