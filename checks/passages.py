"""
Read the prose of a file: Markdown, docstrings, comments and messages.

A passage is one paragraph, list item, heading, table cell, comment or string. Code in it is replaced by `X`;
its line breaks stay, so that a position in a passage gives a line of the file.
"""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["markdown", "docstring", "comment", "error", "message"]

LINE_COMMENTS = {".c": "//", ".go": "//", ".h": "//", ".js": "//", ".mjs": "//", ".ts": "//"}
"""Comment signs by file suffix. Other files that are neither Python nor Markdown use `#`."""

_FENCE = re.compile(r"\s*(```|~~~)")
_LIST_ITEM = re.compile(r"\s*(?:[-*+]|\d+\.) ")
_HEADING = re.compile(r"#+ ")
_TABLE_RULE = re.compile(r"\s*\|?[\s:|-]+\|?\s*$")
_CODE = re.compile(r"(`+)(?:.|\n)+?\1")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_MARKUP = re.compile(r"\*\*|__|<[^<>]*>")
_DIRECTIVE = re.compile(r"!|noqa|type:|pragma|fmt:|ruff:|-{3,}|={3,}|mypy:|yaml-language-server|syntax=")
_WORDS_IN_A_ROW = re.compile(r"\b[A-Za-z]?[a-z]+,? [a-z]+,? [a-z]+\b")
_QUERY = re.compile(r"SELECT|INSERT|UPDATE|DELETE|CREATE|PRAGMA|WITH |ALTER|DROP")


@dataclass(frozen=True, slots=True)
class Passage:
    """Prose that stands by itself, and the line of the file on which it begins."""

    line: int
    kind: Kind
    text: str


def read(path: str, source: str, *, messages: bool = False) -> Iterator[Passage]:
    """Yield the passages of a file. With `messages`, the strings of a Python file count too."""
    if path.endswith(".py"):
        yield from _python(source, messages=messages)
    elif path.endswith(".md"):
        yield from paragraphs(source, 1, "markdown")
    else:
        suffix = "." + path.rpartition(".")[2]
        yield from _comments(_comment_lines(source, LINE_COMMENTS.get(suffix, "#")))


def paragraphs(text: str, line: int, kind: Kind) -> Iterator[Passage]:
    """Split Markdown that begins on `line` into passages, without code blocks and doctests."""
    pending: list[str] = []
    start = line
    code = fence = in_list = False
    blank = True
    for number, content in enumerate(text.split("\n"), line):
        starts_fence = bool(_FENCE.match(content))
        fence ^= starts_fence
        stripped = content.strip()
        if stripped.startswith(">>>"):
            code = True
        elif not stripped:
            code = False
        elif blank and content.startswith("    ") and not in_list:
            code = True
        item = bool(_LIST_ITEM.match(content))
        heading = kind == "markdown" and bool(_HEADING.match(content))
        row = stripped.startswith("|")
        skipped = fence or starts_fence or code or not stripped
        if pending and (skipped or item or heading or row):
            yield Passage(start, kind, plain("\n".join(pending)))
            pending = []
        if stripped and not code:
            in_list = item or (in_list and (content.startswith(" ") or not blank))
        blank = not stripped
        if skipped:
            continue
        if row:
            if not _TABLE_RULE.match(content):
                cells = plain(stripped.strip("|")).split("|")
                yield from (Passage(number, kind, cell.strip()) for cell in cells if cell.strip())
        elif heading:
            yield Passage(number, kind, plain(stripped.lstrip("# ")))
        else:
            start = start if pending else number
            pending.append(_LIST_ITEM.sub("", content) if item else stripped)
    if pending:
        yield Passage(start, kind, plain("\n".join(pending)))


def plain(text: str) -> str:
    """Replace code by `X`, links by their text, and remove emphasis. Line breaks stay."""
    text = _CODE.sub(lambda code: "X" + "\n" * code[0].count("\n"), text)
    return _MARKUP.sub("", _LINK.sub(r"\1", text))


def _python(source: str, *, messages: bool) -> Iterator[Passage]:
    tree = ast.parse(source)
    strings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) in strings:
            first, _, rest = node.value.partition("\n")
            text = first.strip() + "\n" + textwrap.dedent(rest) if rest else first
            yield from paragraphs(text, node.lineno, "docstring")
    if messages:
        yield from _messages(tree, strings)
    if "#" in source:
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        yield from _comments(
            (token.start[0], token.start[1], token.string.lstrip("#").strip())
            for token in tokens
            if token.type == tokenize.COMMENT
        )


def _messages(tree: ast.AST, docstrings: set[int]) -> Iterator[Passage]:
    """Yield the strings that read as prose: at least three words in a row."""
    stack: list[tuple[ast.AST, Kind]] = [(tree, "message")]
    while stack:
        node, kind = stack.pop()
        if isinstance(node, ast.Raise):
            kind = "error"
        text = ""
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
            text = "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            text = node.value
        if text and _WORDS_IN_A_ROW.search(text) and not _QUERY.match(text.lstrip()) and not _is_script(text):
            yield Passage(getattr(node, "lineno", 1), kind, plain(text))
        if not isinstance(node, ast.JoinedStr):
            stack.extend((child, kind) for child in ast.iter_child_nodes(node))


def _is_script(text: str) -> bool:
    """Whether a string is a Python script, such as one for another process."""
    if not re.search(r"^(?:from \S+ )?import \w", text, re.MULTILINE):
        return False
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _comment_lines(source: str, sign: str) -> Iterator[tuple[int, int, str]]:
    for number, content in enumerate(source.split("\n"), 1):
        stripped = content.lstrip()
        if stripped.startswith(sign):
            yield number, len(content) - len(stripped), stripped.lstrip(sign[0]).strip()


def _comments(lines: Iterator[tuple[int, int, str]]) -> Iterator[Passage]:
    """Join comments on consecutive lines of one column. `lines` are line, column and text."""
    start, last, place = 0, -1, -1
    pending: list[str] = []
    for number, column, text in lines:
        joins = number == last + 1 and column == place and text and not _DIRECTIVE.match(text)
        if pending and not joins:
            yield from paragraphs("\n".join(pending), start, "comment")
            pending = []
        if text and not _DIRECTIVE.match(text):
            start = start if pending else number
            pending.append(text)
        last, place = number, column
    if pending:
        yield from paragraphs("\n".join(pending), start, "comment")
