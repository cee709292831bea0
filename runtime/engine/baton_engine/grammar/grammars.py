"""
Compilation of constraints to matchers: once per constraint, with a separate matcher for each answer.

Constraints come from clients and may be hostile. Their size is limited, and a separate process with limits of
time and memory validates them first. Results are cached, including failures. Compilation is slow and runs on
separate threads, so that it blocks neither the event loop nor the engine, and delays only requests with new
constraints. A tenant has one of the threads at a time, so that its constraints wait behind each other.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol
from weakref import WeakValueDictionary

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
"""Maximum processor seconds for the compilation of a constraint and its first masks."""

THREADS = 4
"""Number of threads that compile constraints. The validator processes one constraint at a time."""

CACHE_LIMIT = 128
"""Maximum number of cached constraints, including invalid ones."""

REASON_LIMIT = 400
"""Maximum characters of llguidance's error of a constraint."""

TOO_LARGE = re.compile(r"too (complex|big|large|many|deep)|max is|limit exceeded", re.IGNORECASE)
"""Matches errors that a smaller constraint does not have."""

SMALLER = (
    " Make it smaller: fewer alternatives, values and optional properties, lower bounds of lengths and "
    "repetitions, fewer levels; or ask for its parts in several requests."
)


class MatcherSource(Protocol):
    """Prepares constraints, in this process or another."""

    async def prepare(
        self, constraint: Constraint | None, thinking: Thinking | None, tenant: str = ""
    ) -> Callable[[], GrammarMatcher]:
        """
        Return a function that creates matchers, once the constraint is compiled, in the turn of `tenant`.

        Raises InvalidRequest, or Overloaded.
        """
        ...


