"""The tables of supported models in the documentation."""

from __future__ import annotations

from pathlib import Path

from baton_engine.api.parsing.reasoning.formats import HARMONY
from baton_engine.api.parsing.reasoning.marked import FAMILIES as MARKED
from baton_engine.api.parsing.tools import families as tools
from baton_engine.model.families import FAMILIES
from baton_engine.model.families.qwen import QWEN_3
from docs.generators import model_tables
from docs.generators.reference import ROOT


def test_documents_of_repository_have_current_table() -> None:
    documents = model_tables.documents(ROOT)
    assert [path.relative_to(ROOT).as_posix() for path in documents] == list(model_tables.FILES)
    for path, text in documents.items():
        assert path.read_text() == text and "| Qwen3 | `Qwen3ForCausalLM` | `hermes`" in text


def test_documents_stale_table_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"# Title\n\n{model_tables.BEGIN}\nold\n{model_tables.END}\n\nText\n")
    text = model_tables.documents(tmp_path, [QWEN_3])[tmp_path / "README.md"]
    assert text.startswith("# Title\n\n") and text.endswith("\n\nText\n")
    assert "old" not in text and "Qwen3ForCausalLM" in text


def test_rows_of_models_in_two_families_are_one() -> None:
    (row,) = [row for row in model_tables.rows(FAMILIES) if "DeepSeek R1" in row]
    assert "| `LlamaForCausalLM`, `Qwen2ForCausalLM` |" in row


def test_families_name_existing_parsers() -> None:
    for family in FAMILIES:
        for models in family.models:
            assert set(models.tool_parsers) <= set(tools.FAMILIES)
            assert set(models.reasoning_parsers) <= {*MARKED, HARMONY}
        assert set(family.tool_parser_aliases.values()) <= set(tools.FAMILIES)
        assert set(family.reasoning_parser_aliases.values()) <= set(MARKED)
