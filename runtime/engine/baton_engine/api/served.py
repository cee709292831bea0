"""Everything that one worker's API serves, assembled at startup."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from baton_api.keys import Keys
from baton_api.workers import Load
from baton_engine.api.chat.format import ChatFormat, chat_format_of
from baton_engine.api.exchange import History, new_history
from baton_engine.api.http import RequestDrain
from baton_engine.api.parameters import Defaults, Vocabulary
from baton_engine.api.running import Running
from baton_engine.client import AsyncEngine
from baton_engine.grammar.grammars import Grammars
from baton_engine.metrics.exposition import WorkerMetrics
from baton_engine.metrics.tracing import WorkerTracing
from baton_engine.model.embedder import Embedder, Unable
from baton_engine.model.tokenizer import Tokenizer
from baton_engine.requests import RemotePrefill
from baton_engine.settings import WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One model behind one engine."""

    names: tuple[str, ...]
    """What clients may call the model; the first is the one in answers."""
    tokenizer: Tokenizer
    grammars: Grammars
    engine: AsyncEngine
    max_model_len: int
    settings: WorkerSettings
    metrics: WorkerMetrics
    load: Callable[[], Load]
    ready: Callable[[], str | None] = lambda: None
    """None, or why this worker should get no requests."""
    remote: Callable[[str, str, str], RemotePrefill] | None = None
    """(prefill address, ticket, request id) -> what brings the prompt; None where there is no such role."""
    tracing: WorkerTracing | None = None
    """Makes this worker's spans, if any are wanted."""
    keys: Keys = field(default_factory=Keys)
    """Who may use it."""
    defaults: Defaults = field(default_factory=Defaults)
    embedder: Embedder | Unable = field(default_factory=lambda: Unable("nothing is known of its pooling"))
    """How the model makes vectors, or why it makes none."""
    hidden: int = 0
    """Numbers in a vector, as the model makes it."""
    generates: bool = True
    """Whether the model has a head, without which nothing that it says means anything."""
    created: int = field(default_factory=lambda: int(time.time()))
    drain: RequestDrain = field(default_factory=RequestDrain)
    history: History = field(default_factory=new_history)
    running: Running = field(default_factory=Running)
    chat: ChatFormat = field(init=False)
    """How the model chats, as settings and tokenizer say."""

    def __post_init__(self) -> None:
        """Raises SetupError for settings that do not fit the model."""
        object.__setattr__(self, "chat", chat_format_of(self.tokenizer, self.settings))

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def vocabulary(self) -> Vocabulary:
        tokenizer = self.tokenizer
        return Vocabulary(tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.encode)

    def not_ready(self) -> str | None:
        """None, or why this worker should get no requests, draining included."""
        return "draining" if self.drain.draining else self.ready()
