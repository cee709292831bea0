"""The prose linter: each rule by named cases, the reading of files, and the record that only falls."""

from __future__ import annotations

from pathlib import Path

import pytest

from checks import passages, prose, ratchet, tree
from checks.passages import Passage
from checks.ratchet import Finding

LONG = " ".join(["word"] * (prose.SENTENCE_LIMIT + 1)) + "."

BROKEN = {
    "too many words": (LONG, "sentence-length"),
    "who as subject": ("Who comes from vLLM changes nothing.", "subject"),
    "what as subject": ("What was seen is kept.", "subject"),
    "what after a semicolon": ("It waits; what is left is deleted.", "subject"),
    "nothing as subject": ("Nothing in the way knows it.", "subject"),
    "whom": ("Pods whom they displace.", "word"),
    "nobody": ("A request that nobody waits for.", "word"),
    "told": ("The client is told the reason.", "word"),
    "words across a line break": ("The router goes\non with it.", "word"),
    "a noun negated by none": ("The value is none.", "negated-noun"),
    "a noun negated by no": ("The text is no origin.", "negated-noun"),
    "a word of the glossary": ("It counts tallies.", "glossary"),
    "workers of a generation": ("The old generation drains.", "glossary"),
    "British spelling": ("The worker tokenises the prompt.", "spelling"),
}

SOUND = {
    "the longest sentence": " ".join(["word"] * prose.SENTENCE_LIMIT) + ".",
    "two sentences of half the length": f"{' '.join(['word'] * 20)}. {' '.join(['Word'] * 20)}.",
    "a question": "What is Baton?",
    "code": "Set `told` to `wishes`.",
    "what as object": "The error says what failed.",
    "there is none": "There is no worker left.",
    "no longer": "The block is no longer shared.",
    "text generation": "The generation of text is slow.",
    "part of a word": "The bookkeeper folds and enfolds.",
}


def rules(text: str, kind: passages.Kind = "markdown") -> list[str]:
    """Return the rules that a paragraph breaks."""
    found = (prose.check(passage) for passage in passages.paragraphs(text, 1, kind))
    return [finding[1] for findings in found for finding in findings]


@pytest.mark.parametrize(("text", "rule"), BROKEN.values(), ids=BROKEN)
def test_check_broken_sentence_names_rule(text: str, rule: str) -> None:
    assert rule in rules(text)


@pytest.mark.parametrize("text", SOUND.values(), ids=SOUND)
def test_check_sound_sentence_finds_nothing(text: str) -> None:
    assert rules(text) == []


def test_check_question_in_error_is_finding() -> None:
    assert rules("Which image have these pods?", "error") == ["error-question"]
    assert rules("Which image have these pods?", "message") == []


def test_check_finding_has_line_and_advice() -> None:
    passage = Passage(line=10, kind="comment", text="The router waits\nfor nobody.")
    assert list(prose.check(passage)) == [(11, "word", "nobody", "name the actor")]


NAMES = {
    "def test_the_youngest_goes() -> None: ...": ["test-name-form"],
    f"def test_{'x' * 55}() -> None: ...": [],
    f"def test_{'x' * 56}() -> None: ...": ["test-name-length"],
    "def test_pool_full_evicts_youngest() -> None: ...": [],
    "told = 1": ["name"],
    "class RoomTallies: ...": ["name"],
    "self.last_said = found = 1": ["name", "name"],
    "def serve(wishes: int) -> None: ...": ["name"],
    "reply = print(told)": [],
    "foundation = retold = 1": [],
}


@pytest.mark.parametrize(("source", "expected"), NAMES.items(), ids=range(len(NAMES)))
def test_names_definition_breaks_rules(source: str, expected: list[str]) -> None:
    assert [finding.rule for finding in prose.names("tests/test_x.py", source)] == expected


def test_read_markdown_yields_prose_only() -> None:
    text = """\
# A heading

First line,
second line.

    indented code

- one `item`
  continued
- two [linked](words.md)

| cell | `code` |
| --- | --- |

```
fenced code
```
"""
    read = [(passage.line, passage.text) for passage in passages.read("x.md", text)]
    assert read == [
        (1, "A heading"),
        (3, "First line,\nsecond line."),
        (8, "one X\ncontinued"),
        (10, "two linked"),
        (12, "cell"),
        (12, "X"),
    ]


def test_read_python_yields_prose_by_kind() -> None:
    source = '''\
"""A module."""

LIMIT = 1
"""
A limit.

>>> LIMIT
1
"""
# Why it is
# one.
text = "not three"  # beside it
help = f"a help text of {LIMIT} words"
raise ValueError("the value is wrong")
'''
    read = {(one.line, one.kind, one.text) for one in passages.read("x.py", source, messages=True)}
    assert read == {
        (1, "docstring", "A module."),
        (5, "docstring", "A limit."),
        (10, "comment", "Why it is\none."),
        (12, "comment", "beside it"),
        (13, "message", "a help text of X words"),
        (14, "error", "the value is wrong"),
    }


def test_read_other_files_yields_line_comments() -> None:
    assert [one.text for one in passages.read("x.yaml", "# A comment.\nkey: value\n")] == ["A comment."]
    assert [one.text for one in passages.read("x.c", "// A comment.\n# include\n")] == ["A comment."]


def findings(**counts: int) -> list[Finding]:
    """Make findings of the rule `word` in packages, as many as given."""
    return [
        Finding(f"{package}/x.py", line, "word", "x", "y")
        for package, number in counts.items()
        for line in range(number)
    ]


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """A record that allows three findings in `tests` and one in `e2e`."""
    path = tmp_path / "record.toml"
    path.write_text("# Kept.\ne2e.word = 1\ntests.word = 3\n")
    return path


@pytest.mark.parametrize(("number", "status"), [(2, 0), (3, 0), (4, 1)])
def test_compare_fails_only_on_rise(record: Path, number: int, status: int) -> None:
    assert ratchet.compare(findings(tests=number), record) == status


def test_compare_rise_prints_place_and_advice(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ratchet.compare(findings(e2e=2), record)
    printed = capsys.readouterr().err
    assert "e2e.word: 2 findings, 1 allowed:\n  e2e/x.py:0: word: 'x': y" in printed


def test_main_tighten_lowers_and_never_raises(record: Path) -> None:
    assert ratchet.main(["--tighten"], record, lambda: findings(e2e=2, tests=2)) == 1
    assert record.read_text() == "# Kept.\ne2e.word = 1\ntests.word = 2\n"


def test_main_tighten_drops_empty_counts(record: Path) -> None:
    assert ratchet.main(["--tighten"], record, lambda: findings(tests=1)) == 0
    assert record.read_text() == "# Kept.\ntests.word = 1\n"


@pytest.mark.parametrize(
    ("counts", "expected"),
    {
        "all of it": ({"tests": 1, "e2e": 3}, "e2e.word = 3\ntests.word = 1\n"),
        "no more than is left": ({"tests": 2, "e2e": 3}, "e2e.word = 2\ntests.word = 2\n"),
    }.values(),
)
def test_main_move_keeps_sum(record: Path, counts: dict[str, int], expected: str) -> None:
    ratchet.main(["--move", "tests", "e2e"], record, lambda: findings(**counts))
    assert record.read_text() == f"# Kept.\n{expected}"


def test_files_leave_out_generated_pages() -> None:
    paths = set(tree.files())
    assert {"README.md", "Makefile", "charts/baton/values.yaml", "tests/test_prose.py"} <= paths
    assert not [path for path in paths if path.startswith(("docs/reference/", "crds/", ".venv/"))]
