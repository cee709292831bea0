"""Conversations to prompts: as transformers renders them, as templates want them, and within bounds."""

from __future__ import annotations

import functools
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from baton_api.errors import InvalidRequest, SetupError
from baton_engine.api.chat.messages import read_messages
from baton_engine.api.fields import Fields
from baton_engine.api.template import dialect, sandbox
from baton_engine.api.template.dialect import Dialect
from baton_engine.api.template.rendering import TemplateInput, render, render_apart
from baton_engine.api.template.sandbox import TemplateError
from baton_engine.api.template.templates import Templates, templates_of
from tests.engine.api.api import make_tokenizer
from tests.tokenizers import npm_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "How warm is it in Oslo?  "}
ANSWER = {"role": "assistant", "content": "Cold."}
THOUGHT = {"role": "assistant", "content": "Cold.", "reasoning_content": "It is winter."}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def called(id: str) -> dict[str, Any]:
    function = {"name": "look_up", "arguments": '{"city": "Oslo ☃"}'}
    call = {"id": id, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


CALL = called("call_1")
BROKEN_CALL = CALL["tool_calls"][0] | {"function": {"name": "look_up", "arguments": '{"city": '}}
BROKEN = CALL | {"tool_calls": [BROKEN_CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "-7 °C"}

TALKS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "a question": ([USER], {}),
    "a talk": ([SYSTEM, USER, ANSWER, USER], {}),
    "a talk without a prompt for more": ([USER, ANSWER], {"prompted": False}),
    "an answer that goes on": ([USER, ANSWER], {"continued": True, "prompted": False}),
    "an answer with a space at its end that goes on": (
        [USER, ANSWER | {"content": "Cold, and "}], {"continued": True, "prompted": False}),
    "no thinking": ([USER], {"variables": {"enable_thinking": False}}),
    "earlier thoughts": ([USER, THOUGHT, USER], {}),
    "tools": ([SYSTEM, USER], {"tools": [TOOL]}),
    "a call and its result": ([USER, CALL, RESULT], {"tools": [TOOL]}),
    "a call, its result, and on": ([USER, CALL, RESULT, ANSWER, USER], {"tools": [TOOL]}),
}  # fmt: skip

WANTS: dict[str, Any] = {
    "qwen3": {"null": "", "objects": True},
    "deepseek_v3": {"null": None, "objects": False},
    "llama3_1": {"null": "", "objects": True},
    "gemma3": {"null": "", "objects": True},
}
"""The value that each real template needs in place of null, and whether arguments are objects."""

CANNOT = {
    ("gemma3", "a call and its result"), ("gemma3", "a call, its result, and on"),
}  # fmt: skip
"""Its template says that only users and assistants take turns."""


@functools.cache
def tokenizer(name: str) -> Any:
    """The real one's template and special tokens, without its words."""
    config = json.loads((npm_tokenizer(name) / "tokenizer_config.json").read_text())
    specials = {key: config[key] for key in ("bos_token", "eos_token", "unk_token") if config.get(key)}
    specials = {key: token if isinstance(token, str) else token["content"] for key, token in specials.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=Backend(models.BPE()), chat_template=config.get("chat_template"), **specials
    )


def conversation(messages: list[dict[str, Any]], **fields: Any) -> TemplateInput:
    return TemplateInput(messages=read_messages(Fields({"messages": messages})), **fields)


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", WANTS)
def test_template_real_model_renders_as_transformers(name: str, talk: str) -> None:
    theirs = tokenizer(name)
    messages, fields = TALKS[talk]
    ours = conversation(messages, **fields)
    adapted = dialect.learn(
        sandbox.read(theirs.chat_template), tuple(sorted(theirs.special_tokens_map.items()))
    ).adapt(ours.messages)
    for message in adapted:
        if "tool_calls" in message:
            assert message["content"] == WANTS[name]["null"]
            arguments = message["tool_calls"][0]["function"]["arguments"]
            assert isinstance(arguments, dict) == WANTS[name]["objects"]

    def rendered() -> str:
        return render(theirs.chat_template, ours, theirs.special_tokens_map)

    if (name, talk) in CANNOT:
        with pytest.raises(TemplateError, match="alternate"):
            rendered()
        return
    options = {
        "tools": fields.get("tools"),
        "add_generation_prompt": ours.prompted,
        "continue_final_message": ours.continued,
        **ours.variables,
    }
    if any(message["content"] is None for message in adapted):  # `apply_chat_template` would omit it
        (expected,), _ = render_jinja_template(
            [adapted], chat_template=theirs.chat_template, **options, **theirs.special_tokens_map
        )
    else:
        expected = theirs.apply_chat_template(adapted, tokenize=False, **options)
    assert rendered() == expected


def test_template_tool_call_and_result_are_in_the_prompt() -> None:
    for name in ("qwen3", "deepseek_v3"):
        theirs = tokenizer(name)
        prompt = render(theirs.chat_template, conversation([USER, CALL, RESULT]), theirs.special_tokens_map)
        assert "look_up" in prompt and '{"city": "Oslo ☃"}' in prompt and "-7 °C" in prompt


def test_template_missing_names_the_flag() -> None:
    with pytest.raises(InvalidRequest, match="--chat-template"):
        Templates({}, {}).render(conversation([USER]))


PARTS = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
)
TEXTS = "{% for m in messages %}{{ m.content + '.' }}{% endfor %}"
CARELESS = "{% for m in messages %}{{ m.content }}{% endfor %}"
SHORT = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% if c.id|length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}"
    "{{ c.id }}={{ c.function.name }}{{ c.function.arguments|tojson }}{% endfor %}"
    "{% if m.role == 'tool' %}{{ m.tool_call_id }}>{% endif %}{{ m.content }}{% endfor %}"
)
ARGUMENTS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({{ c.function.arguments|tojson }}){% endfor %}{% endfor %}"
)
TWO = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
DIALECTS: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "texts only": (TEXTS, TWO, "a\nb."),
    "parts only": (PARTS, [{"role": "user", "content": "a"}], "[a]"),
    "both, given parts": (BOTH, TWO, "[a][b]"),
    "both, given a text": (BOTH, [{"role": "user", "content": "a"}], "a"),
    "one that would print the list": (CARELESS, TWO, "a\nb"),
    "a developer that it does not know": (
        "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}",
        [{"role": "developer", "content": "a"}], "systema"),
    "a developer that it knows": (
        "{% for m in messages %}{{ m.role if m.role == 'developer' else 'x' }}{% endfor %}",
        [{"role": "developer", "content": "a"}], "developer"),
    "arguments of a broken call, as text": (ARGUMENTS, [BROKEN], 'look_up("{\\"city\\": ")'),
    "arguments of a broken call, where only an object will do": (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{% for k, v in c.function.arguments.items() %}{{ k }}{% endfor %}{% endfor %}{% endfor %}",
        [BROKEN], "look_up"),
    "arguments of a broken call, where they are JSON": (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}",
        [BROKEN], 'look_up{"city": '),
    "thoughts, as others call them": (
        "{% for m in messages %}{{ m.thinking }}/{{ m.reasoning }}{% endfor %}",
        [THOUGHT], "It is winter./It is winter."),
}  # fmt: skip


