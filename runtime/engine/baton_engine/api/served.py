"""Everything that one worker's API serves, assembled at startup, and the chat format of its model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton_api.keys import Keys
from baton_api.workers import Load
from baton_engine.adapters import AdapterRegistry
from baton_engine.api.exchange import History, new_history
from baton_engine.api.http import RequestDrain
from baton_engine.api.parameters import Defaults, Vocabulary
from baton_engine.api.parsing.reasoning.formats import ReasoningFormat, format_of
from baton_engine.api.parsing.tools import families
from baton_engine.api.parsing.tools.family import ToolFamily
from baton_engine.api.parsing.tools.toolbox import Toolbox
from baton_engine.api.running import Running
from baton_engine.api.template.templates import Templates, templates_of
from baton_engine.client import AsyncEngine, EngineClient
from baton_engine.grammar.grammars import MatcherSource
from baton_engine.metrics.exposition import ApiMetrics, Sample
from baton_engine.model.embedder import Embedder, NoEmbeddings
from baton_engine.model.encoder import EncoderSpec
from baton_engine.model.tokenizer import Tokenizer
from baton_engine.requests import RemotePrefill
from baton_engine.settings import WorkerSettings
from baton_engine.tracing import WorkerTracing


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """The templates of a model, and its formats of reasoning and tool calls."""

    templates: Templates
    reasoning: ReasoningFormat | None
    """None if reasoning stays in the text."""
    tools: ToolFamily
    tokens: Mapping[str, int]
    """Ids of the tokens that grammars match as one, by their text."""

    def describes_tools(self, toolbox: Toolbox | None) -> bool:
        """Return whether messages must describe the tools, because the template would ignore them."""
        return self.tools is families.GENERIC and not self.templates.knows_tools(toolbox is not None)


def chat_format_of(tokenizer: Tokenizer, settings: WorkerSettings) -> ChatFormat:
    """
    Determine the chat format from the settings and, where they are empty, from the chat template.

    Raises SetupError for an invalid template or an unknown parser.
    """
    templates = templates_of(tokenizer, settings.chat_template)
    sources = list(templates.by_name.values())
    detected = next(filter(None, map(families.detect, sources)), "")
    return ChatFormat(
        templates=templates,
        reasoning=format_of(settings.reasoning_parser, sources, tokenizer.response_template),
        tools=families.family(settings.tool_call_parser or detected),
        tokens=tokenizer.added_tokens,
    )


class OtherProcesses:
    """What other processes of this worker know. This one has no others."""

    async def samples(self) -> list[Sample]:
        """The metrics of all."""
        return []

    async def requests(self) -> list[dict[str, Any]]:
        """The latest requests of all, as `Exchange.body`."""
        return []

    async def abort(self, names: Sequence[str] | None) -> int:
        """Abort the requests with these names, or all. Returns their number."""
        return 0

    async def adapters_changed(self) -> None:
        """Return when requests may name the adapters that are loaded now."""

    async def drain(self, seconds: float) -> None:
        """Return when none has a request, at most after `seconds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One model with its engine."""

    names: tuple[str, ...]
    """Names of the model in requests. Responses contain the first one."""
    tokenizer: Tokenizer
    grammars: MatcherSource
    engine: EngineClient
    max_model_len: int
    settings: WorkerSettings
    metrics: ApiMetrics
    load: Callable[[], Load]
    adapters: AdapterRegistry = field(default_factory=AdapterRegistry)
    """LoRA adapters, whose names requests use as models."""
    ready: Callable[[], str | None] = lambda: None
    """Returns the reason why the worker is not ready, or None."""
    remote: Callable[[str, str, str], RemotePrefill] | None = None
    """Creates the remote prefill of (prefill address, ticket, request id). None without the decode role."""
    tracing: WorkerTracing | None = None
    """Creates this worker's spans, if tracing is enabled."""
    keys: Keys = field(default_factory=Keys)
    """API keys."""
    admin_keys: Keys = field(default_factory=Keys)
    """Keys for administration."""
    defaults: Defaults = field(default_factory=Defaults)
    embedder: Embedder | NoEmbeddings = field(default_factory=lambda: NoEmbeddings("its pooling is unknown"))
    """Embedding configuration, or the reason why embeddings are not supported."""
    encoder: EncoderSpec | None = None
    """The model's encoder. None: a decoder."""
    hidden: int = 0
    """Dimensions of the model's embeddings."""
    generates: bool = True
    """Whether the model has a language model head and can generate text."""
    created: int = field(default_factory=lambda: int(time.time()))
    drain: RequestDrain = field(default_factory=RequestDrain)
    history: History = field(default_factory=new_history)
    others: OtherProcesses = field(default_factory=lambda: OtherProcesses())
    """The processes that serve the rest of the API, if there are any."""
    running: Running = field(default_factory=Running)
    chat: ChatFormat = field(init=False)
    """Chat format, from settings and tokenizer."""

    def __post_init__(self) -> None:
        """Determine the chat format. Raises SetupError for settings that do not fit the model."""
        object.__setattr__(self, "chat", chat_format_of(self.tokenizer, self.settings))

    @property
    def computing(self) -> AsyncEngine:
        """The engine, in the process that computes."""
        assert isinstance(self.engine, AsyncEngine)
        return self.engine

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def models(self) -> tuple[str, ...]:
        """Names that requests may use as `model`."""
        return (*self.names, *self.adapters.names)

    def answering(self, model: str | None) -> str:
        """Return the name of the model in the response to a checked request for `model`."""
        return self.name if model is None or model in self.names else model

    @property
    def vocabulary(self) -> Vocabulary:
        tokenizer = self.tokenizer
        return Vocabulary(tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.encode)

    def not_ready(self) -> str | None:
        """Return the reason why the worker is not ready (including draining), or None."""
        return "draining" if self.drain.draining else self.ready()
