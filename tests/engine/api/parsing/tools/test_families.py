"""Names of families, and which one a chat template speaks."""

from __future__ import annotations

import json

import pytest

from baton_api.errors import SetupError
from baton_engine.api.parsing.tools.families import ALIASES, FAMILIES, GENERIC, detect, family
from tests.engine.api.parsing.tools.answers import deepseek
from tests.tokenizers import npm_tokenizer


@pytest.mark.parametrize("name", FAMILIES)
def test_family_has_its_name(name: str) -> None:
    assert family(name).name == name


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("qwen", "hermes"),
        ("qwen25", "hermes"),
        ("llama3_json", "llama3"),
        ("qwen3_xml", "qwen3_coder"),
        ("deepseekv3", "deepseek_v3"),
        ("glm47", "glm45"),
        ("llama4_pythonic", "llama4_pythonic"),
        ("", "hermes"),
    ],
)
def test_names_of_other_servers_are_known(alias: str, name: str) -> None:
    assert family(alias).name == name


def test_family_aliases_name_families_and_hide_none() -> None:
    assert set(ALIASES.values()) <= set(FAMILIES)
    assert not ALIASES.keys() & FAMILIES.keys()


def test_family_unknown_name_lists_all_names() -> None:
    with pytest.raises(SetupError, match=r"'kimi_k9'.*hermes.*pythonic"):
        family("kimi_k9")


TEMPLATES = {
    "{% if tools %}<tool_call>{% endif %}": "hermes",
    "{% if tools %}<tool_call>\n<function=f>\n<parameter=p>{% endif %}": "qwen3_coder",
    "{{ tools }}[TOOL_CALLS] [": "mistral",
    "{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]": "mistral_v11",
    "{{ tool_calls }}" + deepseek("tool calls begin") + "```json": "deepseek_v3",
    "{{ tool_calls }}" + deepseek("tool calls begin"): "deepseek_v31",
    """<|start_header_id|>{{ tools }}'"parameters": '""": "llama3",
    "<|start_header_id|>{{ tools }}[func_name1(params_name1=params_value1)]": "pythonic",
    "<|python_start|>{{ tools }}[func_name1(params_name1=params_value1)]": "llama4_pythonic",
    "{% if tools %}<tool_call>{{ name }}<arg_key>{% endif %}": "glm45",
    '{% if tools %}<minimax:tool_call><invoke name="f"><parameter name="p">{% endif %}': "minimax_m2",
    "{{ tools }}": "",
    "<tool_call>": "",
    "": "",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_detect_template_gives_its_family(template: str) -> None:
    assert detect(template) == TEMPLATES[template]


@pytest.mark.parametrize(
    ("model", "name"),
    [("qwen3", "hermes"), ("deepseek_v3", "deepseek_v3"), ("llama3_1", ""), ("gemma3", "")],
)
def test_templates_of_real_models_say_so(model: str, name: str) -> None:
    settings = json.loads((npm_tokenizer(model) / "tokenizer_config.json").read_text())
    assert detect(settings["chat_template"]) == name


def test_family_keeps_its_trigger_tokens_in_the_text() -> None:
    for one in FAMILIES.values():
        marks = [mark for mark in one.layout.triggers if not mark.startswith("<function")]
        assert set(marks) <= one.keeps


def test_family_generic_is_hermes() -> None:
    assert GENERIC.name == "hermes"
