"""
Measure the product's packages and check their files and functions against the limits.

    python -m checks.size              print the sizes, compare the counts with checks/size.toml
    python -m checks.size PATH...      list the findings of files and folders
    python -m checks.size --tighten    lower the recorded counts to today's
    python -m checks.size --move FROM TO

A class name that two modules define is a finding too: one name has one meaning.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from checks import ratchet, tree
from checks.ratchet import Finding

RECORD = tree.ROOT / "checks" / "size.toml"

FILE_LIMIT = 400
"""Lines of a file."""

FUNCTION_LIMIT = 50
"""Lines of a function, its docstring included, its decorators not."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A class or function."""

    name: str
    line: int
    lines: int
    is_class: bool


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A Python file and what it defines."""

    path: str
    lines: int
    definitions: tuple[Definition, ...]


def measure(path: str, source: str) -> SourceFile:
    """Count the lines of a file and of its classes and functions."""
    definitions = tuple(
        Definition(
            node.name,
            node.lineno,
            (node.end_lineno or node.lineno) - node.lineno + 1,
            isinstance(node, ast.ClassDef),
        )
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return SourceFile(path, source.count("\n"), definitions)


def check(files: Sequence[SourceFile]) -> list[Finding]:
    """Find long files, long functions, and class names that two modules define."""
    findings = []
    classes: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for file in files:
        if file.lines > FILE_LIMIT:
            advice = f"{file.lines} lines: split it by meaning; at most {FILE_LIMIT}"
            findings.append(Finding(file.path, 1, "long-file", file.path.rpartition("/")[2], advice))
        for one in file.definitions:
            if one.is_class:
                classes[one.name].append((file.path, one.line))
            elif one.lines > FUNCTION_LIMIT:
                advice = f"{one.lines} lines: split it; at most {FUNCTION_LIMIT}"
                findings.append(Finding(file.path, one.line, "long-function", one.name, advice))
    for name, locations in classes.items():
        first = locations[0][0]
        for path, line in locations[1:]:
            if path != first and not name.startswith("_"):
                advice = f"also in {first}: one class name has one meaning"
                findings.append(Finding(path, line, "repeated-class", name, advice))
    return sorted(findings)


def table(files: Iterable[SourceFile]) -> str:
    """Format files, lines, longest file and longest function for each package."""
    packages: defaultdict[str, list[SourceFile]] = defaultdict(list)
    for file in files:
        packages[ratchet.package(file.path)].append(file)
        packages["product"].append(file)
    form = "{:<16} {:>5} {:>6}  {:<38} {}".format
    rows = [form("package", "files", "lines", "longest file", "longest function")]
    for name, members in sorted(packages.items(), key=lambda item: (item[0] == "product", item[0])):
        file = max(members, key=lambda member: member.lines)
        functions = [one for member in members for one in member.definitions if not one.is_class]
        longest = max(functions, key=lambda one: one.lines, default=None)
        short = file.path.partition("/baton_")[2].partition("/")[2] or file.path
        function = f"{longest.lines} {longest.name}" if longest else ""
        rows.append(
            form(name, len(members), sum(one.lines for one in members), f"{file.lines} {short}", function)
        )
    return "\n".join(rows)


def read() -> list[SourceFile]:
    """Measure the files of the product."""
    product = tuple(f"{folder}/" for folder in tree.packages())
    paths = [path for path in tree.files() if path.startswith(product) and path.endswith(".py")]
    return [measure(path, (tree.ROOT / path).read_text()) for path in paths]


if __name__ == "__main__":
    files = read()
    if len(sys.argv) == 1:
        print(table(files))
    sys.exit(ratchet.main(sys.argv[1:], RECORD, lambda: check(files)))
