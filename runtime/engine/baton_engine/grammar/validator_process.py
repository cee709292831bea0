"""
The process that validates constraints: `python -m baton_engine.grammar.validator_process`, with frames on
stdin and stdout.

Compilation cannot be interrupted, and the cost of a hostile constraint is unknown in advance: llguidance
needs 7 minutes for a JSON schema of 1,400 bytes. A process can be killed at any time. Each validation has a
limit of processor time, and the process has a limit of memory. The worker compiles valid constraints again.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from baton_engine.grammar import texts

LENGTH_BYTES = 4

STEPS = 48
"""Number of random tokens to generate, which shows the cost of masks. Restarts after each end."""

MASK_LIMIT_S = 0.1
"""Maximum processor seconds for one mask, because all requests of the worker wait for the slowest."""

MEMORY_LIMIT = 512 * 2**20
"""Maximum additional bytes of memory after the start."""

ENDLESS = "it has a reference that leads back to itself, and to nothing else"
"""What llguidance calls NoExtensionBias."""

LIMITS = LLParserLimits(
    max_items_in_row=20_000, step_max_items=500_000, max_lexer_states=50_000, verbose_errors=False
)
"""Limits of llguidance. Every optional property that may come next needs four items of a row."""


class TokenizerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame: the model's tokenizer."""

    definition: str
    """JSON of the library `tokenizers`."""
    vocab: int
    eos_ids: list[int]


class ValidationRequest(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    source: str
    seconds: float
    """Limit of processor time."""


class ValidationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The grammar to compile, or the reason why the constraint is invalid."""

    grammar: str = ""
    reason: str = ""


def make_tokenizer(tokenizer_spec: TokenizerSpec) -> LLTokenizer:
    return LLTokenizer(
        tokenizer_spec.definition, n_vocab=tokenizer_spec.vocab, eos_token=tokenizer_spec.eos_ids
    )


def special_tokens(tokenizer_spec: TokenizerSpec, tokenizer: LLTokenizer) -> dict[str, int]:
    """Return the ids of the tokens that llguidance treats as special, by their text."""
    added = json.loads(tokenizer_spec.definition).get("added_tokens") or []
    return {token["content"]: token["id"] for token in added if tokenizer.is_special_token(token["id"])}


def validate(request: ValidationRequest, tokenizer: LLTokenizer, special: dict[str, int]) -> ValidationResult:
    """Compile a constraint and generate random tokens with it."""
    try:
        grammar = texts.grammar(request.kind, request.source, special)
    except texts.TextError as error:
        return ValidationResult(reason=str(error))
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        return ValidationResult(reason=matcher.get_error())
    reason = _walk(matcher, tokenizer.vocab_size)
    return ValidationResult(reason=reason) if reason else ValidationResult(grammar=grammar)


def _walk(matcher: LLMatcher, vocab: int) -> str:
    """Generate random tokens. Returns the reason of a failure, or an empty string."""
    chance = random.Random(0)
    mask = np.zeros(-(-vocab // 32) * 4, dtype=np.uint8)
    for step in range(STEPS):
        began = time.process_time()
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        seconds = time.process_time() - began
        if matcher.is_error():
            reason = matcher.get_error()
            return ENDLESS if "NoExtensionBias" in reason else reason
        if seconds > MASK_LIMIT_S:
            return f"it is too complex: one mask takes {seconds * 1000:.0f} ms"
        filled = np.flatnonzero(mask)
        if not len(filled):
            return "it matches no text" if step == 0 else "it has a prefix that no text can continue"
        byte = int(filled[chance.randrange(len(filled))])
        bits = [bit for bit in range(8) if mask[byte] >> bit & 1]
        if not matcher.consume_token(byte * 8 + chance.choice(bits)):
            return matcher.get_error()
        if matcher.is_stopped():
            matcher.reset()
    return ""


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Read one frame; None at the end of the stream."""
    header = stream.read(LENGTH_BYTES)
    if len(header) < LENGTH_BYTES:
        return None
    length = int.from_bytes(header)
    body = stream.read(length)
    return body if len(body) == length else None


def write_frame(stream: IO[bytes], message: msgspec.Struct) -> None:
    body = msgspec.msgpack.encode(message)
    stream.write(len(body).to_bytes(LENGTH_BYTES) + body)
    stream.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker stops this process by closing stdin
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    first = read_frame(requests)
    if first is None:
        return
    tokenizer_spec = msgspec.msgpack.decode(first, type=TokenizerSpec)
    tokenizer = make_tokenizer(tokenizer_spec)
    special = special_tokens(tokenizer_spec, tokenizer)
    _limit_memory()
    write_frame(answers, ValidationResult())  # ready
    while (frame := read_frame(requests)) is not None:
        request = msgspec.msgpack.decode(frame, type=ValidationRequest)
        signal.setitimer(signal.ITIMER_PROF, request.seconds)
        result = validate(request, tokenizer, special)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        write_frame(answers, result)


def _limit_memory() -> None:
    """Limit the address space. Without /proc, only the time is limited."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY_LIMIT
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
