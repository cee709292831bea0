"""
Names in docstrings exist, and their examples are true.

A renamed class leaves its old name behind in sentences, where no tool looks. So every error after "raises"
is a class that a module defines or imports, and every identifier in backticks stands somewhere in the code:
as a name, an attribute, an argument, a module or a string. The second part of `a.b` belongs to the first if
that is a class of ours.
"""

from __future__ import annotations

import ast
import builtins
import doctest
import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("api", "cli", "observing", "operator", "router", "runtime")
FOLDERS = (*PRODUCT, "benchmarks", "checks", "docs")

FOREIGN = {"Glm4Config", "GptOssConfig", "roundf"}
"""Of transformers and C. Our code does not contain them."""

BACKTICKS = re.compile(r"``([^`]+)``|`([^`]+)`")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(\))?")
NAME = re.compile(r"[A-Za-z_]\w*")
ERROR = r"`?[A-Z]\w*(?:\.[A-Z]\w*)?`?"
RAISES = re.compile(rf"\b[Rr]ais(?:es?|ed|ing)\s+({ERROR}(?:(?:,|,?\s+(?:or|and))\s+{ERROR})*)")

IGNORED = (ast.expr_context, ast.operator, ast.cmpop, ast.arguments)


@dataclass
class Code:
    """Names in a set of modules, and their docstrings by place."""

    docstrings: list[tuple[str, str]] = field(default_factory=list)
    names: set[str] = field(default_factory=lambda: set(dir(builtins)) | FOREIGN)
    """Whatever stands in the code, and the names of files."""
    classes: set[str] = field(default_factory=lambda: set(dir(builtins)))
    """Classes, what is imported, attributes of modules, and constants, which may hold tuples of errors."""
    members: dict[str, set[str]] = field(default_factory=dict)
    """Names in the body of each class. A name stands for all classes that have it."""
    bases: dict[str, set[str]] = field(default_factory=dict)

    def read(self, text: str, place: str) -> None:
        tree = ast.parse(text)
        nodes = [node for node in ast.walk(tree) if not isinstance(node, IGNORED)]
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        self.names |= names(nodes)
        for node in nodes:
            match node:
                case ast.Constant(value=str(text)) if node in docstrings:
                    self.docstrings.append((f"{place}:{node.lineno}", text))
                case ast.Constant(value=str(text)):
                    self.names.update(NAME.findall(text))
                case ast.ClassDef(name=name):
                    self.classes.add(name)
                    members = self.members.setdefault(name, set())
                    members |= names(list(ast.walk(node)))
                    bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
                    self.bases.setdefault(name, set()).update(
                        base.id if isinstance(base, ast.Name) else getattr(base, "attr", "") for base in bases
                    )
                case ast.ImportFrom():
                    self.classes.update(alias.asname or alias.name for alias in node.names)
                case ast.Attribute(attr=name) | ast.Name(id=name) if name.isupper() or name.endswith("Error"):
                    self.classes.add(name)

    def missing(self, identifier: str) -> str:
        """The part of a dotted identifier that does not exist, or ''."""
        parts: list[str] = NAME.findall(identifier)
        for part in parts:
            if part not in self.names:
                return part
        for owner, member in pairwise(parts):
            if member not in (self.of_class(owner) or {member}):
                return f"{owner}.{member}"
        return ""

    def of_class(self, name: str) -> set[str]:
        """Members with those of the bases. Nothing if one of these is not ours: then nothing is known."""
        if name not in self.members:
            return set()
        inherited = [self.of_class(base) for base in self.bases[name] - {"Protocol", "object", "Generic"}]
        return self.members[name].union(*inherited) if all(inherited) else set()


NAMED = {
    **dict.fromkeys((ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.alias), "name"),
    **dict.fromkeys((ast.arg, ast.keyword), "arg"),
    ast.Name: "id",
    ast.Attribute: "attr",
    ast.ImportFrom: "module",
}
"""Nodes with an identifier, which may be dotted, and its field."""


def names(nodes: Sequence[ast.AST]) -> set[str]:
    """Identifiers of nodes."""
    fields = ((node, NAMED.get(type(node))) for node in nodes)
    found = {getattr(node, name) for node, name in fields if name}
    found.update(node.asname for node in nodes if isinstance(node, ast.alias))
    return {part for name in found if name for part in name.split(".")}


def findings(code: Code) -> list[str]:
    """What does not exist, as "PLACE: NAME"."""
    found = []
    for place, text in code.docstrings:
        for match in BACKTICKS.finditer(text):
            word = match[1] or match[2]
            if IDENTIFIER.fullmatch(word) and (missing := code.missing(word)):
                found.append(f"{place}: {missing}")
        for match in RAISES.finditer(text):
            for name in re.findall(r"[A-Z]\w*(?![\w.])", match[1]):
                if name not in code.classes:
                    found.append(f"{place}: error {name}")
    return found


def modules_with_examples() -> list[str]:
    """Modules of the product with `>>>` in a docstring."""
    found = []
    for path in [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]:
        if ">>> " in path.read_text():
            parts = path.relative_to(ROOT).with_suffix("").parts
            package = next(number for number, part in enumerate(parts) if part.startswith("baton_"))
            found.append(".".join(parts[package:]).removesuffix(".__init__"))
    return found


@pytest.mark.parametrize("module", modules_with_examples())
def test_examples_in_docstrings_are_true(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_names_in_docstrings_exist() -> None:
    code = Code()
    for path in (ROOT / "tests").rglob("*.py"):  # some docstrings name tests and their helpers
        code.names.update(NAME.findall(path.read_text()))
    for path in [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))]:
        code.names.update(NAME.findall(str(path.relative_to(ROOT))))
        if path.suffix == ".py":
            code.read(path.read_text(), str(path.relative_to(ROOT)))
    assert len(code.docstrings) > 5_000
    assert findings(code) == []


MODULE = '''
from errors import Busy, Gone

class Pool(Base):
    """Takes `blocks`, and {docstring}."""

    blocks: int

    def take(self, count):
        raise Busy("pool is full")
'''


@pytest.mark.parametrize(
    ("docstring", "missing"),
    [
        ("`Pool.take` raises Busy", ""),
        ("raises Busy or `Gone`, ValueError", ""),
        ("raises Busy or Dismissed", "error Dismissed"),
        ("may raise `errors.Lost`", "Lost"),
        ("`Pool.leave` undoes `take()`", "Pool.leave"),
        ("`count` of ``held_blocks``", "held_blocks"),
        ("the log says `full`, see `/workers` and `--pool N`", ""),
    ],
)
def test_a_docstring_that_names_what_is_not_there_is_found(docstring: str, missing: str) -> None:
    code = Code()
    code.read("class Base:\n    pass\n\nleave = 1", "base.py")
    code.read(MODULE.format(docstring=docstring), "pool.py")
    assert findings(code) == ([f"pool.py:5: {missing}"] if missing else [])