@pytest.mark.parametrize("name", DIALECTS)
def test_template_dialect_gets_messages_in_its_form(name: str) -> None:
    source, messages, expected = DIALECTS[name]
    assert render(source, conversation(messages), {}) == expected


def test_template_short_call_ids_match_their_results() -> None:
    prompt = render(SHORT, conversation([USER, CALL, RESULT]), {})
    call, _, _ = prompt.removeprefix(USER["content"]).partition("=")
    assert len(call) == 9 and call.isalnum()
    assert f"{call}>-7 °C" in prompt
    own = [CALL | {"tool_calls": [CALL["tool_calls"][0] | {"id": "abcdefghi"}]}]
    assert render(SHORT, conversation(own), {}).startswith("abcdefghi=")


def test_dialect_without_calls_is_the_default() -> None:
    assert dialect.learn(sandbox.read(CARELESS), ()) == Dialect()


FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }};{% endfor %}"
)
STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles alternate') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }};{% endfor %}"
)
PLACES: dict[str, tuple[str, str, str]] = {
    "one system message at the beginning": (FIRST, "s u a u s", "s:0;u:1;a:2;u:3\n\n4;"),
    "several at the beginning": (FIRST, "s s u", "s:0\n\n1;u:2;"),
    "one before the assistant": (FIRST, "s u s a u", "s:0;u:1\n\n2;a:3;u:4;"),
    "one between a user and the next": (FIRST, "u s u", "u:0\n\n1;u:2;"),
    "one after the assistant": (FIRST, "u a s u", "u:0;a:1;u:2\n\n3;"),
    "no system message at all": (STRICT, "s u a s u", "u:0\n\n1;a:2;u:3\n\n4;"),
    "users that alternate": (STRICT, "u u a u u", "u:0\n\n1;a:2;u:3\n\n4;"),
    "assistants that alternate": (STRICT, "u a a u", "u:0;a:1\n\n2;u:3;"),
    "anything anywhere": (CARELESS, "s u s s u u a", "0123456"),
}
ROLES = {"s": "system", "u": "user", "a": "assistant"}


