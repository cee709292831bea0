"""Separate thoughts from answers, by marks, channels or description, however the text is cut."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from baton_api.errors import SetupError
from baton_engine.api.parsing.parts import (
    AnswerText,
    Arguments,
    Part,
    PlainReader,
    Reader,
    Thought,
    ToolCall,
    merged,
)
from baton_engine.api.parsing.reasoning import formats, marked
from baton_engine.api.parsing.reasoning.formats import (
    AnswerStart,
    Described,
    Harmony,
    Marked,
    ReasoningFilter,
)
from baton_engine.api.parsing.reasoning.marked import FAMILIES, PromptState, ReasoningReader
from baton_engine.api.parsing.tools.toolbox import Tool, Toolbox
from baton_engine.model.families import BY_ARCHITECTURE

QWEN3 = FAMILIES["qwen3"]
TOOLBOX = Toolbox(tools=(Tool(name="look_up"),))
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "content": {},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


def read(reader: Reader, pieces: Iterable[str]) -> list[Part]:
    parts = [part for piece in pieces for part in reader.push(piece)]
    parts_read = merged([*parts, *reader.flush()])
    return [
        ToolCall(part.index, "id", part.name) if isinstance(part, ToolCall) else part for part in parts_read
    ]


def cuts(text: str) -> Iterable[list[str]]:
    """Every cut in two, all single characters, and some by chance."""
    chance = random.Random(len(text))
    cut_lists = [[place] for place in range(1, len(text))] + [list(range(1, len(text)))]
    cut_lists += [sorted(chance.sample(range(len(text) + 1), min(3, len(text)))) for _ in range(30)]
    for cut in cut_lists:
        yield [text[start:end] for start, end in itertools.pairwise([0, *cut, len(text)])]


def assert_same_in_pieces(make: Callable[[], Reader], text: str) -> list[Part]:
    whole = read(make(), [text])
    for pieces in cuts(text):
        assert read(make(), pieces) == whole, pieces
    return whole


MARKED: dict[str, tuple[PromptState, str, list[Part]]] = {
    "a thought and an answer": (
        PromptState.FREE, "<think>\nHm. \n</think>\n\nYes. ", [Thought("Hm."), AnswerText("Yes. ")]),
    "a thought that the prompt has begun": (
        PromptState.OPEN, "\nHm.</think>Yes.", [Thought("Hm."), AnswerText("Yes.")]),
    "a thought that prompt and model have begun": (
        PromptState.OPEN, "<think>Hm.</think>Yes.", [Thought("Hm."), AnswerText("Yes.")]),
    "an answer without a thought": (
        PromptState.FREE, " Yes, <think> is a tag", [AnswerText(" Yes, <think> is a tag")]),
    "an answer after a thought that the prompt has ended": (
        PromptState.CLOSED, "<think>x</think>", [AnswerText("<think>x</think>")]),
    "an empty thought": (PromptState.FREE, "<think>\n\n</think>\n\nYes.", [AnswerText("Yes.")]),
    "a thought without an end": (PromptState.FREE, "<think>Hm <b> </", [Thought("Hm <b>")]),
    "a thought that is cut in its mark": (PromptState.OPEN, "Hm </thin", [Thought("Hm")]),
    "a start that is cut": (PromptState.FREE, "<thi", []),
    "what is nearly a mark": (PromptState.OPEN, "a </thinker> b", [Thought("a </thinker> b")]),
    "a comparison at the end": (PromptState.OPEN, "a <", [Thought("a <")]),
    "a second thought, which is none": (
        PromptState.FREE, "<think>a</think>b<think>c</think>",
        [Thought("a"), AnswerText("b<think>c</think>")]),
    "white space and nothing else": (PromptState.FREE, "  \n", [AnswerText("  \n")]),
    "nothing": (PromptState.OPEN, "", []),
}  # fmt: skip


@pytest.mark.parametrize("name", MARKED)
def test_marks_tell_the_thought_from_the_answer(name: str) -> None:
    state, text, expected = MARKED[name]
    assert assert_same_in_pieces(lambda: ReasoningReader(QWEN3, PlainReader(), state), text) == expected


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_reasoning_reader_families_split_thought_from_answer(
    family: marked.ReasoningFamily,
) -> None:
    text = f"{family.start} some {family.start[:-1]} thought {family.end[:-1]}{family.end}\n an answer"
    state = PromptState.OPEN if family.implied else PromptState.FREE
    parts = assert_same_in_pieces(lambda: ReasoningReader(family, PlainReader(), state), text)
    assert parts == [
        Thought(f"some {family.start[:-1]} thought {family.end[:-1]}"),
        AnswerText("an answer"),
    ]
    assert read(ReasoningReader(family, PlainReader(), state), ["plain"]) == [
        Thought("plain") if family.implied else AnswerText("plain")
    ]


@pytest.mark.parametrize("seed", range(20))
def test_reasoning_reader_random_text_is_the_same_in_pieces(seed: int) -> None:
    chance = random.Random(seed)
    scraps = ["<think>", "</think>", "<", "</", "think", ">", " ", "\n", "a", "b "]
    text = "".join(chance.choices(scraps, k=12))
    for state in PromptState:
        for fields in ({}, {"separate": False}, {"keep_space": True}):
            assert_same_in_pieces(lambda: ReasoningReader(QWEN3, PlainReader(), state, **fields), text)  # noqa: B023


@pytest.mark.parametrize("name", MARKED)
def test_reasoning_reader_not_apart_keeps_thoughts_in_the_text(name: str) -> None:
    state, text, _ = MARKED[name]
    parts = read(ReasoningReader(QWEN3, PlainReader(), state, separate=False), [text])
    assert parts == ([AnswerText(text)] if text else [])


def test_reasoning_reader_exact_keeps_white_space() -> None:
    reader = ReasoningReader(QWEN3, PlainReader(), PromptState.OPEN, keep_space=True)
    assert read(reader, ["Hm. \n</think>\n 7 "]) == [Thought("Hm."), AnswerText("\n 7 ")]


def test_reasoning_reader_thinking_lasts_until_the_mark() -> None:
    reader = ReasoningReader(QWEN3, PlainReader(), PromptState.FREE)
    seen = []
    for piece in ("\n", "<think>", "Hm", "</th", "ink>", "\n", "Yes"):
        reader.push(piece)
        seen.append(reader.thinking)
    assert seen == [False, True, True, True, False, False, False]


def test_reasoning_reader_thought_whole_or_left_out() -> None:
    pieces = ["<think>a", "b ", "c</think>", "d", "e"]

    def parts_by_piece(left_out: bool) -> list[list[Part]]:
        reader = ReasoningFilter(ReasoningReader(QWEN3, PlainReader(), PromptState.FREE), left_out=left_out)
        return [list(reader.push(piece)) for piece in pieces] + [list(reader.flush())]

    assert parts_by_piece(left_out=False) == [
        [],
        [],
        [],
        [Thought("ab c"), AnswerText("d")],
        [AnswerText("e")],
        [],
    ]
    assert parts_by_piece(left_out=True) == [[], [], [], [AnswerText("d")], [AnswerText("e")], []]
    cut = ReasoningFilter(ReasoningReader(QWEN3, PlainReader(), PromptState.OPEN), left_out=False)
    assert read(cut, ["only ", "thought"]) == [Thought("only thought")]
    assert cut.thinking


PROMPTS: dict[str, tuple[str, str, str | None, PromptState]] = {
    "a prompt that says nothing of thoughts": ("qwen3", "<|assistant|>\n", None, PromptState.FREE),
    "a prompt that begins the thought": ("qwen3", "<|assistant|>\n<think>\n", None, PromptState.OPEN),
    "a prompt that has an empty thought": (
        "qwen3", "<|assistant|>\n<think>\n\n</think>\n\n", None, PromptState.CLOSED),
    "a model that thinks in any case": ("deepseek-r1", "<|Assistant|>", None, PromptState.OPEN),
    "a user who speaks of thoughts": ("qwen3", "say <think><|assistant|>\n", None, PromptState.FREE),
    "a message that goes on": ("qwen3", "<|assistant|>\nOnce upon", "Once upon", PromptState.CLOSED),
    "a message with a thought that goes on": (
        "qwen3", "x<think>a</think>b", "<think>a</think>b", PromptState.CLOSED),
    "a thought that goes on": (
        "deepseek-r1", "<|Assistant|><think>Let me", "<think>Let me", PromptState.OPEN),
    "an empty message that goes on": ("qwen3", "<|assistant|>\n", "", PromptState.FREE),
}  # fmt: skip


@pytest.mark.parametrize("name", PROMPTS)
def test_family_state_follows_the_end_of_the_prompt(name: str) -> None:
    family, prompt, continued, expected = PROMPTS[name]
    assert FAMILIES[family].state(prompt, continued) is expected


def test_format_thinking_marks_delay_the_constraint() -> None:
    form = Marked(QWEN3)
    assert form.thinking(AnswerStart(prompt="<|assistant|>\n")) == ("<think>", "</think>")
    assert form.thinking(AnswerStart(prompt="<|assistant|>\n<think>\n")) == ("", "</think>")
    assert form.thinking(AnswerStart(prompt="<think>\n\n</think>\n\n")) is None
    assert Harmony().thinking(AnswerStart(prompt="<|start|>assistant")) == ("", "<|channel|>final<|message|>")


HARMONY: dict[str, tuple[str, list[Part]]] = {
    "analysis and final": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        [Thought("Hm."), AnswerText("Yes.")]),
    "no messages at all": ("Yes.", [AnswerText("Yes.")]),
    "a preamble for the user": (
        "<|channel|>commentary<|message|>Wait.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{\"a\": 1}",
        [AnswerText("Wait."), ToolCall(0, "id", "look_up"), Arguments(0, '{"a": 1}')]),
    "a recipient before the channel": (
        " to=functions.look_up<|channel|>commentary json<|message|>{}<|call|>",
        [ToolCall(0, "id", "look_up"), Arguments(0, "{}")]),
    "a function that there is not": (
        "<|channel|>commentary to=functions.other<|message|>{}", [AnswerText("{}")]),
    "cut in a mark": ("<|channel|>analysis<|message|>Hm.<|en", [Thought("Hm.")]),
    "cut in a header": ("<|channel|>ana", []),
    "nothing": ("", []),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMONY)
def test_channels_tell_the_parts_of_gpt_oss(name: str) -> None:
    text, expected = HARMONY[name]
    opening = AnswerStart(prompt="<|start|>assistant", toolbox=TOOLBOX)
    assert assert_same_in_pieces(lambda: Harmony().reader(opening, PlainReader()), text) == expected


def test_harmony_knows_which_tokens_are_thoughts() -> None:
    reader = Harmony().reader(AnswerStart(prompt=""), PlainReader())
    assert isinstance(reader, formats.Thinker)
    reader.push("<|channel|>analysis<|message|>Hm")
    assert reader.thinking
    reader.push("<|end|><|start|>assistant<|channel|>final<|message|>Yes")
    assert not reader.thinking


DESCRIBED: dict[str, tuple[str, str, list[Part]]] = {
    "thought and answer": ("", "<think>\nHm. </think>\n\nYes.", [Thought("Hm."), AnswerText("Yes.")]),
    "a thought that the prompt began": ("<think>\n", "Hm.</think>Yes.", [Thought("Hm."), AnswerText("Yes.")]),
    "an answer alone": ("", "Yes < no.", [AnswerText("Yes < no.")]),
    "a call": (
        "", 'So:<call>{"name": "look_up", "arguments": {"a": 1}}</call>',
        [AnswerText("So:"), ToolCall(0, "id", "look_up"), Arguments(0, '{"a": 1}')]),
    "a function that there is not": (
        "", '<call>{"name": "f", "arguments": {}}</call>', [AnswerText('{"name": "f", "arguments": {}}')]),
    "a call that is no JSON": ("", "<call>{oh</call>dear", [AnswerText("{ohdear")]),
    "a call that is cut": ("", '<call>{"name": "lo', [AnswerText('{"name": "lo')]),
    "a mark that is cut": ("", "Yes.<thi", [AnswerText("Yes.<thi")]),
}  # fmt: skip


@pytest.mark.parametrize("name", DESCRIBED)
def test_described_format_splits_the_parts(name: str) -> None:
    prompt, text, expected = DESCRIBED[name]
    opening = AnswerStart(prompt=f"<|user|>Hi<|assistant|>{prompt}", toolbox=TOOLBOX)
    form = Described(RESPONSE_TEMPLATE)
    assert assert_same_in_pieces(lambda: form.reader(opening, PlainReader()), text) == expected


CHOSEN: dict[str, tuple[str, list[str], dict[str, Any] | None, str | None]] = {
    "none by default": ("", ["<think></think>"], None, None),
    "a name": ("qwen3", [""], None, "qwen3"),
    "the name that SGLang and vLLM have for it": ("deepseek_r1", [""], None, "deepseek-r1"),
    "gpt-oss, as vLLM calls it": ("openai_gptoss", [""], None, "gpt-oss"),
    "auto, where the template writes thoughts": ("auto", ["{{ '<think>\\n\\n</think>' }}"], None, "qwen3"),
    "auto, where the template only takes them out": (
        "auto", ["{{ message.content.split('</think>')[-1] }}"], None, "deepseek-r1"),
    "auto, where the template has channels": ("auto", ["<|channel|>analysis"], None, "gpt-oss"),
    "auto, where the template has other marks": ("auto", ["[THINK]..[/THINK]"], None, "mistral"),
    "auto, where the template has no thoughts": ("auto", ["{{ messages }}"], None, None),
    "auto, where the tokenizer describes them": ("auto", ["</think>"], RESPONSE_TEMPLATE, "transformers"),
    "the description": ("transformers", [], RESPONSE_TEMPLATE, "transformers"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOSEN)
def test_format_of_is_chosen_by_name_or_template(name: str) -> None:
    chosen, templates, description, expected = CHOSEN[name]
    form = formats.format_of(chosen, templates, description)
    assert (form.name if form is not None else None) == expected


@pytest.mark.parametrize(
    ("chosen", "description", "words"),
    [
        ("wisdom", None, "wisdom.*qwen3"),
        ("transformers", None, "response_template"),
        ("transformers", {"fields": {}}, "Invalid response_template"),
    ],
)
def test_format_of_unknown_parser_fails_the_start(
    chosen: str, description: dict[str, Any] | None, words: str
) -> None:
    with pytest.raises(SetupError, match=words):
        formats.format_of(chosen, [], description)


def test_reasoning_families_are_those_of_models_served() -> None:
    """A parser whose model cannot be loaded is a promise that is not kept; each name has its architecture."""
    architectures = {
        "qwen3": "Qwen3ForCausalLM", "qwen3-thinking": "Qwen3ForCausalLM", "deepseek-r1": "LlamaForCausalLM",
        "nemotron": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "granite": "GraniteForCausalLM",
        "deepseek-v3": "DeepseekV3ForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM",
        "glm45": "Glm4MoeForCausalLM", "minimax_m2": "MiniMaxM2ForCausalLM",
    }  # fmt: skip
    assert set(FAMILIES) == set(architectures)
    assert set(architectures.values()) <= set(BY_ARCHITECTURE)
