"""Text and tokens, streamed and whole, and chats as prompts."""

from __future__ import annotations

import copy
import dataclasses
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from baton_engine.api.template.rendering import TemplateInput
from baton_engine.api.template.templates import templates_of
from baton_engine.model.checkpoint import Checkpoint, load_spec
from baton_engine.model.tokenizer import Tokenizer, load_tokenizer
from tests.engine.models import BOS, EOS, SPECIAL, VOCAB, make_model
from tests.tokenizers import npm_tokenizer

CHAT = [{"role": "user", "content": "Hand over."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(Checkpoint(folder, "tiny"), load_spec(Checkpoint(folder, "tiny")))


@pytest.fixture(scope="module")
def sentencepiece(folder: Path) -> Tokenizer:
    """Visible spaces and byte tokens, as Llama 2 and Mistral have."""
    pieces = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]
    backend = Backend(
        models.BPE(
            {piece: number for number, piece in enumerate(pieces)},
            [("▁", "a"), ("a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    backend.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in pieces[:3]])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    return Tokenizer(fast, load_spec(Checkpoint(folder, "tiny")))


TEXTS = [
    "",
    "a",
    "The naïve baton 🎉🏃🏽‍♀️ 日本",
    "  two  spaces\n\n1234\t",
    "<|bos|>user<|end|>",
    "\u0000\ufffd",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_from_its_tokens(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(tokenizer.token_bytes(token) for token in ids) == text.encode()


def test_special_tokens_are_left_out_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|bos|>a<|end|>")
    assert (ids[0], ids[-1]) == (BOS, EOS)
    assert tokenizer.decode(ids) == "a"
    shown, hidden = tokenizer.stream(skip_special_tokens=False), tokenizer.stream()
    assert "".join(map(shown.push, ids)) + shown.flush() == "<|bos|>a<|end|>"
    assert "".join(map(hidden.push, ids)) + hidden.flush() == "a"


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    stream = tokenizer.stream(skip)
    return [*map(stream.push, ids), stream.flush()]


@pytest.mark.parametrize("seed", range(20))
def test_tokenizer_stream_equals_decoding_the_whole(tokenizer: Tokenizer, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(40):
        ids = [chance.randrange(VOCAB) for _ in range(chance.randrange(40))]
        skip = chance.random() < 0.5
        assert "".join(streamed(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("seed", range(10))
def test_byte_tokens_are_streamed_as_whole_characters(sentencepiece: Tokenizer, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(40):
        text = "".join(chance.choice("ab  é日🎉\n<") for _ in range(chance.randrange(20)))
        ids = sentencepiece.encode(text)
        pieces = streamed(sentencepiece, ids, skip=True)
        assert "".join(pieces) == sentencepiece.decode(ids)
        assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize("seed", range(20))
def test_broken_byte_tokens_cost_no_text_that_follows(sentencepiece: Tokenizer, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(40):
        ids = [chance.randrange(3, 259) for _ in range(chance.randrange(1, 150))]
        ids += sentencepiece.encode(" ab a")
        assert "".join(streamed(sentencepiece, ids, skip=True)).endswith(" ab a")


def test_tokenizer_stream_never_shows_a_partial_character(tokenizer: Tokenizer) -> None:
    text = "🎉 naïve 日本"
    pieces = streamed(tokenizer, tokenizer.encode(text), skip=True)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_tokenizer_unfinished_character_is_flushed_once(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    first_of_three = tokenizer.encode("日")[0]
    assert stream.push(first_of_three) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_endless_broken_characters_do_not_pile_up(tokenizer: Tokenizer) -> None:
    broken = tokenizer.encode("日")[0]
    pieces = streamed(tokenizer, [broken] * 200, skip=True)
    assert "".join(pieces) == "\ufffd" * 200
    assert sum(map(bool, pieces)) > 2


def test_tokenizer_token_bytes_are_exact(tokenizer: Tokenizer, sentencepiece: Tokenizer) -> None:
    parts = [tokenizer.token_bytes(token) for token in tokenizer.encode("é日")]
    assert b"".join(parts) == "é日".encode()
    assert tokenizer.token_text(EOS) == SPECIAL[EOS]
    assert tokenizer.token_bytes(VOCAB + 5) == b""
    assert sentencepiece.token_bytes(3 + 0xE6) == b"\xe6"
    assert sentencepiece.token_text(3 + 0xE6) == "\ufffd"
    assert sentencepiece.token_text(sentencepiece.encode("a")[0]) == " a"


def test_tokenizer_has_chat_templates_and_special_tokens(
    tokenizer: Tokenizer, sentencepiece: Tokenizer
) -> None:
    assert render(tokenizer) == "<|bos|>user\nHand over.<|end|>\n<|bos|>assistant\n"
    assert tokenizer.chat_templates == {"default": tokenizer.chat_template}
    assert (sentencepiece.chat_templates, sentencepiece.chat_template) == ({}, None)
    assert tokenizer.special_tokens["eos_token"] == "<|end|>"
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.vocab_size) == ((EOS,), BOS, VOCAB)


def test_tokenizer_may_have_several_named_templates(tokenizer: Tokenizer) -> None:
    tokenizer = copy.copy(tokenizer)
    tokenizer._tokenizer = copy.copy(tokenizer._tokenizer)
    tokenizer._tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
    assert tokenizer.chat_templates == {"default": "plain", "tool_use": "with tools"}
    assert tokenizer.chat_template == "plain"


def test_added_tokens_are_known_by_their_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.added_tokens[SPECIAL[EOS]] == EOS
    assert all(tokenizer.encode(text, False) == [token] for text, token in tokenizer.added_tokens.items())


def render(tokenizer: Tokenizer) -> str:
    return templates_of(tokenizer).render(TemplateInput(messages=CHAT))


@pytest.mark.parametrize("text", ["The baton", "é 😀!", "<|end|>a", " a", ""])
def test_tokenizer_offsets_give_each_tokens_position(tokenizer: Tokenizer, text: str) -> None:
    ids, offsets = tokenizer.encode(text), tokenizer.offsets(text)
    assert len(ids) == len(offsets) and offsets == sorted(offsets)
    for number, offset in enumerate(offsets):
        before = tokenizer.decode(ids[:number], skip_special_tokens=False).rstrip("\ufffd")
        assert text[:offset] == before


def test_tokenizer_offsets_of_added_tokens_are_at_the_ends(folder: Path) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[BOS]} $A {SPECIAL[EOS]}", special_tokens=[(SPECIAL[BOS], BOS), (SPECIAL[EOS], EOS)]
    )
    spec = load_spec(Checkpoint(folder, "tiny"))
    framed = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL[EOS]), spec)
    assert framed.offsets("a") == [0, 0, 1]
    assert framed.offsets("") == [0, 0]
    assert framed.encode(SPECIAL[EOS]) == [BOS, EOS, EOS]
    assert framed.offsets(SPECIAL[EOS]) == [0, 0, len(SPECIAL[EOS])]


CALLS: dict[str, Callable[[Tokenizer, str], object]] = {
    "encode": Tokenizer.encode,
    "encode_pair": lambda tokenizer, text: tokenizer.encode_pair(text, "a"),
    "offsets": Tokenizer.offsets,
    "decode": lambda tokenizer, text: tokenizer.decode([3] * len(text)),
}


@pytest.mark.parametrize("call", CALLS)
def test_tokenizer_lets_other_threads_run(tokenizer: Tokenizer, call: str) -> None:
    """With the GIL held, a text of 4 MB would stop all of a worker's requests for seconds."""
    turns = 0
    ends = threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not ends.wait(0.0005):
            turns += 1

    other = threading.Thread(target=take_turns)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # the other thread gets the GIL only where this one releases it
    other.start()
    try:
        before = turns
        CALLS[call](tokenizer, "a1" * 50_000)
        after = turns
    finally:
        sys.setswitchinterval(interval)
        ends.set()
        other.join()
    assert after > before


@pytest.mark.parametrize("seed", range(10))
def test_least_tokens_is_a_lower_bound(tokenizer: Tokenizer, sentencepiece: Tokenizer, seed: int) -> None:
    chance = random.Random(seed)
    words = ["a", "b", " ", "  \n", "日本", "🎉", "0123", SPECIAL[EOS], "e\u0301"]
    for _ in range(40):
        text = "".join(chance.choices(chance.sample(words, 3), k=30))
        for one in (tokenizer, sentencepiece):
            assert len(one.encode(text, False)) >= one.least_tokens(len(text))


@pytest.mark.parametrize("name", ["gemma3", "llama3_1", "qwen3"])
@pytest.mark.slow
def test_least_tokens_is_near_for_the_longest_token(name: str, folder: Path) -> None:
    """Long runs of one token are the texts that come nearest to the bound."""
    backend = Backend.from_file(str(npm_tokenizer(name) / "tokenizer.json"))
    spec = dataclasses.replace(load_spec(Checkpoint(folder, "tiny")), vocab=backend.get_vocab_size())
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), spec)
    longest = max(range(spec.vocab), key=lambda token: len(tokenizer.token_text(token)))
    text = tokenizer.token_text(longest) * 50
    assert tokenizer.least_tokens(len(text)) <= len(tokenizer.encode(text, False))
    assert tokenizer.least_tokens(len(text)) >= 25
