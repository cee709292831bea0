"""
Tool calls with tags around each parameter: Qwen3-Coder, GLM-4.5 and MiniMax-M2.

    <tool_call>             <tool_call>f                        <minimax:tool_call>
    <function=f>            <arg_key>city</arg_key>             <invoke name="f">
    <parameter=city>        <arg_value>Rome</arg_value>         <parameter name="city">Rome</parameter>
    Rome                    </tool_call>                        </invoke>
    </parameter>                                                </minimax:tool_call>
    </function>
    </tool_call>

The type of a parameter determines how its text is parsed. Strings are emitted as they arrive, other values
when they are complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton_engine.api.parsing.tools import tagged_arguments
from baton_engine.api.parsing.tools.family import ToolFamily
from baton_engine.api.parsing.tools.grammar import ANY_TEXT, Lark, Layout, escaped, first, place_of, regex
from baton_engine.api.parsing.tools.source import OpenCall, Reading, TextSource, Wait
from baton_engine.api.parsing.tools.tagged_arguments import definitions, members, not_enforced, root_of
from baton_engine.api.parsing.tools.toolbox import INPUT, Tool

NAME = re.compile(r'[^<>"\n]*')
NAME_LIMIT = 256
ANCHORED = re.compile(r"\^((?:[^$\\]|\\.)*)\$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The tags of one format, in the order in which they are written. An empty one is left out."""

    start: str
    function: str = ""
    """Before the name of a function. Empty: the name follows `start`, and a block has one call."""
    name_end: str = ""
    parameter: str
    """Before the name of a parameter."""
    key_end: str
    value: str = ""
    """Before a value, on a line of its own."""
    value_end: str
    function_end: str
    end: str = ""
    own_lines: bool = False
    """Whether a value has lines of its own."""

    @property
    def stop(self) -> str:
        """What ends a value."""
        return f"\n{self.value_end}" if self.own_lines else self.value_end

    # --- The reader ---

    def read(self, source: TextSource, *triggers: str) -> Reading:
        """Read an answer. `triggers`: `start`, and `function` if models leave `start` out."""
        while mark := (yield from source.find(*triggers)):
            start = source.mark()
            if not (yield from self._read_calls(source, begun=mark != self.start)):
                source.back(start)
                source.words(mark)

    def _read_calls(self, source: TextSource, begun: bool) -> Wait[bool]:
        if not begun:
            yield from source.space()
        if not (yield from self._read_call(source, begun)):
            return False
        more = bool(self.function)
        while more:
            yield from source.space()
            more = yield from self._read_call(source, begun=False)
        yield from source.literal(self.end)
        return True

    def _read_call(self, source: TextSource, begun: bool) -> Wait[bool]:
        mark = source.mark()
        if begun or (yield from source.literal(self.function)):
            name = yield from source.match(NAME, NAME_LIMIT)
            tool = source.tool(name.strip())
            # What follows shows that a name was not cut off.
            if tool is not None and (yield from source.peek()) and (yield from source.literal(self.name_end)):
                yield from self._read_parameters(source, source.call(tool), tool)
                return True
        source.back(mark)
        return False

    def _read_parameters(self, source: TextSource, call: OpenCall, tool: Tool) -> Wait[None]:
        root, written = root_of(tool), 0
        properties = root.get("properties", {})
        while (name := (yield from self._read_key(source))) is not None:
            if tool.custom:
                write = call.write if name == INPUT else lambda text: None
                yield from source.pass_on(self.value_end, self._trimmed(write))
                continue
            call.write(f"{', ' if written else '{'}{tagged_arguments.dumped(name)}: ")
            written += 1
            types = tagged_arguments.types_of(properties.get(name), root)
            if types == {"string"}:
                call.write('"')
                if not (yield from source.pass_on(self.value_end, self._trimmed(partial(_quote, call)))):
                    return
                call.write('"')
            else:
                text = yield from source.until(self.value_end)
                if text is None:
                    call.write(source.rest(self.stop, self.value_end))
                    return
                call.write(tagged_arguments.typed(text[0].removesuffix("\n"), types))
        yield from source.space()
        closed = yield from source.literal(self.function_end)
        if not tool.custom and (closed or not source.ended):
            call.write("}" if written else "{}")

    def _read_key(self, source: TextSource) -> Wait[str | None]:
        """Read the name of a parameter up to its value; None if none follows."""
        yield from source.space()
        mark = source.mark()
        if not (yield from source.literal(self.parameter)):
            return None
        name = yield from source.until(self.key_end, limit=NAME_LIMIT)
        if name is not None and self.value:
            yield from source.space()
        if name is None or not (yield from source.literal(self.value)):
            source.back(mark)
            return None
        if self.own_lines:
            yield from source.literal("\n")
        return name[0]

    def _trimmed(self, write: Callable[[str], None]) -> Callable[[str], None]:
        return _Line(write).write if self.own_lines else write

    # --- The grammar ---

    def call(self, lark: Lark, tool: Tool, checked: bool) -> str:
        """Return the expression of one call, as `Layout.call`."""

        def parameter(name: str, schema: Mapping[str, Any]) -> str:
            head = f"{self.parameter}{name}{self.key_end}"
            head += (f"\n{self.value}" if self.value else "") + ("\n" if self.own_lines else "")
            if tool.grammar is not None:
                value = f"{lark.input(tool, tool.grammar)} {lark.literal(self.stop)}"
            else:
                value = self._value(lark, tool, schema, schema, f"/properties/{name}")
            line_end = lark.literal("\n")
            return f"{lark.literal(head)} {value} {line_end}"

        head = lark.literal(f"{self.function}{tool.name}{self.name_end}\n")
        return f"{head} {members(lark, tool, checked, parameter)} {lark.literal(self.function_end)}"

    def _value(
        self, lark: Lark, tool: Tool, schema: Mapping[str, Any], root: Mapping[str, Any], path: str
    ) -> str:
        """Return the grammar of a value and its end. `path` leads to the schema in that of `tool`."""
        end = lark.literal(self.stop)
        if isinstance(target := tagged_arguments.resolved(schema.get("$ref"), root), Mapping):
            return self._value(lark, tool, target, root, schema["$ref"].partition("#")[2])
        if "enum" in schema or "const" in schema:
            alternatives = schema.get("enum", [schema.get("const")])
            texts = [
                alternative if isinstance(alternative, str) else tagged_arguments.dumped(alternative)
                for alternative in alternatives
            ]
            return f"({' | '.join(map(lark.literal, texts))}) {end}"
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                parts = enumerate(schema[key])
                alternatives = [
                    self._value(lark, tool, part, root, f"{path}/{key}/{number}") for number, part in parts
                ]
                return f"({' | '.join(alternatives)})"
        types = tagged_arguments.types_of(schema, root)
        if types and "string" not in types:
            return f"{lark.json(definitions(root) | dict(schema), tool, path)} {end}"
        text = lark.terminal(self._text(tool, schema, path))
        if (token := lark.literal(self.stop)) != json.dumps(self.stop):
            return f"{text} {token}"  # a token ends it, which no text contains
        return lark.lazy(f"{text} {token}")

    def _text(self, tool: Tool, schema: Mapping[str, Any], path: str) -> str:
        """Return the terminal of a string, with those bounds that a terminal can express."""
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        last = f"~/{ANY_TEXT}{escaped(self.stop)}{ANY_TEXT}/"
        bodies = [f"/{ANY_TEXT}/ & {last}"]
        if least or most != "":
            bodies.insert(0, rf"/(?s:.{{{least},{most}}})/ & {last}")
        pattern = ANCHORED.fullmatch(str(schema.get("pattern", "")))
        if pattern is not None:
            bodies.insert(0, f"{regex(pattern[1])} & {bodies[0]}")
        elif tool.strict and "pattern" in schema:
            raise not_enforced(tool, f"at {path}/pattern: it does not begin with '^' and end with '$'")
        if tool.strict and "format" in schema:
            raise not_enforced(tool, f"at {path}/format: a string has a format")
        return first(bodies[:1] if tool.strict else bodies, f"{place_of(tool)}at {path}: ")


