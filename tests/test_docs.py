"""The documentation refers to tests, files and examples that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
CONTRACT = ROOT / "docs/concepts/failures.md"
OPERATOR = ROOT / "docs/contributing/operator-defects.md"
TESTS = "\n".join(path.read_text() for path in sorted(ROOT.glob("tests/**/*.py")))


def test_docs_named_tests_exist() -> None:
    named = {name for document in DOCUMENTS for name in re.findall(r"`(test_\w+)`", document.read_text())} - {
        path.stem for path in ROOT.glob("tests/**/*.py")
    }
    assert named
    assert not {name for name in named if f"def {name}(" not in TESTS}


def test_docs_tests_named_with_their_file_are_in_it() -> None:
    """`tests/a.py::test_b`, or `::test_c` of the same file."""
    missing, count = [], 0
    for document in DOCUMENTS:
        file = ""
        for path, name in re.findall(
            r"`((?:tests|e2e)/[\w/]+\.py)?::(?:\w+::)?(test_\w+)", document.read_text()
        ):
            file, count = path or file, count + 1
            if not (ROOT / file).is_file() or f"def {name}(" not in (ROOT / file).read_text():
                missing.append(f"{document.name}: {file}::{name}")
    assert count > 60
    assert missing == []


def test_docs_failures_name_their_tests() -> None:
    rows = [line for line in CONTRACT.read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith("| failure |")]
    assert len(rows) > 20
    assert not [row for row in rows if "`test_" not in row.rpartition(" | ")[2]]


def test_docs_operator_defects_name_tests_or_a_reason() -> None:
    rows = [line.split(" | ") for line in OPERATOR.read_text().splitlines() if re.match(r"\| \d", line)]
    numbers = [int(number) for row in rows for number in row[0].removeprefix("| ").split(", ")]
    assert sorted(numbers) == list(range(1, 41))
    for row in rows:
        assert "`test_" in row[-1] or row[-1].startswith(("does not apply: ", "measured: ")), row


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_docs_links_lead_to_files(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text())
    assert not [link for link in links if not (document.parent / link).exists()]


def test_docs_examples_are_listed() -> None:
    listed = (ROOT / "examples" / "README.md").read_text()
    examples = [
        path for path in sorted((ROOT / "examples").rglob("*")) if path.suffix in (".py", ".sh", ".yaml")
    ]
    assert examples
    assert not [path for path in examples if f"]({path.relative_to(ROOT / 'examples')})" not in listed]


def test_commands_run_benchmarks_as_modules() -> None:
    """As a file, a benchmark finds `benchmarks/operator.py` in place of Python's own module."""
    texts = {path: (ROOT / path).read_text() for path in ("Makefile", "README.md", "CONTRIBUTING.md")}
    texts |= {str(page): page.read_text() for page in (ROOT / "docs").rglob("*.md")}
    assert [path for path, text in texts.items() if re.search(r"(python|PYTHON\))\s+benchmarks/", text)] == []
