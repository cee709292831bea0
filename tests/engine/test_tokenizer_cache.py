"""Tokenizers that transformers has read are stored, and read back equal without it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from baton_api.errors import SetupError
from baton_engine.model import gguf_tokenizer, tokenizer_cache
from baton_engine.model.checkpoint import Checkpoint, load_spec
from baton_engine.model.gguf import GGUFFile
from baton_engine.model.tokenizer import Tokenizer, load_tokenizer
from baton_engine.model.tokenizer_cache import Definition, folder_digest, load_or_make
from tests.engine.gguf_files import write_gguf
from tests.engine.models import make_model
from tests.tokenizers import npm_tokenizer

NAMED = ("bos_token_id", "eos_token_id", "chat_template", "special_tokens_map", "response_template")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def read(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def unread() -> Any:
    raise AssertionError("transformers was asked again")


def described(tokenizer: Any) -> dict[str, Any]:
    """The parts of a tokenizer that Baton uses, be it stored or of transformers."""
    named = {name: getattr(tokenizer, name, None) for name in NAMED}
    return {**named, "backend": tokenizer.backend_tokenizer.to_str()}


@pytest.mark.parametrize(
    "name",
    ["tiny", "qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama3_1", "deepseek_v3"))],
)
def test_stored_tokenizer_equals_that_of_transformers(folder: Path, tmp_path: Path, name: str) -> None:
    source = folder if name == "tiny" else npm_tokenizer(name)
    wanted = described(read(source))
    assert described(load_or_make(tmp_path, "digest", lambda: read(source))) == wanted
    assert described(load_or_make(tmp_path, "digest", unread)) == wanted


def test_tokenizer_of_a_folder_is_read_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    checkpoint = Checkpoint(folder, "tiny")
    load_tokenizer(checkpoint, load_spec(checkpoint))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: unread())
    assert load_tokenizer(checkpoint, load_spec(checkpoint)).encode("a baton")
    (folder / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text() + " ")
    with pytest.raises(SetupError, match="transformers was asked again"):
        load_tokenizer(checkpoint, load_spec(checkpoint))


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def changed(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def writable_for_all(path: Path) -> None:
    path.chmod(0o666)


def replaced_by_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize(
    "spoil", [truncated, changed, emptied, writable_for_all, replaced_by_a_link], ids=lambda one: one.__name__
)
def test_damaged_or_foreign_stored_tokenizer_is_not_used(
    folder: Path, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    load_or_make(tmp_path, "digest", lambda: read(folder))
    spoil(tmp_path / "tokenizer-digest")
    with pytest.raises(AssertionError, match="asked again"):
        load_or_make(tmp_path, "digest", unread)
    assert described(load_or_make(tmp_path, "digest", lambda: read(folder))) == described(read(folder))


def test_damaged_stored_tokenizer_is_made_again(folder: Path, tmp_path: Path) -> None:
    load_or_make(tmp_path, "digest", lambda: read(folder))
    changed(tmp_path / "tokenizer-digest")
    load_or_make(tmp_path, "digest", lambda: read(folder))
    load_or_make(tmp_path, "digest", unread)


def test_cache_that_cannot_be_written_changes_nothing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        definition = load_or_make(tmp_path / "file" / "cache", "digest", lambda: read(folder))
        assert described(definition) == described(read(folder))


def test_settings_outside_the_serialization_are_not_stored(folder: Path, tmp_path: Path) -> None:
    """tokenizer_config.json sets a flag (split_special_tokens) that is no part of the tokenizer's JSON."""
    split = read(folder)
    split.backend_tokenizer.encode_special_tokens = True
    load_or_make(tmp_path, "digest", lambda: split)
    assert not list(tmp_path.iterdir())


def test_least_recently_used_tokenizers_are_deleted(folder: Path, tmp_path: Path) -> None:
    for number in range(tokenizer_cache.KEPT):
        load_or_make(tmp_path, str(number), lambda: read(folder))
        os.utime(tmp_path / f"tokenizer-{number}", (number, number))
    load_or_make(tmp_path, "0", unread)
    load_or_make(tmp_path, "new", lambda: read(folder))
    kept = {path.name.removeprefix("tokenizer-") for path in tmp_path.iterdir()}
    assert kept == {"0", "new", *map(str, range(2, tokenizer_cache.KEPT))}


def rewritten(folder: Path) -> None:
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + "\n")


def with_a_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def with_a_named_template(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")


def renamed(folder: Path) -> None:
    (folder / "config.json").rename(folder / "other.json")


@pytest.mark.parametrize(
    "change",
    [rewritten, with_a_template, with_a_named_template, renamed],
    ids=lambda one: one.__name__,
)
def test_folder_digest_depends_on_each_file(tmp_path: Path, change: Callable[[Path], None]) -> None:
    folder = make_model(tmp_path)
    before = folder_digest(folder)
    assert folder_digest(folder) == before
    change(folder)
    assert folder_digest(folder) != before


@pytest.mark.parametrize("padding", [None, "<|unknown|>", "a"], ids=["none", "special", "ordinary"])
def test_gguf_special_tokens_are_those_of_transformers(
    folder: Path, tmp_path: Path, padding: str | None
) -> None:
    """Named tokens that the file does not mark as special become special, as with transformers."""
    path = write_gguf(folder, tmp_path / "tiny.gguf")
    metadata = dict(GGUFFile(path).metadata)
    if padding is not None:
        metadata["tokenizer.ggml.padding_token_id"] = metadata["tokenizer.ggml.tokens"].index(padding)
    ours = gguf_tokenizer.build(metadata, path)
    plain = {key: value for key, value in metadata.items() if not key.endswith("_token_id")}
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=gguf_tokenizer.build(plain, path).backend_tokenizer,
        chat_template=metadata["tokenizer.chat_template"],
        **ours.special_tokens_map,
    )
    assert described(ours) == described(theirs)
    spec = load_spec(Checkpoint(path, "tiny"))
    text = "<|bos|>a baton<|end|>"
    assert Tokenizer(ours, spec).encode(text) == Tokenizer(theirs, spec).encode(text)
    assert Tokenizer(ours, spec).encode_pair("a", "b") == Tokenizer(theirs, spec).encode_pair("a", "b")


def test_special_tokens_that_a_file_lacks_have_no_id(folder: Path) -> None:
    backend = read(folder).backend_tokenizer
    assert Definition(backend).bos_token_id is None
    assert Definition(backend, special_tokens_map={"eos_token": "missing"}).eos_token_id is None