class _Line:
    """Passes on text without a trailing line break."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._pass = write
        self._line_break = ""

    def write(self, text: str) -> None:
        text = self._line_break + text
        self._line_break = "\n" if text.endswith("\n") else ""
        self._pass(text.removesuffix("\n"))


def _quote(call: OpenCall, text: str) -> None:
    call.write(json.dumps(text, ensure_ascii=False)[1:-1])


QWEN = Tags(
    start="<tool_call>",
    function="<function=",
    name_end=">",
    parameter="<parameter=",
    key_end=">",
    value_end="</parameter>",
    function_end="</function>",
    end="</tool_call>",
    own_lines=True,
)

GLM = Tags(
    start="<tool_call>",
    parameter="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    function_end="</tool_call>",
)

MINIMAX = Tags(
    start="<minimax:tool_call>",
    function='<invoke name="',
    name_end='">',
    parameter='<parameter name="',
    key_end='">',
    value_end="</parameter>",
    function_end="</invoke>",
    end="</minimax:tool_call>",
)

QWEN3_CODER = ToolFamily(
    name="qwen3_coder",
    keeps=frozenset({QWEN.start, QWEN.end}),
    read=lambda source: QWEN.read(source, QWEN.start, QWEN.function),
    layout=Layout(
        triggers=(QWEN.start, QWEN.function),
        opening=f"{QWEN.start}\n",
        call=QWEN.call,
        closing=f"\n{QWEN.end}",
        between="\n",
    ),
)

GLM45 = ToolFamily(
    name="glm45",
    keeps=frozenset({GLM.start, GLM.parameter, GLM.key_end, GLM.value, GLM.value_end, GLM.function_end}),
    read=lambda source: GLM.read(source, GLM.start),
    layout=Layout(triggers=(GLM.start,), opening=GLM.start, call=GLM.call, closing="", between="\n"),
)

MINIMAX_M2 = ToolFamily(
    name="minimax_m2",
    keeps=frozenset({MINIMAX.start, MINIMAX.end}),
    read=lambda source: MINIMAX.read(source, MINIMAX.start),
    layout=Layout(
        triggers=(MINIMAX.start,),
        opening=f"{MINIMAX.start}\n",
        call=MINIMAX.call,
        separator="\n",
        closing=f"\n{MINIMAX.end}",
    ),
)
