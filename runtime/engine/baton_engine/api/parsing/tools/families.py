"""
Formats of tool calls by name and alias, and detection of the format that a chat template uses.

If neither the setting nor the chat template specifies a format, calls use `hermes`: forced calls work with
every model.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton_api.errors import SetupError
from baton_engine.api.parsing.tools import deepseek
from baton_engine.api.parsing.tools.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from baton_engine.api.parsing.tools.family import ToolFamily
from baton_engine.api.parsing.tools.objects import HERMES, LLAMA3, MISTRAL, MISTRAL_V11
from baton_engine.api.parsing.tools.pythonic import LLAMA4_PYTHONIC, PYTHONIC
from baton_engine.api.parsing.tools.tagged_calls import GLM, GLM45, MINIMAX, MINIMAX_M2, QWEN, QWEN3_CODER
from baton_engine.model import families as models

FAMILIES: Mapping[str, ToolFamily] = {
    family.name: family
    for family in (
        HERMES, QWEN3_CODER, LLAMA3, PYTHONIC, LLAMA4_PYTHONIC, MISTRAL, MISTRAL_V11, DEEPSEEK_V3,
        DEEPSEEK_V31, GLM45, MINIMAX_M2,
    )
}  # fmt: skip

ALIASES: Mapping[str, str] = {
    "qwen3_xml": "qwen3_coder", "qwen3-coder": "qwen3_coder",
    "llama3_json": "llama3", "llama4_json": "llama3",
    "llama4": "llama4_pythonic",
    "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31", "deepseek-v3": "deepseek_v3",
    **{alias: name for family in models.FAMILIES for alias, name in family.tool_parser_aliases.items()},
}  # fmt: skip
"""Names of SGLang and vLLM, and of model families."""

TAGGED = {QWEN3_CODER.name: QWEN, GLM45.name: GLM, MINIMAX_M2.name: MINIMAX}

GENERIC = HERMES


def family(name: str) -> ToolFamily:
    """Return the family with this name or alias; the generic one for an empty name. Raises SetupError."""
    if not name:
        return GENERIC
    match = FAMILIES.get(ALIASES.get(name, name))
    if match is None:
        names = ", ".join(sorted([*FAMILIES, *ALIASES]))
        raise SetupError(f"Unknown tool call parser: {name[:60]!r}. Supported: {names}.")
    return match


def detect(chat_template: str) -> str:
    """Return the name of the family whose format `chat_template` uses; empty if it is unknown."""
    if "tools" not in chat_template and "tool_calls" not in chat_template:
        return ""
    for parser, tags in TAGGED.items():
        if all(tag in chat_template for tag in (tags.start, tags.function, tags.parameter)):
            return parser
    if "[TOOL_CALLS]" in chat_template:
        return MISTRAL_V11.name if "[ARGS]" in chat_template else MISTRAL.name
    if deepseek.CALLS in chat_template:
        return DEEPSEEK_V3.name if "```json" in chat_template else DEEPSEEK_V31.name
    if "<tool_call>" in chat_template:
        return HERMES.name
    if "func_name1(" in chat_template or "tool_call.name + '('" in chat_template:
        return LLAMA4_PYTHONIC.name if "<|python_start|>" in chat_template else PYTHONIC.name
    if "<|start_header_id|>" in chat_template and '"parameters": ' in chat_template:
        return LLAMA3.name
    return ""
