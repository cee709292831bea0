"""
The variables that a request or a person sets for the chat template.

`chat_template_kwargs` are handed on, but for names that have a meaning of their own. `reasoning_effort`
becomes what templates know: the effort, and whether to think at all, which some call `enable_thinking` and
some `thinking`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton_api import limits
from baton_api.errors import UNSUPPORTED_PARAMETER, InvalidRequest
from baton_engine.server.fields import Fields, shown

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")
SWITCHES = ("enable_thinking", "thinking")
RESERVED = frozenset({
    "messages", "conversation", "tools", "functions", "documents", "template", "chat_template", "loop",
    "self", "tokenize", "tokenizer", "add_generation_prompt", "continue_final_message", "raise_exception",
    "strftime_now", "namespace", "range", "dict", "cycler", "joiner", "lipsum", "caller", "varargs", "kwargs",
})  # fmt: skip
"""What a template gets from this server alone, special tokens aside."""


def read_variables(
    fields: Fields, defaults: Mapping[str, Any], specials: Mapping[str, str]
) -> dict[str, Any]:
    """`defaults`, over them what the effort means, and over that what the request says itself."""
    given = dict(fields.mapping("chat_template_kwargs") or {})
    given.pop("chat_template", None)  # see `read_template`
    most = limits.TEMPLATE_KWARGS.most
    if len(given) > most:
        fields.wrong_value("chat_template_kwargs", f"Expected at most {most}, but got {len(given)}")
    for name in given:
        if name in RESERVED or name in specials or not name.isidentifier() or name.startswith("_"):
            fields.wrong_value("chat_template_kwargs", f"{shown(name)} cannot be set by a request")
    effort = fields.choice("reasoning_effort", EFFORTS)
    meant: dict[str, Any] = {}
    if effort is not None:
        meant = {"reasoning_effort": "max" if effort == "ultra" else effort}
        meant |= dict.fromkeys(SWITCHES, effort != "none")
    return _both(defaults) | meant | _both(given)


def read_template(fields: Fields, trusted: bool) -> str | None:
    """The template that the request brings, by itself or among the variables. Raises InvalidRequest."""
    inner = Fields(fields.mapping("chat_template_kwargs") or {}, fields.param("chat_template_kwargs"))
    for place in (fields, inner):
        source = place.text("chat_template")
        if source is None:
            continue
        if not trusted:
            raise InvalidRequest(
                f"'{place.param('chat_template')}' is not allowed: this server runs no such templates. "
                "Start it with --trust-request-chat-template if those who send requests may be trusted.",
                param=place.param("chat_template"),
                code=UNSUPPORTED_PARAMETER,
            )
        return source
    return None


def _both(given: Mapping[str, Any]) -> dict[str, Any]:
    """With both names of the switch, where it has one."""
    switches = [name for name in SWITCHES if given.get(name) is not None]
    if len(switches) != 1:
        return dict(given)
    return dict(given) | dict.fromkeys(SWITCHES, given[switches[0]])
