"""
Counts of findings that may fall and never rise.

A record is a TOML file with one line per package and rule: `baton_api.glossary = 12`. More findings than
recorded fail the check. Fewer are reported, and `--tighten` (part of `make fix`) lowers the record.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SHOWN = 20
"""Findings that are printed for one package and rule."""


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One place that breaks a rule."""

    path: str
    line: int
    rule: str
    words: str
    """The words or the name that break it."""
    advice: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.words!r}: {self.advice}"


def package(path: str) -> str:
    """
    Name the package of a file, or its folder, under which its findings are counted.

    >>> [package(path) for path in ("api/baton_api/x.py", "docs/a/b.md", "README.md", "Makefile")]
    ['baton_api', 'docs', 'docs', 'root']
    """
    parts = path.split("/")
    inside = next((part for part in parts[:-1] if part.startswith("baton_")), "")
    if inside or not path.endswith(".md"):
        return inside or (parts[0] if len(parts) > 1 else "root")
    return "docs"


def count(findings: Iterable[Finding]) -> Counter[str]:
    """Count findings by `package.rule`."""
    return Counter(f"{package(finding.path)}.{finding.rule}" for finding in findings)


def read(record: Path) -> dict[str, int]:
    """Read the allowed counts by `package.rule`."""
    tables = tomllib.loads(record.read_text())
    return {f"{name}.{rule}": number for name, rules in tables.items() for rule, number in rules.items()}


def write(record: Path, counts: Mapping[str, int]) -> None:
    """Write one line for each count above zero; the comment at the top of the file stays."""
    head = [line for line in record.read_text().splitlines() if line.startswith("#")]
    lines = [f"{key} = {number}" for key, number in sorted(counts.items()) if number]
    record.write_text("\n".join((*head, *lines)) + "\n")


def lowered(allowed: Mapping[str, int], counts: Mapping[str, int]) -> dict[str, int]:
    """Lower each allowed count to what was found."""
    return {key: min(number, counts.get(key, 0)) for key, number in allowed.items()}


def moved(allowed: Mapping[str, int], counts: Mapping[str, int], source: str, target: str) -> dict[str, int]:
    """Hand over to package `target` what it needs of the allowance that package `source` has left."""
    result = dict(allowed)
    for key, number in counts.items():
        name, _, rule = key.partition(".")
        giver = f"{source}.{rule}"
        surplus = result.get(giver, 0) - counts.get(giver, 0)
        missing = number - result.get(key, 0)
        if name == target and surplus > 0 and missing > 0:
            result[key] = result.get(key, 0) + min(surplus, missing)
            result[giver] -= min(surplus, missing)
    return result


def table(counts: Mapping[str, int]) -> str:
    """Format counts with a row for each package and a column for each rule."""
    names = sorted({key.partition(".")[0] for key in counts})
    rules = sorted({key.partition(".")[2] for key in counts})
    rows = [["", *rules, "all"]]
    for name in (*names, "all"):
        chosen = [
            sum(counts.get(f"{one}.{rule}", 0) for one in (names if name == "all" else [name]))
            for rule in rules
        ]
        rows.append([name, *map(str, chosen), str(sum(chosen))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)
    return "\n".join(lines)


def compare(findings: Sequence[Finding], record: Path) -> int:
    """Print each count that rose with its findings. Returns the exit status."""
    allowed, counts = read(record), count(findings)
    rises = {key: number for key, number in sorted(counts.items()) if number > allowed.get(key, 0)}
    for key, number in rises.items():
        print(f"{key}: {number} findings, {allowed.get(key, 0)} allowed:", file=sys.stderr)
        concerned = [one for one in findings if f"{package(one.path)}.{one.rule}" == key]
        for finding in concerned[:SHOWN]:
            print(f"  {finding}", file=sys.stderr)
        if len(concerned) > SHOWN:
            print(f"  and {len(concerned) - SHOWN} more: give the paths that you changed", file=sys.stderr)
    fallen = sum(counts.get(key, 0) < number for key, number in allowed.items())
    if rises:
        print(f"To keep the allowance of moved files: --move FROM TO. Record: {record}.", file=sys.stderr)
    elif fallen:
        print(f"{record}: {fallen} counts can be lowered: run `make fix`.")
    return int(bool(rises))


def main(arguments: Sequence[str], record: Path, find: Callable[[], list[Finding]]) -> int:
    """Run a check with its record: compare, list, tighten or move. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Check the tree against the recorded counts.")
    parser.add_argument("paths", nargs="*", help="List the findings of these files and folders.")
    parser.add_argument("--table", action="store_true", help="Print the counts by package and rule.")
    parser.add_argument("--tighten", action="store_true", help="Lower the recorded counts to today's.")
    parser.add_argument(
        "--move",
        nargs=2,
        metavar=("FROM", "TO"),
        help="Hand the allowance of moved files to another package.",
    )
    options = parser.parse_args(arguments)
    findings = sorted(find())
    if options.paths:
        paths = [str(Path(path)) for path in options.paths]
        chosen = [
            one
            for one in findings
            if any(one.path == path or one.path.startswith(f"{path}/") for path in paths)
        ]
        print(*chosen, f"{len(chosen)} findings", sep="\n")
        return 0
    counts = count(findings)
    if options.table:
        print(table(counts))
        return 0
    if options.move:
        write(record, moved(read(record), counts, *options.move))
    if options.tighten:
        write(record, lowered(read(record), counts))
    return compare(findings, record)