def talk_of(letters: str) -> list[dict[str, Any]]:
    return [{"role": ROLES[letter], "content": str(place)} for place, letter in enumerate(letters.split())]


@pytest.mark.parametrize("name", PLACES)
def test_template_gets_system_messages_where_it_takes_them(name: str) -> None:
    source, letters, expected = PLACES[name]
    assert render(source, conversation(talk_of(letters)), {}) == expected


@pytest.mark.parametrize("seed", range(50))
def test_template_strict_shows_every_message_in_order_and_keeps_the_prefix(seed: int) -> None:
    rng = random.Random(seed)
    messages = talk_of(" ".join(rng.choice("sua") for _ in range(rng.randint(1, 12))))
    messages = [{"role": "user", "content": "start"}, *messages]
    for source in (FIRST, STRICT):
        prompt = render(source, conversation(messages), {})
        places = [prompt.index(message["content"]) for message in messages]
        assert places == sorted(places)
        longer = render(source, conversation([*messages, ANSWER, USER]), {})
        assert longer.startswith(prompt.removesuffix(";"))


@pytest.mark.parametrize("name", WANTS)
def test_template_real_model_takes_what_agents_send(name: str) -> None:
    """Two system messages, two messages of a user, and a system message at the end."""
    theirs = tokenizer(name)
    rule, task, later = (
        {"role": role, "content": text}
        for role, text in (("system", "Be brief."), ("user", "My task."), ("system", "Use tabs."))
    )
    messages = [SYSTEM, rule, USER, task, ANSWER, USER, later]
    prompt = render(theirs.chat_template, conversation(messages), theirs.special_tokens_map)
    assert all(message["content"].strip() in prompt for message in messages)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set ns = namespace(s='xx') %}{% for i in range(99) %}{% set ns.s = ns.s OP ns.s %}{% endfor %}"
