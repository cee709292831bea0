"""
Constraints and thoughts to guides: a constraint is compiled once, each answer has a guide of its own.

A constraint comes from outside and may be made to do harm. It has a limit of size; it is tried out in
another process, which has limits of time and memory; what fell through is remembered, so that it costs
nothing the next time. All of it may take a while: not for the event loop, and not for the engine's thread.
Threads of their own do it, so that slow constraints delay only requests with constraints that are new.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from baton_api import limits
from baton_api.errors import INVALID_VALUE, BatonError, InternalError, InvalidRequest, Overloaded
from baton_api.sampling import Constraint, Thinking
from baton_engine.grammar import validator_process
from baton_engine.grammar.matchers import LLGuidanceMatcher, ThinkingMatcher
from baton_engine.grammar.validator import QUEUE_S, ConstraintValidator
from baton_engine.grammar.validator_process import TokenizerSpec
from baton_engine.model.tokenizer import Tokenizer
from baton_engine.requests import GrammarMatcher

log = logging.getLogger(__name__)

COMPILE_S = 2.0
"""Processor time for compiling one constraint and for its first masks."""

THREADS = 4
"""That compile constraints. Trials are made one at a time; more threads would only wait."""

CACHE_LIMIT = 128
"""Constraints that are remembered, those that fell through included."""

REASON_LIMIT = 400
"""Characters of what is wrong with a constraint."""


class Grammars:
    """One worker's constraints. Any thread may ask; nothing is loaded before somebody does."""

    def __init__(
        self, tokenizer: Tokenizer, *, compile_s: float = COMPILE_S, queue_s: float = QUEUE_S
    ) -> None:
        """`queue_s` is how long `prepare` waits for a thread."""
        self._tokenizer = tokenizer
        self._queue_s = queue_s
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammars")
        self._waiting = 0
        """Calls of `prepare` that are not answered."""
        self.validator = ConstraintValidator(self._words, compile_s)
        self._lock = threading.Lock()
        self._futures: OrderedDict[bytes, Future[LLMatcher]] = OrderedDict()
        self._loading = threading.Lock()
        self._loaded: LLTokenizer | None = None

    def check(self, constraint: Constraint | None) -> None:
        """Compile, or find compiled. Raises InvalidRequest, or Overloaded if too many are being tried out."""
        if constraint is not None:
            self._compiled(constraint)

    def matcher(self, constraint: Constraint | None, thinking: Thinking | None) -> GrammarMatcher:
        """A guide at its start. Raises as `check` does."""
        return self.matchers(constraint, thinking)()

    def matchers(
        self, constraint: Constraint | None, thinking: Thinking | None
    ) -> Callable[[], GrammarMatcher]:
        """What gives a fresh guide at each call, at once and on any thread. Raises as `check` does."""
        if thinking is not None and not thinking.end:
            raise ValueError("A thought without an end would never come to the answer.")
        if constraint is None:
            if thinking is None:
                raise ValueError("Neither a constraint nor a thought: there is nothing to guide.")
            return lambda: ThinkingMatcher(thinking, None)
        compiled, ends = self._compiled(constraint), self._tokenizer.eos_ids

        def answer() -> GrammarMatcher:
            return LLGuidanceMatcher(compiled, ends)

        return answer if thinking is None else lambda: ThinkingMatcher(thinking, answer)

    async def prepare(
        self, constraint: Constraint | None, thinking: Thinking | None
    ) -> Callable[[], GrammarMatcher]:
        """
        `matchers` for the event loop. What has been compiled is there at once.

        Raises as `check` does, and Overloaded if no thread is free in time.
        """
        if constraint is None or self._is_known(constraint):
            return self.matchers(constraint, thinking)
        context = contextvars.copy_context()  # the log's lines name the request
        compiling = self._pool.submit(context.run, self.matchers, constraint, thinking)
        answer = asyncio.wrap_future(compiling)
        self._waiting += 1
        try:
            await asyncio.wait((answer,), timeout=self._queue_s)
            if compiling.cancel():
                raise Overloaded(self._waiting, THREADS, retry_after=5, what="constraints")
            return await answer
        except asyncio.CancelledError:
            answer.cancel()  # one that no thread has begun is never begun
            raise
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End the process in which constraints are tried out."""
        self.validator.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _is_known(self, constraint: Constraint) -> bool:
        """Whether `constraint` has been compiled, or has fallen through."""
        with self._lock:
            entry = self._futures.get(_key(constraint.kind, constraint.source.encode(errors="surrogatepass")))
        return entry is not None and entry.done()

    def _compiled(self, constraint: Constraint) -> LLMatcher:
        if not self._tokenizer.eos_ids:
            raise _refused("this model has no end of sequence, by which an answer could say that it is whole")
        try:
            source = constraint.source.encode()
        except UnicodeEncodeError as error:
            raise _refused("it has half of a surrogate pair, which is no character") from error
        if len(source) > limits.CONSTRAINT.most:
            raise _refused(
                f"it has {len(source)} bytes, more than the {limits.CONSTRAINT.most} that there can be"
            )
        key = _key(constraint.kind, source)
        with self._lock:
            entry = self._futures.get(key)
            mine = entry is None
            if entry is None:
                entry = self._futures[key] = Future()
                if len(self._futures) > CACHE_LIMIT:
                    self._futures.popitem(last=False)
            self._futures.move_to_end(key)
        if mine:
            self._compile(constraint, entry)
            if isinstance(entry.exception(), Exception) and not isinstance(entry.exception(), InvalidRequest):
                with self._lock:  # it may do better next time
                    if self._futures.get(key) is entry:
                        del self._futures[key]
        try:
            return entry.result()
        except InvalidRequest as error:
            raise _refused(str(error)) from error  # an exception of its own for each request

    def _compile(self, constraint: Constraint, entry: Future[LLMatcher]) -> None:
        try:
            entry.set_result(self._try(constraint))
        except BatonError as error:
            entry.set_exception(error)
        except Exception:
            log.exception("A constraint could not be tried out.")
            entry.set_exception(InternalError())

    def _try(self, constraint: Constraint) -> LLMatcher:
        began = time.monotonic()
        tokenizer = self._load()
        result = self.validator.validate(constraint.kind, constraint.source)
        if result.reason:
            log.info("A constraint of kind %s was refused: %s", constraint.kind, _short(result.reason))
            raise InvalidRequest(_short(result.reason))
        matcher = LLMatcher(tokenizer, result.grammar, log_level=0, limits=validator_process.LIMITS)
        if matcher.is_error():
            raise InvalidRequest(_short(matcher.get_error()))
        # The first mask takes a millisecond more than others; its traces are copied with the matcher.
        mask = np.zeros(-(-self._tokenizer.vocab_size // 32), dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        log.debug("A constraint of kind %s took %.3f s.", constraint.kind, time.monotonic() - began)
        return matcher

    def _load(self) -> LLTokenizer:
        with self._loading:
            if self._loaded is None:
                began = time.monotonic()
                self._loaded = validator_process.make_tokenizer(self._words())
                log.info("The tokenizer for constraints took %.1f s.", time.monotonic() - began)
            return self._loaded

    def _words(self) -> TokenizerSpec:
        tokenizer = self._tokenizer
        return TokenizerSpec(
            definition=tokenizer.definition, vocab=tokenizer.vocab_size, eos_ids=list(tokenizer.eos_ids)
        )


def _key(kind: str, source: bytes) -> bytes:
    return hashlib.sha256(kind.encode() + b"\0" + source).digest()


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"The constraint cannot be used: {reason}", code=INVALID_VALUE)


def _short(reason: str) -> str:
    reason = " ".join(reason.replace("<non-verbose/>", "").split())
    return reason if len(reason) <= REASON_LIMIT else reason[: REASON_LIMIT - 1] + "…"
