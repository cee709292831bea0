"""
Text to token ids and back, one token at a time too.

`transformers` knows every tokenizer's settings and its chat templates; the work on ids is done by the fast
tokenizer beneath it, without clean-ups, so that streamed and whole text agree.
"""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from functools import cache
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from baton_api.errors import SetupError
from baton_engine.model import gguf_tokenizer
from baton_engine.model.checkpoint import Checkpoint, read_json
from baton_engine.model.config import token_ids
from baton_engine.model.gguf import GGUFFile
from baton_engine.model.spec import ModelSpec

SPACE_MARK = "\u2581"
"""SentencePiece's visible space."""
HELD_LIMIT = 64
"""Tokens without a whole character between them, after which their broken ones are shown: each step
decodes all that is held."""


class TextStream:
    """The text of one answer as its tokens come."""

    def __init__(self, backend: Backend, skipped: Container[int]) -> None:
        """`skipped` tokens have no text."""
        self._backend = backend
        self._skipped = skipped
        self._begin(after=[])

    def _begin(self, after: list[int]) -> None:
        """Stream on; the tokens `after` which it goes on are shown already, and decide about spaces."""
        self._stream = DecodeStream(ids=after, skip_special_tokens=False)
        self._tokens = after
        self._shown = len(self._text())
        self._held = 0

    def _text(self) -> str:
        return str(self._backend.decode(self._tokens, skip_special_tokens=False))

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is still in parts."""
        if token in self._skipped:
            return ""
        self._tokens.append(token)
        try:
            text: str | None = self._stream.step(self._backend, token)
        except Exception:  # tokenizers has no other: among broken byte tokens, later ones change earlier text
            return self.flush()
        if text is None:
            self._held += 1
            return self.flush() if self._held >= HELD_LIMIT else ""
        self._held = 0
        self._shown += len(text)
        return text

    def flush(self) -> str:
        """At the end: what was held back, a character that no token completed."""
        rest = self._text()[self._shown :]
        self._begin(after=self._tokens[-1:])
        return rest


class Tokenizer:
    """One model's tokenizer, and the templates that came with it."""

    def __init__(self, tokenizer: Any, spec: ModelSpec, eos_ids: Sequence[int] = ()) -> None:
        """`tokenizer` is a fast one of transformers; `eos_ids` come before its own and the spec's."""
        self._tokenizer = tokenizer
        self._backend: Backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._byte_level = "ByteLevel" in _kinds(json.loads(self._backend.to_str()).get("decoder"))
        added = self._backend.get_added_tokens_decoder()
        self._added = {number: token.content for number, token in added.items()}
        self._special = frozenset(number for number, token in added.items() if token.special)
        own = tokenizer.eos_token_id
        ends = (*eos_ids, *spec.eos_ids, *(() if own is None else (own,)))
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(end for end in ends if end < spec.vocab))
        """Ids that end an answer."""
        self.bos_id: int | None = spec.bos_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        self.vocab_size = spec.vocab
        """Ids that the model knows; the tokenizer may have text for fewer."""

    @property
    def definition(self) -> str:
        """All of the tokenizer beneath as JSON, as the library `tokenizers` writes it."""
        return str(self._backend.to_str())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; special tokens in it are recognised."""
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def offsets(self, text: str) -> list[int]:
        """
        For each of the ids that `encode` gives, the characters of `text` before it.

        One that begins within a character has those before that character; one that was added before the
        text has 0, one that was added after it the length of the text.
        """
        encoding = self._backend.encode(text)
        starts: list[int] = []
        edge = 0
        for (start, _), added in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
            starts.append(edge if added else start)
            edge = edge if added else len(text)
        return starts

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def stream(
        self, skip_special_tokens: bool = True, but: frozenset[str] | None = frozenset()
    ) -> TextStream:
        """
        For one answer: all that it pushes and flushes is `decode` of the whole.

        Of the special tokens those with the texts `but` are shown all the same; None is all but the ends.
        """
        if not skip_special_tokens:
            return TextStream(self._backend, ())
        if not but and but is not None:
            return TextStream(self._backend, self._special)
        shown = {number for number in self._special if but is None or self._added[number] in but}
        return TextStream(self._backend, self._special - shown | self._special.intersection(self.eos_ids))

    @property
    def added_tokens(self) -> dict[str, int]:
        """The tokens that stand in a text as one, special or not: its marks, by what they are."""
        return {text: number for number, text in self._added.items() if number < self.vocab_size}

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` alone stands for; a character may need several tokens."""
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
        """`token_bytes` as text, a part of a character as U+FFFD."""
        return self.token_bytes(token).decode(errors="replace")

    @property
    def chat_templates(self) -> dict[str, str]:
        """The model's own by name; most have one at most, which is called `default`."""
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            return dict(template)
        return {"default": template} if template else {}

    @property
    def chat_template(self) -> str | None:
        """The model's own for conversations without tools, or None."""
        return self.chat_templates.get("default")

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens that have a name, as chat templates call them: `bos_token` and its like."""
        return {name: str(token) for name, token in self._tokenizer.special_tokens_map.items()}

    @property
    def response_template(self) -> dict[str, Any] | None:
        """How `transformers` tells the parts of an answer, where the tokenizer's files say so."""
        response_template: dict[str, Any] | None = getattr(self._tokenizer, "response_template", None)
        return response_template


