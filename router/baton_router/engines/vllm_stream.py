"""
vLLM's streams on their way to the client: counted by token ids, and resumed by them.

The router asks for token ids (`return_token_ids`) and usage, counts with them, and removes what the client
did not ask for. A broken stream is resumed by token ids: another worker gets those of the prompt and of the
answer, and its chunks continue under the same id.

vLLM writes JSON without spaces, and inside a JSON string a quote is always escaped. So members are matched by
their bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from baton_api.errors import BatonError
from baton_http.sse import EventStream
from baton_router.engines.bodies import openai_error

_TOKENS = b',"token_ids":['
_PROMPT = b',"prompt_token_ids":['
_ERROR = b'data: {"error":'
_NO_CHOICES = b'"choices":[],'
_DONE = b"data: [DONE]"
_FINISHED = re.compile(rb'"finish_reason":"')
ABORTED = b'"finish_reason":"abort"'
"""vLLM's reason for an answer that it gave up, such as when it shuts down or loses blocks."""

_UNFINISHED = (
    b'data: {"error":{"message":"The worker ended the answer before it was complete.",'
    b'"type":"server_error","param":null,"code":500}}'
)
_TEXT = re.compile(rb'"(?:content|text|reasoning|reasoning_content)":"(?!")')
_TOOL_CALL = re.compile(rb'"tool_calls":\[\{')
_ROLE = re.compile(rb'"delta":\{"role":"assistant"(?:,"content":"")?\}')
_HEAD = re.compile(rb'^data: \{"id":"[^"]*","object":"[a-z._]*","created":[0-9]+,"model":"(?:[^"\\]|\\.)*"')
_CODE = re.compile(rb'"code":([0-9]{3})')
_PROMPT_TOKENS = re.compile(rb'(?<="prompt_tokens":)[0-9]+')
_COMPLETION_TOKENS = re.compile(rb'(?<="completion_tokens":)[0-9]+')
_CACHED_TOKENS = re.compile(rb'(?<="cached_tokens":)[0-9]+')


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Members of a stream that the client requested."""

    usage: bool = False
    """Whether it wants the usage at the end."""
    token_ids: bool = False
    """Whether it wants token ids."""


@dataclass(frozen=True, slots=True)
class VllmState:
    """The state from which another vLLM worker continues a stream."""

    prompt: tuple[int, ...]
    """Token ids of the prompt."""
    answer: tuple[int, ...]
    """Token ids of the answer whose text the client has."""
    head: bytes
    """The first bytes of every event: id, time of creation and model."""
    ending: bytes = b""
    """The end of the stream, if only that is missing."""
    tool_call: bool = False
    """Whether a tool call has begun; it cannot be continued."""
    cached: int | None = None
    """Cached tokens of the prompt at the first worker; None if unknown."""

    @property
    def passed(self) -> int:
        return len(self.answer)

    @property
    def tokens(self) -> list[int]:
        """The prompt of the worker that continues."""
        return [*self.prompt, *self.answer]


@dataclass(slots=True)
class _Progress:
    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    visible: int = 0
    """Leading tokens of the answer whose text has passed."""
    head: bytes = b""
    finished: bool = False
    tool_call: bool = False


class VllmStream(EventStream):
    """The events of one streamed answer."""

    __slots__ = (
        "_before",
        "_cached_before",
        "_counted",
        "_events",
        "_failure",
        "_options",
        "_progress",
        "cached",
    )

    def __init__(
        self, options: StreamOptions, before: VllmState | None = None, cached: int | None = None
    ) -> None:
        """
        `before` is the state from which this worker continues.

        `cached` are the prompt's tokens that the prefill worker had in its cache; None if unknown.
        """
        super().__init__()
        self._options = options
        self._before = before
        self._events = b""
        """The beginning of an event whose end has not arrived."""
        self._failure = b""
        """The worker's error, which ends the stream."""
        self._progress = _Progress()
        if before is not None:
            self._progress = _Progress(list(before.prompt), list(before.answer), before.passed, before.head)
            self.tokens = before.passed
        self._counted: int | None = None
        """Tokens of the answer by its usage, at its end."""
        self._cached_before = cached if before is None else before.cached
        self.cached: int | None = None
        """Cached tokens of the prompt, if the worker reports them at the end of the stream."""

    @property
    def prompt_tokens(self) -> list[int]:
        """Token ids of the prompt; empty before the first event."""
        return self._progress.prompt

    @property
    def generated(self) -> int | None:
        """Tokens that this worker has generated; None if it reports none, as of an answer with its prompt."""
        if not self._progress.prompt:
            return self._counted
        return len(self._progress.answer) - (self._before.passed if self._before else 0)

    @property
    def waiting(self) -> bool:
        return super().waiting or bool(self._events)

    @property
    def complete(self) -> bool:
        return not self._failure and super().complete

    @property
    def state(self) -> VllmState | None:
        """The state to resume from; None if the worker did not report tokens, or rejected the request."""
        progress = self._progress
        if not progress.prompt or not progress.head or _status(self._failure) < 500:
            return None
        ending = b"data: [DONE]\n\n" if progress.finished else b""
        if ending and self._options.usage:
            ending = self._usage_event() + ending
        return VllmState(
            tuple(progress.prompt),
            tuple(progress.answer[: progress.visible]),
            progress.head,
            ending,
            progress.tool_call,
            self._cached_before,
        )

    def push(self, piece: bytes) -> bytes:
        piece = self._events + piece if self._events else piece
        end = piece.rfind(b"\n\n") + 2
        if end < 2:
            self._events = piece
            return b""
        self._events = piece[end:]
        return super().push(b"".join([self._event(one) for one in piece[:end].split(b"\n\n")[:-1]]))

    def finish(self) -> bytes:
        rest, self._events = self._events, b""
        return super().push(rest) + super().finish()

    def error(self, error: BatonError) -> bytes:
        """The worker's own error in OpenAI's shape, if it reported one."""
        if not self._failure:
            return super().error(error)
        body = openai_error(_status(self._failure), self._failure.removeprefix(b"data: "))
        return self._apart() + b"data: " + body + b"\n\n"

    def _event(self, event: bytes) -> bytes:
        """One event as the client gets it; empty if the client does not."""
        if self._failure:
            return b""
        progress = self._progress
        if event.startswith(_ERROR):
            self._failure = event
            return b""
        # An answer that is aborted before its first token ends with [DONE] alone.
        if ABORTED in event or (event == _DONE and not progress.finished):
            self._failure = _UNFINISHED
            return b""
        if _NO_CHOICES in event:
            return self._usage(event)
        event, prompt = self._taken(event, _PROMPT)
        event, answer = self._taken(event, _TOKENS)
        if not progress.head:
            match = _HEAD.match(event)
            progress.head = match[0] if match else b""
        if prompt and self._before is None:
            progress.prompt = prompt
        progress.answer += answer
        self.tokens = len(progress.answer)
        progress.tool_call = progress.tool_call or _TOOL_CALL.search(event) is not None
        progress.finished = progress.finished or _FINISHED.search(event) is not None
        if progress.finished or _TEXT.search(event):
            progress.visible = self.tokens
        if self._before is not None:
            if _ROLE.search(event):
                return b""  # the client has it from the worker before
            event = self._renamed(event)
        return event + b"\n\n"

    def _taken(self, event: bytes, name: bytes) -> tuple[bytes, list[int]]:
        """Take the ids behind `name` out of an event, as vLLM sends it without them."""
        at = event.find(name)
        if at < 0:
            return event, []
        begin = at + len(name)
        end = event.index(b"]", begin)
        ids = [int(one) for one in event[begin:end].split(b",")] if end > begin else []
        if not self._options.token_ids:
            event = event[: begin - 1] + b"null" + event[end + 1 :]
        return event, ids

    def _usage(self, event: bytes) -> bytes:
        """The event of the usage, which counts the whole answer of all its workers."""
        counted = _COMPLETION_TOKENS.search(event)
        self._counted = int(counted[0]) if counted is not None else self._counted
        if self._counted is not None and not self._progress.prompt:
            self.tokens = self._counted
        if self._cached_before is not None:
            event = with_cached_tokens(event, self._cached_before)
        cached = _CACHED_TOKENS.search(event)
        if cached is not None and self._before is None:
            self.cached = int(cached[0])
        elif cached is not None and self._before is not None:  # its prompt has the answer so far
            event = with_cached_tokens(event, min(int(cached[0]), len(self._before.prompt)))
        if not self._options.usage:
            return b""
        if self._before is not None:
            event = self._renamed(event)
            event = _PROMPT_TOKENS.sub(b"%d" % len(self._before.prompt), event, count=1)
            event = _COMPLETION_TOKENS.sub(b"%d" % len(self._progress.answer), event, count=1)
        return event + b"\n\n"

    def _read_usage(self, piece: bytes) -> None:
        """The token ids have the count."""

    def _renamed(self, event: bytes) -> bytes:
        """A resumed event under the id and the time of the first worker's events."""
        match = _HEAD.match(event)
        return self._progress.head + event[match.end() :] if match else event

    def _usage_event(self) -> bytes:
        prompt, answer = len(self._progress.prompt), len(self._progress.answer)
        usage = b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % (
            prompt,
            prompt + answer,
            answer,
        )
        return self._progress.head + b',"choices":[],"usage":%b}\n\n' % usage


def with_cached_tokens(body: bytes, cached: int) -> bytes:
    """
    Set the cached tokens in the usage of an answer, if the worker reports them.

    A decode worker of some versions counts the blocks that it has read as cached.

    >>> with_cached_tokens(b'{"usage":{"prompt_tokens_details":{"cached_tokens":96}}}', 16)
    b'{"usage":{"prompt_tokens_details":{"cached_tokens":16}}}'
    """
    return _CACHED_TOKENS.sub(b"%d" % cached, body, count=1)


def _status(failure: bytes) -> int:
    """The status of an error event; 500 without one."""
    match = _CODE.search(failure)
    return int(match[1]) if match else 500
