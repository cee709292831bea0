"""
Conversion between text and token ids, including token by token for streams.

The library `tokenizers` encodes and decodes, without clean-ups, so that streamed and complete text are equal.
`transformers` reads folders, once: `tokenizer_cache` stores the result, because importing transformers takes
seconds.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Sequence
from functools import cache, cached_property
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from baton_api.errors import SetupError
from baton_engine.machine import cache_folder
from baton_engine.model import gguf_tokenizer, tokenizer_cache
from baton_engine.model.checkpoint import Checkpoint, read_json
from baton_engine.model.config import token_ids
from baton_engine.model.tokenizer_cache import Definition
from baton_engine.spec import ModelSpec

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
"""Texts come one at a time, so threads of the library would only make forks unsafe."""

BREAK = "\ue0b1"
"""A character for private use that parts a control token, and is no token of the model."""
SPACE_MARK = "\u2581"
"""SentencePiece's visible space."""
COLLAPSED = 8
"""Where white space collapses, a token stands for at most so many times the characters of the longest."""
HELD_LIMIT = 64
"""Maximum buffered tokens that do not form a character. Each step decodes the whole buffer, so it is bounded;
at the limit, incomplete characters are emitted."""


class TextStream:
    """Incremental detokenization of one answer."""

    def __init__(self, backend: Backend, skipped: Container[int]) -> None:
        """Tokens in `skipped` produce no text."""
        self._backend = backend
        self._skipped = skipped
        self._begin(after=[])

    def _begin(self, after: list[int]) -> None:
        """Restart the stream. The tokens `after` are already emitted and determine leading spaces."""
        self._stream = DecodeStream(ids=after, skip_special_tokens=False)
        self._tokens = after
        self._shown = len(self._text())
        self._pending = 0

    def _text(self) -> str:
        return str(self._backend.decode(self._tokens, skip_special_tokens=False))

    def push(self, token: int) -> str:
        """Return the text that `token` completes; empty while a character is incomplete."""
        if token in self._skipped:
            return ""
        self._tokens.append(token)
        try:
            text: str | None = self._stream.step(self._backend, token)
        except Exception:  # tokenizers raises it if later byte tokens change the text of earlier ones
            return self.flush()
        if text is None:
            self._pending += 1
            return self.flush() if self._pending >= HELD_LIMIT else ""
        self._pending = 0
        self._shown += len(text)
        return text

    def flush(self) -> str:
        """Return the buffered text at the end of the answer: an incomplete character."""
        rest = self._text()[self._shown :]
        self._begin(after=self._tokens[-1:])
        return rest