RUNAWAY: dict[str, str] = {
    "loops in loops": ENDLESS,
    "loops that find nothing": (
        "{% for a in range(999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}"),
    "a macro that calls itself twice": (
        "{% macro f(x) %}{% if x %}{{ f(x-1) }}{{ f(x-1) }}{% endif %}{% endmacro %}{{ f(99) }}"),
    "a loop over itself": "{% for x in [range(999)] recursive %}{{ loop(range(999)) }}{% endfor %}",
    "a huge range": "{% for a in range(10 ** 9) %}{% endfor %}",
    "a text times a number": "{{ 'x' * 10 ** 12 }}",
    "a number times a text": "{{ 10 ** 12 * 'x' }}",
    "a list times a number": "{{ ([1] * 10 ** 12)|length }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "a text that doubles by +": DOUBLING.replace("OP", "+"),
    "a text that doubles by ~": DOUBLING.replace("OP", "~"),
    "a width in a format": "{{ '%999999999d' % 1 }}",
    "a width from outside a format": "{{ '%*d' % (999999999, 1) }}",
    "a width in a method": "{{ '{:999999999}'.format(1) }}",
    "a width in a filter": "{{ '%999999999d'|format(1) }}",
    "padding": "{{ 'x'.ljust(10 ** 10) }}",
    "centring": "{{ 'x'|center(10 ** 10) }}",
    "a date": "{{ strftime_now('%999999999d') }}",
    "much output": "{% for a in range(9999) %}{{ 'x' * 999999 }}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("name", RUNAWAY)
def test_template_endless_is_stopped(name: str) -> None:
    before = time.process_time()
    with pytest.raises(TemplateError):
        sandbox.read(RUNAWAY[name]).run({})
    assert time.process_time() - before < sandbox.MOST_SECONDS + 1


HOSTILE: dict[str, str] = {
    "what Python is made of": "{{ ''.__class__.__mro__ }}",
    "what is behind a function": "{{ raise_exception.__globals__.os }}",
    "an attribute by its name": "{{ ''|attr('__class__')|string + messages.__init__ }}",
    "a file": "{% include '/etc/passwd' %}",
    "a module": "{% import 'os' as os %}",
    "the messages themselves": "{{ messages.append(1) }}",
    "a namespace's workings": "{{ namespace(__class__=1) }}",
    "a namespace's workings, later": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "the meter": "{{ self._TemplateReference__context }}{{ 1 // 0 }}",
    "a format that reaches inside": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "no template": "{% if %}",
    "nesting without end": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "its own error": "{{ raise_exception('x' * 5000) }}",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_template_hostile_is_confined_with_a_short_error(name: str) -> None:
    with pytest.raises(TemplateError) as caught:
        sandbox.read(HOSTILE[name]).run({"messages": []})
    assert 0 < len(str(caught.value)) <= 220
    assert "/" not in str(caught.value).replace("/etc/passwd", "")
    assert "\n" not in str(caught.value)


def test_render_apart_equals_render_in_process() -> None:
    talk = conversation([USER, CALL, RESULT], variables={"mood": "glad ☃"})
    source = SHORT + "{{ mood }}{{ bos_token }}"
    assert render_apart(source, talk, {"bos_token": "<s>"}) == render(source, talk, {"bos_token": "<s>"})
    with pytest.raises(TemplateError, match="no such talk"):
        render_apart("{{ raise_exception('no such talk') }}", talk, {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ('x' * 999999).replace('x', 'y' * 999999)|length }}",
        "{{ ('x' * 99999)|map('upper')|join('y' * 999999) }}",
    ],
    ids=["replace", "join"],
)
def test_render_apart_memory_and_output_are_bounded(source: str) -> None:
    with pytest.raises(TemplateError, match=r"memory|longer"):
        render_apart(source, conversation([USER]), {})


def test_tools_get_the_template_that_the_model_has_for_them() -> None:
    templates = Templates({"default": "plain", "tool_use": "with {{ tools|length }}"}, {})
    assert templates.render(conversation([USER])) == "plain"
    assert templates.render(conversation([USER], tools=[TOOL])) == "with 1"
    assert Templates({"default": "plain"}, {}).render(conversation([USER], tools=[TOOL])) == "plain"


def test_templates_of_text_or_file_is_chosen(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("from a file: {{ messages[0].content }}{{ eos_token }}", encoding="utf-8")
    tokenizer = make_tokenizer()
    hi = conversation([{"role": "user", "content": "Hi"}])
    assert templates_of(tokenizer, str(file)).render(hi) == "from a file: Hi<|end|>"
    assert templates_of(tokenizer, "{{ messages|length }}").render(hi) == "1"
    assert templates_of(tokenizer).render(hi) == "<|user|>Hi<|end|><|assistant|>"


@pytest.mark.parametrize("chosen", ["/no/such/file.jinja", "{% if %}"])
def test_templates_of_invalid_template_fails_the_start(chosen: str) -> None:
    with pytest.raises(SetupError, match="--chat-template"):
        templates_of(make_tokenizer(), chosen)
