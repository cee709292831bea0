"""Each family's reader splits an answer into parts, the same however the text is cut."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace

import pytest

from baton_engine.api.parsing.parts import AnswerText, Arguments, ToolCall
from baton_engine.api.parsing.tools.families import FAMILIES, family
from baton_engine.api.parsing.tools.toolbox import Toolbox
from tests.engine.api.parsing.tools.answers import BOX, calls_of, deepseek, named, read, words_of

D = deepseek
CALLS, CALLS_END = D("tool calls begin"), D("tool calls end")
CALL, CALL_END, SEP = D("tool call begin"), D("tool call end"), D("tool sep")


@dataclass(frozen=True)
class Case:
    title: str
    family: str
    text: str
    calls: list[tuple[str, str]]
    words: str = ""


ROME = 'weather {"city": "Rome", "days": 3}'
NOW = "now {}"

CASES = [
    # --- hermes ---
    Case(
        "two calls",
        "hermes",
        "Let me see.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        named(ROME, NOW),
        "Let me see.",
    ),
    Case(
        "words between and behind",
        "hermes",
        'a <tool_call>{"name": "now", "arguments": {}}</tool_call> b '
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n\nc\n',
        named(NOW, NOW),
        "a b c\n",
    ),
    Case(
        "the mark inside of a string",
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call>\\"}"}}</tool_call>',
        named('weather {"city": "</tool_call>\\"}"}'),
    ),
    Case(
        "arguments before the name",
        "hermes",
        '<tool_call>{"arguments": {"city": "Rome", "days": 3}, "name": "weather"}</tool_call>',
        named(ROME),
    ),
    Case(
        "no arguments",
        "hermes",
        '<tool_call>{"name": "now"}</tool_call>',
        named(NOW),
    ),
    Case(
        "null for no arguments",
        "hermes",
        '<tool_call>{"name": "now", "arguments": null}</tool_call>',
        named(NOW),
    ),
    Case(
        "JSON within JSON",
        "hermes",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\", \\"days\\": 3}"}</tool_call>',
        named(ROME),
    ),
    Case(
        "members beside",
        "hermes",
        '<tool_call>{"type": "function", "id": "1", "name": "now", "arguments": {}, "x": [1]}</tool_call>',
        named(NOW),
    ),
    Case(
        "a bracket too much",
        "hermes",
        '<tool_call>{"name": "now", "arguments": {}}}</tool_call>',
        named(NOW),
    ),
    Case(
        "a bracket too few",
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Rome"</tool_call> and',
        named('weather {"city": "Rome"'),
        "and",
    ),
    Case(
        "two in one block",
        "hermes",
        '<tool_call>\n{"name": "now", "arguments": {}}\n{"name": "now", "arguments": {}}\n</tool_call>',
        named(NOW, NOW),
    ),
    Case(
        "no end",
        "hermes",
        '<tool_call>{"name": "now", "arguments": {}}',
        named(NOW),
    ),
    Case(
        "cut within the arguments",
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Ro',
        named('weather {"city": "Ro'),
    ),
    Case(
        "cut within the name",
        "hermes",
        'x <tool_call>{"name": "wea',
        [],
        'x <tool_call>{"name": "wea',
    ),
    Case(
        "cut within the mark",
        "hermes",
        "x <tool_c",
        [],
        "x <tool_c",
    ),
    Case(
        "an unknown tool",
        "hermes",
        '<tool_call>{"name": "fly", "arguments": {}}</tool_call>',
        [],
        '<tool_call>{"name": "fly", "arguments": {}}</tool_call>',
    ),
    Case(
        "no object",
        "hermes",
        "Write <tool_call> for a call.",
        [],
        "Write <tool_call> for a call.",
    ),
    Case(
        "a false start",
        "hermes",
        '<tool_call><tool_call>{"name": "now"}</tool_call>',
        named(NOW),
        "<tool_call>",
    ),
    Case(
        "a custom tool",
        "hermes",
        '<tool_call>{"name": "write", "arguments": '
        '{"input": "a\\n\\"b\\" \\ud83d\\ude00 \\u00e9"}}</tool_call>',
        named('write a\n"b" \N{GRINNING FACE} \N{LATIN SMALL LETTER E WITH ACUTE}'),
    ),
    Case(
        "a custom tool with half a character",
        "hermes",
        '<tool_call>{"name": "write", "arguments": {"input": "\\ud83d!"}}</tool_call>',
        named("write \ufffd!"),
    ),
    Case(
        "a custom tool with text alone",
        "hermes",
        '<tool_call>{"name": "write", "arguments": "a b"}</tool_call>',
        named("write a b"),
    ),
    Case(
        "a custom tool with raw text",
        "hermes",
        '<tool_call>\n{"name": "write", "arguments": <input>\nSELECT "a" }\n</input>}\n</tool_call>',
        named('write SELECT "a" }'),
    ),
    Case(
        "words on both sides, parted behind",
        "hermes",
        'a<tool_call>{"name": "now"}</tool_call> \n\nb',
        named(NOW),
        "a \n\nb",
    ),
    Case(
        "words behind alone",
        "hermes",
        '\n<tool_call>{"name": "now"}</tool_call>\n\nb',
        named(NOW),
        "b",
    ),
    # --- llama3 ---
    Case(
        "the whole answer",
        "llama3",
        '{"name": "weather", "parameters": {"city": "Rome", "days": 3}}',
        named(ROME),
    ),
    Case(
        "several",
        "llama3",
        '\n{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
        named(NOW, NOW),
    ),
    Case(
        "behind its tag",
        "llama3",
        'Well.<|python_tag|>{"type": "function", "name": "now", "parameters": {}}',
        named(NOW),
        "Well.",
    ),
    Case(
        "JSON that calls nothing",
        "llama3",
        ' {"answer": {"name": "now"}}\n',
        [],
        ' {"answer": {"name": "now"}}\n',
    ),
    Case(
        "a call behind words is words",
        "llama3",
        'So: {"name": "now", "parameters": {}}',
        [],
        'So: {"name": "now", "parameters": {}}',
    ),
    Case(
        "a tag without a call",
        "llama3",
        "<|python_tag|>print(1)",
        [],
        "<|python_tag|>print(1)",
    ),
    # --- pythonic ---
    Case(
        "a list",
        "pythonic",
        '[weather(city="Rome", days=3), now()]',
        named(ROME, NOW),
    ),
    Case(
        "literals",
        "pythonic",
        "[weather(city='it\\'s, (a) [b]', tags=['x', \"y\"], flag=True, limit=None, deep={'a': (1, -2.5)})]",
        named(
            'weather {"city": "it\'s, (a) [b]", "tags": ["x", "y"], "flag": true, "limit": null, '
            '"deep": {"a": [1, -2.5]}}'
        ),
    ),
    Case(
        "literals of JSON",
        "pythonic",
        "[weather(flag=true, limit=null)]",
        named('weather {"flag": true, "limit": null}'),
    ),
    Case(
        "what is no literal",
        "pythonic",
        "[weather(city=where() + 1)]",
        named('weather {"city": "where() + 1"}'),
    ),
    Case(
        "a list of other things",
        "pythonic",
        "[1, 2] and [now()]",
        [],
        "[1, 2] and [now()]",
    ),
    Case(
        "cut",
        "pythonic",
        '[weather(city="Rome", days=3), weather(city="Ro',
        named(ROME, 'weather {"city": "Ro'),
    ),
    Case(
        "a custom tool",
        "pythonic",
        '[write(input="a\\nb")]',
        named("write a\nb"),
    ),
    Case(
        "between tokens",
        "llama4_pythonic",
        "Hm. <|python_start|>[now()]<|python_end|>",
        named(NOW),
        "Hm.",
    ),
    # --- mistral ---
    Case(
        "an array",
        "mistral",
        'I see.[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome", "days": 3}, '
        '"id": "abcdefghi"}, '
        '{"name": "now", "arguments": {}}]',
        named(ROME, NOW),
        "I see.",
    ),
    Case(
        "names and arguments",
        "mistral_v11",
        '[TOOL_CALLS]weather[ARGS]{"city": "Rome", "days": 3}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}',
        named(ROME, NOW),
    ),
    Case(
        "without the second mark",
        "mistral",
        "[TOOL_CALLS]now{}",
        named(NOW),
    ),
    Case(
        "an unknown tool",
        "mistral",
        "[TOOL_CALLS]fly[ARGS]{}",
        [],
        "[TOOL_CALLS]fly[ARGS]{}",
    ),
    # --- deepseek ---
    Case(
        "fenced",
        "deepseek_v3",
        f'Ok.{CALLS}{CALL}function{SEP}weather\n```json\n{{"city": "Rome", "days": 3}}\n```{CALL_END}\n'
        f"{CALL}function{SEP}now\n```json\n{{}}\n```{CALL_END}{CALLS_END}",
        named(ROME, NOW),
        "Ok.",
    ),
    Case(
        "plain",
        "deepseek_v31",
        f'{CALLS}{CALL}weather{SEP}{{"city": "Rome", "days": 3}}{CALL_END}'
        f"{CALL}now{SEP}{{}}{CALL_END}{CALLS_END}",
        named(ROME, NOW),
    ),
    Case(
        "an unknown tool",
        "deepseek_v31",
        f"{CALLS}{CALL}fly{SEP}{{}}{CALL_END}{CALLS_END}",
        [],
        f"{CALLS}{CALL}fly{SEP}{{}}{CALL_END}{CALLS_END}",
    ),
    # --- qwen3_coder ---
    Case(
        "tags",
        "qwen3_coder",
        "Sure.\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        named(ROME, NOW),
        "Sure.",
    ),
    Case(
        "types",
        "qwen3_coder",
        '<function=weather>\n<parameter=city>\n"3"\n\n<b>\n</parameter>\n<parameter=tags>\n["a"]\n</parameter>\n'
        "<parameter=flag>\nTrue\n</parameter>\n<parameter=limit>\nnull\n</parameter>\n"
        "<parameter=other>\nx y\n"
        "</parameter>\n</function>",
        named(
            'weather {"city": "\\"3\\"\\n\\n<b>", "tags": ["a"], "flag": true, "limit": null, "other": "x y"}'
        ),
    ),
    Case(
        "a custom tool",
        "qwen3_coder",
        "<tool_call>\n<function=write>\n<parameter=input>\n\nprint('x')\n\n</parameter>\n</function>\n</tool_call>",
        named("write \nprint('x')\n"),
    ),
    Case(
        "cut",
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nRo",
        named('weather {"city": "Ro'),
    ),
    Case(
        "an unknown tool",
        "qwen3_coder",
        "<tool_call>\n<function=fly>\n</function>\n</tool_call>",
        [],
        "<tool_call>\n<function=fly>\n</function>\n</tool_call>",
    ),
    # --- glm45 ---
    Case(
        "tags",
        "glm45",
        "Sure.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        named(ROME, NOW),
        "Sure.",
    ),
    Case(
        "without lines, as GLM-4.7",
        "glm45",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>\nRome\n</arg_value><arg_key>tags</arg_key>"
        '<arg_value>["a"]</arg_value></tool_call><tool_call>now</tool_call>',
        named('weather {"city": "\\nRome\\n", "tags": ["a"]}', NOW),
    ),
    Case(
        "a custom tool",
        "glm45",
        "<tool_call>write\n<arg_key>input</arg_key>\n<arg_value>\nprint('x')\n</arg_value>\n</tool_call>",
        named("write \nprint('x')\n"),
    ),
    Case(
        "a name that another one begins with",
        "glm45",
        "<tool_call>nowhere\n</tool_call> <tool_call>now</tool_call>",
        named(NOW),
        "<tool_call>nowhere\n</tool_call>",
    ),
    # --- minimax_m2 ---
    Case(
        "tags",
        "minimax_m2",
        'Sure.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call>",
        named(ROME, NOW),
        "Sure.",
    ),
    Case(
        "an unknown tool",
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="fly">\n</invoke>\n</minimax:tool_call>',
        [],
        '<minimax:tool_call>\n<invoke name="fly">\n</invoke>\n</minimax:tool_call>',
    ),
]

IDS = [f"{case.family}-{case.title}" for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_reader_splits_words_and_calls(case: Case) -> None:
    parts = read(case.family, [case.text])
    assert calls_of(parts) == case.calls
    assert words_of(parts) == case.words


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_reader_result_is_independent_of_cuts(case: Case) -> None:
    whole = read(case.family, [case.text])
    assert read(case.family, case.text) == whole
    for place in range(1, len(case.text)):
        assert read(case.family, [case.text[:place], case.text[place:]]) == whole
    chance = random.Random(case.text)
    for _ in range(20):
        cuts = sorted(chance.choices(range(len(case.text)), k=chance.randrange(1, 9)))
        assert read(case.family, _cut(case.text, cuts)) == whole


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_reader_of_a_cut_answer_shows_no_part_of_a_call_as_words(case: Case) -> None:
    for place in range(len(case.text)):
        begun = case.text[:place]
        parts = read(case.family, [begun], cut=True)
        assert case.words.startswith(words_of(parts).rstrip())
        names = [name for name, _ in calls_of(parts)]
        assert names == [name for name, _ in case.calls[: len(names)]]
        assert read(case.family, begun, cut=True) == parts


def test_reader_of_a_cut_answer_keeps_the_arguments_so_far() -> None:
    for name, text, call in (
        ("hermes", '<tool_call>\n{"name": "now", "arguments": ', "now "),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Ro', 'weather {"city": "Ro'),
        ("hermes", '<tool_call>{"name": "write", "arguments": {"input": "a\\u00', "write a"),
        ("pythonic", '[weather(city="Rome", da', 'weather {"city": "Rome"'),
        ("pythonic", "[write(input='a", "write a"),
        (
            "qwen3_coder",
            "<tool_call>\n<function=weather>\n<parameter=days>\n12\n</para",
            'weather {"days": 12',
        ),
        ("qwen3_coder", "<tool_call>\n<function=write>\n<parameter=input>\na\n</param", "write a"),
        (
            "glm45",
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ro</arg_v",
            'weather {"city": "Ro',
        ),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="write">\n<parameter name="input">a</', "write a"),
        ("mistral_v11", "[TOOL_CALLS]now[AR", "now "),
    ):
        parts = read(name, [text], cut=True)
        assert (calls_of(parts), words_of(parts)) == (named(call), "")


def test_reader_of_an_answer_cut_in_a_name_has_no_call() -> None:
    parts = read("glm45", ["a <tool_call>now"], cut=True)
    assert (calls_of(parts), words_of(parts)) == ([], "a ")


def _cut(text: str, cuts: list[int]) -> list[str]:
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


PIECES = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "now"',
    '{"name": "weather", "arguments": ',
    '{"arguments": ',
    "}",
    "{",
    "[",
    "]",
    '"',
    "\\",
    "\\ud83d",
    "\\u00",
    ",",
    ":",
    " ",
    "\n",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "now",
    "weather",
    "(",
    ")",
    "city=",
    "'",
    "now(",
    "<|python_tag|>",
    "<|python_start|>",
    "<function=weather>",
    "<function=",
    "<parameter=city>\n",
    "<parameter=days>",
    "</parameter>",
    "</function>",
    CALLS,
    CALL,
    CALL_END,
    CALLS_END,
    SEP,
    "function",
    "```json\n",
    "<input>\n",
    "\n</input>",
    "write",
    "null",
    "1e999",
    "-",
    "\N{GRINNING FACE}",
    "word ",
    "NaN",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_reader_random_text_raises_nothing_and_loses_nothing(name: str) -> None:
    chance = random.Random(name)
    for _ in range(400):
        text = "".join(chance.choices(PIECES, k=chance.randrange(1, 25)))
        whole = read(name, [text])
        assert read(name, text) == whole, text
        if not calls_of(whole):
            assert words_of(whole) == text
        words = words_of(whole)
        assert _subsequence(words, text), (text, words)
        for part in whole:
            if isinstance(part, AnswerText | Arguments):
                part.text.encode()


def _subsequence(part: str, text: str) -> bool:
    rest = iter(text)
    return all(character in rest for character in part)


@pytest.mark.parametrize("name", FAMILIES)
def test_reader_text_without_marks_is_passed_at_once(name: str) -> None:
    reader = family(name).reader(BOX)
    passed = [list(reader.push(piece)) for piece in ("Hello", ",", " you", "!")]
    assert passed == [[AnswerText("Hello")], [AnswerText(",")], [AnswerText(" you")], [AnswerText("!")]]


def test_arguments_come_as_they_are_written() -> None:
    reader = family("hermes").reader(BOX, lambda: "id")
    assert not reader.push('<tool_call>{"name": "weather", "arguments"')
    assert list(reader.push(': {"city"')) == [ToolCall(0, "id", "weather"), Arguments(0, '{"city"')]
    assert list(reader.push(': "Ro')) == [Arguments(0, ': "Ro')]
    assert list(reader.push('me"}}</tool_call>')) == [Arguments(0, 'me"}')]
    assert not reader.flush()


def test_reader_part_of_a_mark_is_held_back() -> None:
    reader = family("hermes").reader(BOX)
    assert list(reader.push("a<tool")) == [AnswerText("a")]
    assert not reader.push("_cal")
    assert list(reader.push("ed>")) == [AnswerText("<tool_caled>")]


def test_reader_not_parallel_returns_only_the_first_call() -> None:
    weather = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    text = f'a <tool_call>{{"name": "now"}}</tool_call> b {weather} c'
    parts = read("hermes", [text], replace(BOX, parallel=False))
    assert calls_of(parts) == named(NOW)
    assert words_of(parts) == "a b c"


@pytest.mark.parametrize("toolbox", [None, replace(BOX, choice="none")], ids=["without tools", "none"])
def test_reader_calls_that_are_not_allowed_stay_text(toolbox: Toolbox | None) -> None:
    text = '<tool_call>{"name": "now"}</tool_call>\n'
    assert list(family("hermes").reader(toolbox).push(text)) == [AnswerText(text)]


def test_reader_calls_have_unique_ids() -> None:
    reader = family("hermes").reader(BOX)
    parts = [*reader.push('<tool_call>{"name": "now"}</tool_call>' * 20), *reader.flush()]
    ids = {part.id for part in parts if isinstance(part, ToolCall)}
    assert len(ids) == 20
    assert all(one.startswith("call_") for one in ids)


@pytest.mark.parametrize("name", ["pythonic", "qwen3_coder"])
def test_converted_arguments_are_json(name: str) -> None:
    chance = random.Random(name)
    values = [
        "1",
        "'a\"b'",
        "True",
        "[1, (2,)]",
        "{'k': {1: None}}",
        "1e999",
        "b'x'",
        "{1, 2}",
        "f(",
        '"\\ud800"',
        "-0.5",
    ]
    for _ in range(200):
        chosen = chance.choices(values, k=3)
        if name == "pythonic":
            chosen = [value if value != "f(" else "f" for value in chosen]
            text = f"[weather({', '.join(f'a{n}={value}' for n, value in enumerate(chosen))})]"
        else:
            body = "".join(f"<parameter=a{n}>\n{value}\n</parameter>\n" for n, value in enumerate(chosen))
            text = f"<tool_call>\n<function=weather>\n{body}</function>\n</tool_call>"
        [(_, arguments)] = calls_of(read(name, [text]))
        assert list(json.loads(arguments)) == ["a0", "a1", "a2"]
        arguments.encode()


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "mistral_v11"])
def test_long_answers_are_read_like_short_ones(name: str) -> None:
    """The reader drops text once it is read."""
    long = "".join(random.Random(1).choices('ab{}[]"\\<\n', k=30_000))
    if name == "qwen3_coder":
        call = f"<function=weather>\n<parameter=city>\n{long}\n</parameter>\n</function>"
    elif name == "mistral_v11":
        call = f"[TOOL_CALLS]weather[ARGS]{json.dumps({'city': long})}"
    else:
        call = f"<tool_call>\n{json.dumps({'arguments': {}, 'name': 'now'})}\n</tool_call>\n<tool_call>\n"
        call += f"{json.dumps({'name': 'weather', 'arguments': {'city': long}})}\n</tool_call>"
    text = f"{'word ' * 4000}{call}\n"
    parts = read(name, [text[start : start + 7] for start in range(0, len(text), 7)])
    assert parts == read(name, [text])
    assert words_of(parts) == text[: text.index(call)].rstrip()
    assert json.loads(calls_of(parts)[-1][1]) == {"city": long}