class Grammars:
    """Compiler and cache of constraints. Thread-safe. The tokenizer is loaded for the first constraint."""

    def __init__(
        self, tokenizer: Tokenizer, *, compile_s: float = COMPILE_S, queue_s: float = QUEUE_S
    ) -> None:
        """`queue_s` is the maximum time that `prepare` waits for the tenant's turn, and for a thread."""
        self._tokenizer = tokenizer
        self._queue_s = queue_s
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammars")
        self._waiting = 0
        """Number of pending calls of `prepare`."""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By tenant."""
        self.validator = ConstraintValidator(self._tokenizer_spec, compile_s)
        self._lock = threading.Lock()
        self._futures: OrderedDict[bytes, Future[LLMatcher]] = OrderedDict()
        self._loading = threading.Lock()
        self._loaded: LLTokenizer | None = None

    def check(self, constraint: Constraint | None) -> None:
        """Compile a constraint unless it is cached. Raises InvalidRequest, or Overloaded."""
        if constraint is not None:
            self._compiled(constraint)

    def matcher(self, constraint: Constraint | None, thinking: Thinking | None) -> GrammarMatcher:
        """Return a new matcher. Raises as `check` does."""
        return self.matchers(constraint, thinking)()

    def matchers(
        self, constraint: Constraint | None, thinking: Thinking | None
    ) -> Callable[[], GrammarMatcher]:
        """Return a function that creates matchers; it is fast and thread-safe. Raises as `check` does."""
        if thinking is not None and not thinking.end:
            raise ValueError("`thinking.end` is empty: the reasoning would never end")
        if constraint is None:
            if thinking is None:
                raise ValueError("neither `constraint` nor `thinking` is set")
            return lambda: ThinkingMatcher(thinking, None)
        compiled, ends = self._compiled(constraint), self._tokenizer.eos_ids

        def answer() -> GrammarMatcher:
            return LLGuidanceMatcher(compiled, ends)

        return answer if thinking is None else lambda: ThinkingMatcher(thinking, answer)

    async def prepare(
        self, constraint: Constraint | None, thinking: Thinking | None, tenant: str = ""
    ) -> Callable[[], GrammarMatcher]:
        """
        Call `matchers` from the event loop. Returns immediately for a cached constraint.

        Raises as `check` does, and Overloaded if the turn of `tenant`, or a thread, does not come in time.
        """
        if constraint is None or self._is_cached(constraint):
            return self.matchers(constraint, thinking)
        if not tenant:
            return await self._on_thread(constraint, thinking)
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        self._waiting += 1
        try:
            async with asyncio.timeout(self._queue_s):
                await turn.acquire()
        except TimeoutError:
            raise self._overloaded() from None
        finally:
            self._waiting -= 1
        return await self._on_thread(constraint, thinking, turn)

    async def _on_thread(
        self, constraint: Constraint, thinking: Thinking | None, turn: asyncio.Lock | None = None
    ) -> Callable[[], GrammarMatcher]:
        """Compile on a thread. `turn` is released when the thread is free, even if nobody waits any more."""
        loop = asyncio.get_running_loop()
        context = contextvars.copy_context()  # log lines contain the request id
        compiling = self._pool.submit(context.run, self.matchers, constraint, thinking)
        if turn is not None:

            def ended(_: object) -> None:
                with suppress(RuntimeError):  # the loop is closed: nobody waits for a turn
                    loop.call_soon_threadsafe(turn.release)

            compiling.add_done_callback(ended)
        answer = asyncio.wrap_future(compiling)
        self._waiting += 1
        try:
            await asyncio.wait((answer,), timeout=self._queue_s)
            if compiling.cancel():
                raise self._overloaded()
            return await answer
        except asyncio.CancelledError:
            answer.cancel()  # has an effect only if no thread has started it
            raise
        finally:
            self._waiting -= 1

    def _overloaded(self) -> Overloaded:
        return Overloaded(self._waiting, THREADS, retry_after=5, what="constraints")

    def close(self) -> None:
        """Stop the validator process and the threads."""
        self.validator.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _is_cached(self, constraint: Constraint) -> bool:
        """Return whether `constraint` was compiled or found to be invalid."""
        with self._lock:
            entry = self._futures.get(_key(constraint.kind, constraint.source.encode(errors="surrogatepass")))
        return entry is not None and entry.done()

    def _compiled(self, constraint: Constraint) -> LLMatcher:
        if not self._tokenizer.eos_ids:
            raise _invalid("this model has no end-of-sequence token, which must end a constrained answer")
        try:
            source = constraint.source.encode()
        except UnicodeEncodeError as error:
            raise _invalid("it contains a lone surrogate, which is not a valid character") from error
        if len(source) > limits.CONSTRAINT.most:
            raise _invalid(f"it has {len(source)} bytes, the maximum is {limits.CONSTRAINT.most}")
        key = _key(constraint.kind, source)
        with self._lock:
            entry = self._futures.get(key)
            is_new = entry is None
            if entry is None:
                entry = self._futures[key] = Future()
                if len(self._futures) > CACHE_LIMIT:
                    self._futures.popitem(last=False)
            self._futures.move_to_end(key)
        if is_new:
            self._compile(constraint, entry)
            if isinstance(entry.exception(), Exception) and not isinstance(entry.exception(), InvalidRequest):
                with self._lock:  # the failure may be temporary
                    if self._futures.get(key) is entry:
                        del self._futures[key]
        try:
            return entry.result()
        except InvalidRequest as error:
            raise _invalid(str(error)) from error  # a separate exception for each request

    def _compile(self, constraint: Constraint, entry: Future[LLMatcher]) -> None:
        try:
            entry.set_result(self._try(constraint))
        except BatonError as error:
            entry.set_exception(error)
        except Exception:
            log.exception("The validation of a constraint failed.")
            entry.set_exception(InternalError())

    def _try(self, constraint: Constraint) -> LLMatcher:
        began = time.monotonic()
        tokenizer = self._load()
        result = self.validator.validate(constraint.kind, constraint.source)
        if result.reason:
            log.info("A constraint of kind %s was rejected: %s", constraint.kind, _short(result.reason))
            raise InvalidRequest(_short(result.reason))
        matcher = LLMatcher(tokenizer, result.grammar, log_level=0, limits=validator_process.LIMITS)
        if matcher.is_error():
            raise InvalidRequest(_short(matcher.get_error()))
        # The first mask takes an additional millisecond. Copies of the matcher share its result.
        mask = np.zeros(-(-self._tokenizer.vocab_size // 32), dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        log.debug("A constraint of kind %s took %.3f s.", constraint.kind, time.monotonic() - began)
        return matcher

    def _load(self) -> LLTokenizer:
        with self._loading:
            if self._loaded is None:
                began = time.monotonic()
                self._loaded = validator_process.make_tokenizer(self._tokenizer_spec())
                log.info("The tokenizer for constraints took %.1f s.", time.monotonic() - began)
            return self._loaded

    def _tokenizer_spec(self) -> TokenizerSpec:
        tokenizer = self._tokenizer
        return TokenizerSpec(
            definition=tokenizer.definition, vocab=tokenizer.vocab_size, eos_ids=list(tokenizer.eos_ids)
        )


def _key(kind: str, source: bytes) -> bytes:
    return hashlib.sha256(kind.encode() + b"\0" + source).digest()


def _invalid(reason: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid constraint: {reason}", code=INVALID_VALUE)


def _short(reason: str) -> str:
    reason = " ".join(reason.replace("<non-verbose/>", "").split())
    short = reason if len(reason) <= REASON_LIMIT else reason[: REASON_LIMIT - 1] + "…"
    return f"{short.removesuffix('.')}.{SMALLER}" if TOO_LARGE.search(reason) else short
