"""
Translation of EBNF, as in SGLang and llama.cpp, to llguidance's Lark.

    root ::= greeting (", " name)* "!"
    greeting ::= "hello" | "good " [a-z]+

llguidance distinguishes terminals, which are regular and fast, from rules, and matches terminals greedily.
EBNF allows every parse of the text. Non-recursive parts therefore become terminals that are as large as
possible: within one terminal, every parse is allowed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ROOT = "root"

DEPTH_LIMIT = 64
"""Maximum nesting of parentheses."""

TOKEN = re.compile(
    r"""
    (?P<space>(?:\s|\#[^\n]*)+)
    | (?P<define>::=)
    | (?P<name>[A-Za-z_][A-Za-z0-9_.-]*)
    | (?P<literal>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    | (?P<set>\[(?:[^\]\\\n]|\\.)*\])
    | (?P<count>\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    | (?P<mark>[|()*+?.])
    """,
    re.VERBOSE,
)
ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))")
LETTERS = {"n": "\n", "r": "\r", "t": "\t", "0": "\0"}


class EbnfError(ValueError):
    """The text is not a valid grammar. The message contains the line."""


@dataclass(frozen=True, slots=True)
class _Text:
    """A literal, a character class or any character, in Lark's syntax."""

    lark: str


@dataclass(frozen=True, slots=True)
class _Name:
    name: str


@dataclass(frozen=True, slots=True)
class _Repeat:
    item: _Node
    count: str
    """`*`, `+`, `?` or `{n,m}`."""


@dataclass(frozen=True, slots=True)
class _Sequence:
    items: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    ways: tuple[_Node, ...]


_Node = _Text | _Name | _Repeat | _Sequence | _Choice


def to_lark(text: str) -> str:
    """Translate a grammar to Lark. Raises EbnfError."""
    rules = _Parser(text).rules()
    if ROOT not in rules:
        raise EbnfError(f"the rule '{ROOT}' is missing")
    for node in rules.values():
        for name in _names(node):
            if name not in rules:
                raise EbnfError(f"the rule '{name}' is not defined")
    return _Writer(rules).lark()


class _Parser:
    """Recursive descent parser of the rules."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str, int]] = []
        position = 0
        while position < len(text):
            matched = TOKEN.match(text, position)
            if matched is None:
                raise self._error(f"unexpected {text[position]!r}", position)
            if matched.lastgroup != "space":
                self._tokens.append((matched.lastgroup or "", matched.group(), position))
            position = matched.end()
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, _Node]:
        rules: dict[str, _Node] = {}
        while self._at < len(self._tokens):
            kind, name, position = self._next()
            if kind != "name" or not self._peek("define"):
                raise self._error("expected a rule: its name and '::='", position)
            if name in rules:
                raise self._error(f"the rule '{name}' is defined twice", position)
            self._next()
            rules[name] = self._choice()
        return rules

    def _choice(self) -> _Node:
        ways = [self._sequence()]
        while self._peek("mark", "|"):
            self._next()
            ways.append(self._sequence())
        return ways[0] if len(ways) == 1 else _Choice(tuple(ways))

    def _sequence(self) -> _Node:
        items: list[_Node] = []
        while self._begins_item():
            item = self._item()
            while self._peek("count") or (self._peek("mark") and self._tokens[self._at][1] in "*+?"):
                item = _Repeat(item, re.sub(r"\s", "", self._next()[1]))
            items.append(item)
        return items[0] if len(items) == 1 else _Sequence(tuple(items))

    def _begins_item(self) -> bool:
        if self._at == len(self._tokens):
            return False
        kind, value, _ = self._tokens[self._at]
        if kind == "name":
            return self._at + 1 == len(self._tokens) or self._tokens[self._at + 1][0] != "define"
        return kind in ("literal", "set") or value in ("(", ".")

    def _item(self) -> _Node:
        kind, value, position = self._next()
        if kind == "name":
            return _Name(value)
        if kind == "literal":
            return _Text(json.dumps(_unescaped(value[1:-1]), ensure_ascii=False))
        if kind == "set":
            return _Text(f"/{_set(value)}/")
        if value == ".":
            return _Text(r"/(.|\n)/")
        self._depth += 1
        if self._depth > DEPTH_LIMIT:
            raise self._error(f"parentheses are nested deeper than {DEPTH_LIMIT}", position)
        inner = self._choice()
        self._depth -= 1
        if not self._peek("mark", ")"):
            raise self._error("this '(' is not closed", position)
        self._next()
        return inner

    def _peek(self, kind: str, value: str | None = None) -> bool:
        if self._at == len(self._tokens):
            return False
        token = self._tokens[self._at]
        return token[0] == kind and value in (None, token[1])

    def _next(self) -> tuple[str, str, int]:
        token = self._tokens[self._at]
        self._at += 1
        return token

    def _error(self, reason: str, position: int) -> EbnfError:
        line = self._text.count("\n", 0, position) + 1
        return EbnfError(f"line {line}: {reason}")


class _Writer:
    """Writes the rules and terminals of a grammar in Lark."""

    def __init__(self, rules: dict[str, _Node]) -> None:
        self._rules = rules
        recurring = _recurring(rules)
        self._lark = {
            name: f"r{number}" if name in recurring else f"T{number}" for number, name in enumerate(rules)
        }
        self._recurring = recurring
        self._runs: list[str] = []
        """Terminals of adjacent non-recursive items within rules."""

    def lark(self) -> str:
        lines = [f"start: {self._lark[ROOT]}"]
        for name, node in self._rules.items():
            body = self._rule(node) if name in self._recurring else self._terminal(node)
            lines.append(f"{self._lark[name]}: {body}")
        lines += [f"RUN{number}: {run}" for number, run in enumerate(self._runs)]
        return "\n".join(lines) + "\n"

    def _terminal(self, node: _Node) -> str:
        match node:
            case _Text(lark):
                return lark
            case _Name(name):
                return self._lark[name]
            case _Repeat(item, count):
                return f"({self._terminal(item)}){count}"
            case _Sequence(items):
                return " ".join(f"({self._terminal(item)})" for item in items) or '""'
            case _Choice(ways):
                return " | ".join(f"({self._terminal(way)})" for way in ways)

    def _rule(self, node: _Node) -> str:
        if not self._recurs(node):
            return self._run(node)
        match node:
            case _Repeat(item, count):
                return f"({self._rule(item)}){count}"
            case _Sequence(items):
                return " ".join(f"({part})" for part in self._parts(items))
            case _Choice(ways):
                regular = [way for way in ways if not self._recurs(way)]
                runs = [self._run(_Choice(tuple(regular)))] if regular else []
                return " | ".join([*runs, *(f"({self._rule(way)})" for way in ways if self._recurs(way))])
            case _Name(name):
                return self._lark[name]
            case _Text(lark):
                return lark

    def _parts(self, items: Sequence[_Node]) -> Iterator[str]:
        run: list[_Node] = []
        for item in items:
            if not self._recurs(item):
                run.append(item)
                continue
            if run:
                yield self._run(_Sequence(tuple(run)))
            run = []
            yield self._rule(item)
        if run:
            yield self._run(_Sequence(tuple(run)))

    def _run(self, node: _Node) -> str:
        self._runs.append(self._terminal(node))
        return f"RUN{len(self._runs) - 1}"

    def _recurs(self, node: _Node) -> bool:
        return any(name in self._recurring for name in _names(node))


def _names(node: _Node) -> Iterator[str]:
    match node:
        case _Name(name):
            yield name
        case _Repeat(item, _):
            yield from _names(item)
        case _Sequence(nodes) | _Choice(nodes):
            for inner in nodes:
                yield from _names(inner)
        case _Text():
            return


def _recurring(rules: dict[str, _Node]) -> set[str]:
    """Return the rules that are recursive or refer to a recursive rule."""
    waits = {name: set(_names(node)) for name, node in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, used in waits.items():
        for inner in used:
            users[inner].append(name)
    ready = [name for name, used in waits.items() if not used]
    while ready:  # removes rules whose references are all non-recursive
        done = ready.pop()
        for user in users[done]:
            waits[user].discard(done)
            if not waits[user]:
                ready.append(user)
        del waits[done]
    return set(waits)


def _unescaped(text: str) -> str:
    def character(matched: re.Match[str]) -> str:
        code = matched[1] or matched[2] or matched[3]
        if code is None:
            return LETTERS.get(matched[4], matched[4])
        if int(code, 16) > 0x10FFFF or 0xD800 <= int(code, 16) < 0xE000:
            raise EbnfError(f"'{matched[0]}' is not a valid character")
        return chr(int(code, 16))

    return ESCAPE.sub(character, text)


def _set(text: str) -> str:
    """Return a character class as a regular expression with code points."""
    inside = text[1:-1]
    negative = inside.startswith("^")
    inside = inside[negative:]
    items: list[tuple[str, bool]] = []
    """Each character, and whether it is an unescaped hyphen."""
    position = 0
    while position < len(inside):
        matched = ESCAPE.match(inside, position)
        end = position + 1 if matched is None else matched.end()
        items.append((_unescaped(inside[position:end]), matched is None and inside[position] == "-"))
        position = end
    if not items:
        raise EbnfError("a character class is empty")
    parts: list[str] = []
    index = 0
    while index < len(items):
        low = items[index][0]
        if index + 2 < len(items) and items[index + 1][1]:
            high = items[index + 2][0]
            if high < low:
                raise EbnfError(f"the range {low!r} to {high!r} is empty")
            parts.append(f"{_number(low)}-{_number(high)}")
            index += 3
        else:
            parts.append(_number(low))
            index += 1
    return f"[{'^' if negative else ''}{''.join(parts)}]"


def _number(character: str) -> str:
    return rf"\x{{{ord(character):x}}}"