class Tokenizer:
    """Tokenizer and chat templates of one model."""

    def __init__(self, tokenizer: Any, spec: ModelSpec, eos_ids: Sequence[int] = ()) -> None:
        """
        Wrap a `Definition`, or a fast tokenizer of transformers.

        `eos_ids` precede those of the spec and the tokenizer.
        """
        self._tokenizer = tokenizer
        self._backend: Backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._byte_level = "ByteLevel" in _kinds(self._backend.decoder)
        keeps_bytes = self._byte_level or getattr(self._backend.model, "byte_fallback", False)
        longest = max(map(len, self._backend.get_vocab()), default=1)
        self._characters = longest if keeps_bytes else COLLAPSED * longest
        """Maximum characters of a text that a token stands for."""
        added = self._backend.get_added_tokens_decoder()
        self._added = {number: token.content for number, token in added.items()}
        self._special = frozenset(number for number, token in added.items() if token.special)
        eos = tokenizer.eos_token_id
        ends = (*eos_ids, *spec.eos_ids, *(() if eos is None else (eos,)))
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(end for end in ends if end < spec.vocab))
        """Token ids that end an answer."""
        self.bos_id: int | None = spec.bos_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        self.vocab_size = spec.vocab
        """Number of token ids of the model; the tokenizer may define fewer."""

    @property
    def definition(self) -> str:
        """The tokenizer as JSON, as the library `tokenizers` serializes it."""
        return str(self._backend.to_str())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. Recognizes special tokens in it."""
        # `encode` would hold the GIL: a text of 4 MB takes seconds.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of `text` without special tokens. Control tokens end at each `BREAK` in it."""
        (encoding,) = self._breaking.encode_batch_fast([text], add_special_tokens=False)
        gap = self._breaking.token_to_id(BREAK)
        return [token for token in encoding.ids if token != gap]

    @cached_property
    def _breaking(self) -> Backend:
        """The tokenizer with `BREAK` as one more token."""
        backend = Backend.from_str(self.definition)
        backend.add_special_tokens([AddedToken(BREAK, special=True, normalized=False)])
        return backend

    def broken(self, text: str, *, special_only: bool = False) -> str:
        """
        Return `text` with a `BREAK` in each control token: in each added token that is not white space.

        `special_only` leaves out those that are not special, such as the marks of reasoning.
        """
        pattern = self._special_pattern if special_only else self._added_pattern
        return pattern.sub(lambda match: f"{match[0][:1]}{BREAK}{match[0][1:]}", text)

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return _any_of([self._added[number] for number in self._special])

    @cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        return _any_of(list(self._added.values()))

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Return the token ids of two texts with the special tokens of a pair, and the tokens' types."""
        (encoding,) = self._backend.encode_batch_fast([(first, second)])
        return encoding.ids, encoding.type_ids

    def least_tokens(self, characters: int) -> int:
        """
        Return the least number of tokens of a text with this number of characters.

        A lower bound, except for tokenizers that collapse white space or unknown words: see `COLLAPSED`.
        """
        return -(-characters // self._characters)

    def offsets(self, text: str) -> list[int]:
        """
        Return, for each id of `encode(text)`, the offset in `text` at which its token begins.

        A token that begins within a character has the offset of that character. A token that was added before
        the text has 0; one that was added after it has the length of the text.
        """
        (encoding,) = self._backend.encode_batch([text])
        starts: list[int] = []
        edge = 0
        for (start, _), added in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
            starts.append(edge if added else start)
            edge = edge if added else len(text)
        return starts

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        # Unlike `decode`, it releases the GIL.
        (text,) = self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def stream(
        self, skip_special_tokens: bool = True, but: frozenset[str] | None = frozenset()
    ) -> TextStream:
        """
        Return the stream of one answer. Its pieces joined equal `decode` of all tokens.

        `but` lists special tokens to keep in the text; None keeps all except the end tokens.
        """
        if not skip_special_tokens:
            return TextStream(self._backend, ())
        if not but and but is not None:
            return TextStream(self._backend, self._special)
        shown = {number for number in self._special if but is None or self._added[number] in but}
        return TextStream(self._backend, self._special - shown | self._special.intersection(self.eos_ids))

    @property
    def added_tokens(self) -> dict[str, int]:
        """Ids of the added tokens by their text, special or not."""
        return {text: number for number, text in self._added.items() if number < self.vocab_size}

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token; a character may need several tokens."""
        if token in self._added:
            return str(self._added[token]).encode()
        piece = self._backend.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            table = _bytes_of_characters()
            if all(character in table for character in piece):
                return bytes(table[character] for character in piece)
            return str(piece).encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return str(piece.replace(SPACE_MARK, " ")).encode()

    def token_text(self, token: int) -> str:
        """Return `token_bytes` as text, with U+FFFD for a part of a character."""
        return self.token_bytes(token).decode(errors="replace")

    @property
    def chat_templates(self) -> dict[str, str]:
        """The model's chat templates by name. Most models have at most one, named `default`."""
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            return dict(template)
        return {"default": template} if template else {}

    @property
    def chat_template(self) -> str | None:
        """The model's chat template for conversations without tools, or None."""
        return self.chat_templates.get("default")

    @property
    def special_tokens(self) -> dict[str, str]:
        """Named special tokens for chat templates, such as `bos_token`."""
        return {name: str(token) for name, token in self._tokenizer.special_tokens_map.items()}

    @property
    def response_template(self) -> dict[str, Any] | None:
        """The response template of `transformers`, if the tokenizer's files contain one."""
        response_template: dict[str, Any] | None = getattr(self._tokenizer, "response_template", None)
        return response_template


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of `tokens`, the longest one first; nothing without tokens."""
    marks = sorted((token for token in tokens if token.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, marks)) or "(?!)")


def load_tokenizer(checkpoint: Checkpoint, spec: ModelSpec) -> Tokenizer:
    """Load the checkpoint's tokenizer. Raises SetupError if it is missing or does not fit the model."""
    tokenizer = _of_gguf(checkpoint) if checkpoint.is_gguf else _of_folder(checkpoint)
    highest = max(tokenizer.backend_tokenizer.get_vocab().values(), default=-1)
    if highest >= spec.vocab:
        raise SetupError(
            f"{checkpoint.path}: the tokenizer has ids up to {highest}, but the model has only {spec.vocab} "
            "embeddings. The tokenizer belongs to another model."
        )
    return Tokenizer(tokenizer, spec, _generation_ends(checkpoint))


def _of_folder(checkpoint: Checkpoint) -> Definition:
    path = checkpoint.path
    if not (path / "tokenizer.json").is_file():
        raise SetupError(
            f"{path} has no tokenizer.json. Save one with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)."
        )

    def read() -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, use_fast=True
        )

    try:
        digest = tokenizer_cache.folder_digest(path)
        return tokenizer_cache.load_or_make(cache_folder(os.environ), digest, read)
    except Exception as error:  # transformers and tokenizers raise many types, e.g. for damaged JSON
        raise SetupError(f"Cannot read the tokenizer of {path}: {error}") from error


def _of_gguf(checkpoint: Checkpoint) -> Definition:
    path = checkpoint.path
    file = checkpoint.gguf
    if gguf_tokenizer.can_build(file.metadata):
        return gguf_tokenizer.build(file.metadata, path)

    def read() -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)

    try:
        digest = tokenizer_cache.digest_of([(path.name, file.header)])
        return tokenizer_cache.load_or_make(cache_folder(os.environ), digest, read)
    except Exception as error:  # transformers and tokenizers raise many types
        raise SetupError(f"Cannot read the tokenizer of {path}: {error}") from error


def _generation_ends(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Read the end tokens of the folder's generation_config.json."""
    path = checkpoint.path / "generation_config.json"
    if not path.is_file():
        return ()
    try:
        return token_ids(read_json(path).get("eos_token_id"))
    except (TypeError, ValueError) as error:
        raise SetupError(
            f"{path}: eos_token_id is neither a number nor a list of numbers: {error}"
        ) from error


def _kinds(decoder: Any) -> set[str]:
    """Return the types of a decoder of `tokenizers` and of its nested decoders."""
    pending = [] if decoder is None else [json.loads(decoder.__getstate__())]
    kinds = set()
    while pending:
        description = pending.pop()
        kinds.add(str(description.get("type")))
        pending += description.get("decoders", [])
    return kinds


@cache
def _bytes_of_characters() -> dict[str, int]:
    """Return the alphabet of byte-level BPE: printable Latin-1 as itself, other bytes from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