def load_tokenizer(checkpoint: Checkpoint, spec: ModelSpec) -> Tokenizer:
    """The checkpoint's tokenizer; a SetupError if it is missing, or has ids that the model has not."""
    tokenizer = _of_gguf(checkpoint) if checkpoint.is_gguf else _of_folder(checkpoint)
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= spec.vocab:
        raise SetupError(
            f"{checkpoint.path}: the tokenizer has ids up to {highest}, but the model only {spec.vocab} "
            "embeddings. The tokenizer belongs to another model."
        )
    return Tokenizer(tokenizer, spec, _generation_ends(checkpoint))


def _of_folder(checkpoint: Checkpoint) -> Any:
    from transformers import AutoTokenizer

    if not (checkpoint.path / "tokenizer.json").is_file():
        raise SetupError(
            f"{checkpoint.path} has no tokenizer.json. Save one with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)."
        )
    try:
        return AutoTokenizer.from_pretrained(
            checkpoint.path, local_files_only=True, trust_remote_code=False, use_fast=True
        )
    except Exception as error:  # damaged JSON, unknown classes: transformers and tokenizers raise all sorts
        raise SetupError(f"{checkpoint.path}: the tokenizer cannot be read: {error}") from error


def _of_gguf(checkpoint: Checkpoint) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = checkpoint.path
    metadata = GGUFFile(path).metadata
    if gguf_tokenizer.can_build(metadata):
        tokens = metadata["tokenizer.ggml.tokens"]
        special = {
            f"{name}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
            if 0 <= metadata.get(f"tokenizer.ggml.{key}_token_id", -1) < len(tokens)
        }
        return PreTrainedTokenizerFast(
            tokenizer_object=gguf_tokenizer.build(metadata, path),
            chat_template=metadata.get("tokenizer.chat_template"),
            **special,
        )
    try:
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as error:  # as for a folder
        raise SetupError(f"{path}: the tokenizer cannot be read: {error}") from error


def _generation_ends(checkpoint: Checkpoint) -> tuple[int, ...]:
    """What a folder's generation_config.json ends an answer with."""
    path = checkpoint.path / "generation_config.json"
    if not path.is_file():
        return ()
    try:
        return token_ids(read_json(path).get("eos_token_id"))
    except (TypeError, ValueError) as error:
        raise SetupError(f"{path}: eos_token_id is neither a number nor a list of them: {error}") from error


def _kinds(decoder: Any) -> set[str]:
    """The types of a decoder and of those that it is made of."""
    if not isinstance(decoder, dict):
        return set()
    parts = [_kinds(part) for part in decoder.get("decoders", [])]
    return {str(decoder.get("type"))}.union(*parts)


@cache
def _bytes_of_characters() -> dict[str, int]:
    """
    Byte-level BPE's alphabet: a printable byte of Latin-1 is itself, the others follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
