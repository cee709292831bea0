"""
Tool calls as `{"name": "f", "parameters": {...}}`: Llama 3.1, 3.2 and 3.3.

A call is the whole answer, or follows `<|python_tag|>` anywhere. Semicolons separate several calls, which
only some templates support. JSON that does not name a tool is text.
"""

from __future__ import annotations

from functools import partial

from baton_engine.api.parsing.tools.arguments import read_named
from baton_engine.api.parsing.tools.family import ToolFamily
from baton_engine.api.parsing.tools.grammar import Layout
from baton_engine.api.parsing.tools.hermes import object_call
from baton_engine.api.parsing.tools.source import Reading, TextSource, Wait

TAG = "<|python_tag|>"


def read(source: TextSource) -> Reading:
    yield from _read_calls(source)
    while (yield from source.find(TAG)):
        if not (yield from _read_calls(source)):
            source.words(TAG)


def _read_calls(source: TextSource) -> Wait[bool]:
    mark = source.mark()
    yield from source.space()
    if not (yield from read_named(source)):
        source.back(mark)
        return False
    more = True
    while more:
        yield from source.behind_call("};,")
        more = yield from read_named(source)
    return True


LLAMA3 = ToolFamily(
    name="llama3",
    keeps=frozenset({TAG}),
    read=read,
    layout=Layout(
        triggers=(TAG,),
        bare="{",
        opening="",
        call=partial(object_call, arguments="parameters"),
        separator="; ",
        closing="",
    ),
)
