"""
`POST /v1/chat/completions`: reads a request and combines prompt, parameters, readers and constraint.

The chat template renders messages and tools. The reasoning format separates reasoning from the generated
text, and the tool family separates calls from the rest. Constraints of the answer (a call or a format) apply
after the reasoning. Stop strings apply to the whole text, including reasoning, as in SGLang and vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from baton_api import limits
from baton_api.errors import UNSUPPORTED_PARAMETER, InvalidRequest
from baton_api.sampling import SamplingParams, Thinking
from baton_engine.api import parameters, structured_output
from baton_engine.api.chat.answer import ChatShape
from baton_engine.api.chat.messages import read_content
from baton_engine.api.chat.prompt import ChatPrompt, read_prompt
from baton_engine.api.fields import Fields
from baton_engine.api.logprobs import token_name
from baton_engine.api.parameters import unsupported
from baton_engine.api.parsing.parts import Reader
from baton_engine.api.parsing.reasoning.formats import (
    AnswerStart,
    ReasoningFilter,
    ReasoningOptions,
    read_options,
)
from baton_engine.api.parsing.tools.request import reject_forced_call
from baton_engine.api.prompts import check_text
from baton_engine.api.served import ChatFormat, Served
from baton_engine.api.work import Work, fit, read_max_tokens

UNSUPPORTED = ("audio", "web_search_options")
TIERS = ("auto", "default", "flex", "scale", "priority", "fast")


def prepare(fields: Fields, served: Served) -> Work:
    """Validate, render and tokenize. Blocks for long conversations, so do not call it on the event loop."""
    chat_prompt = read_prompt(fields, served)
    common = parameters.parse(fields, _alternatives(fields), served.vocabulary, served.defaults)
    _check_the_rest(fields)
    options = read_options(fields)
    wanted, wanted_param = read_max_tokens(fields, "max_completion_tokens", "max_tokens")
    prompt = fit(
        chat_prompt.tokens,
        wanted,
        served.max_model_len,
        param=chat_prompt.param,
        wanted_param=wanted_param,
        truncate=served.settings.allow_auto_truncate,
    )
    parameters.check_min_tokens(common, prompt.max_tokens)
    if common.sampling.constraint is not None:
        reject_forced_call(chat_prompt.toolbox, structured_output.constrained_by(fields) or "response_format")
    opening = AnswerStart(
        prompt=chat_prompt.text,
        continued=chat_prompt.last if chat_prompt.continued else None,
        toolbox=chat_prompt.toolbox,
        separate=options.separate,
        keep_space=common.sampling.constraint is not None,
    )
    sampling = _constrained(common.sampling, opening, options, served)
    shape = ChatShape(
        tokenizer=served.tokenizer,
        model=served.answering(fields.text("model")),
        streaming=common.streaming,
        alternatives=common.alternatives,
        name=token_name(served.tokenizer, common.tokens_as_ids),
        prompt=prompt.tokens,
        prompt_alternatives=common.sampling.prompt_logprobs,
        prompt_ids=prompt.tokens if common.return_token_ids else None,
        metadata=parameters.read_metadata(fields),
        toolbox=chat_prompt.toolbox,
        echo=chat_prompt.last or "" if fields.boolean("echo") else "",
    )
    common = replace(common, sampling=sampling)
    buffers = common.streaming.wanted and not options.streamed
    return Work(
        (prompt,),
        common,
        shape,
        reader=_reader(served.chat, opening, options, buffers),
        marks=_marks(served.chat, chat_prompt),
        prediction=_prediction(fields, served),
    )


def prompt_tokens(fields: Fields, served: Served) -> tuple[int, ...]:
    """Return the prompt of a conversation for /tokenize, even if it exceeds the context."""
    return read_prompt(fields, served, any_length=True).tokens


def _constrained(
    sampling: SamplingParams, opening: AnswerStart, options: ReasoningOptions, served: Served
) -> SamplingParams:
    """Add the constraint of the tools, and the reasoning before the constrained answer."""
    chat = served.chat
    constraint = chat.tools.constraint(opening.toolbox, chat.tokens, sampling.constraint)
    marks = None if chat.reasoning is None else chat.reasoning.thinking(opening)
    if chat.reasoning is None and options.budget is not None:
        raise InvalidRequest(
            "'thinking_token_budget' requires a reasoning parser. Start the worker with --reasoning-parser.",
            param="thinking_token_budget",
            code=UNSUPPORTED_PARAMETER,
        )
    thinking = None
    if marks is not None and (constraint is not None or options.budget is not None):
        start, end = (tuple(served.tokenizer.encode(mark, add_special_tokens=False)) for mark in marks)
        thinking = Thinking(start, end, options.budget)
    return replace(sampling, constraint=constraint, thinking=thinking)


def _reader(
    chat: ChatFormat, opening: AnswerStart, options: ReasoningOptions, buffers: bool
) -> Callable[[], Reader]:
    """
    Return a function that creates the reader of one choice.

    With `buffers`, reasoning is emitted in one piece at its end.
    """

    def reader() -> Reader:
        calls = chat.tools.reader(opening.toolbox)
        if chat.reasoning is None:
            return calls
        thoughts = chat.reasoning.reader(opening, calls)
        if buffers or not options.included:
            return ReasoningFilter(thoughts, left_out=not options.included)
        return thoughts

    return reader


def _marks(chat: ChatFormat, chat_prompt: ChatPrompt) -> frozenset[str] | None:
    """Return the special tokens that the readers need."""
    calls = (
        chat.tools.keeps
        if chat_prompt.toolbox is not None and chat_prompt.toolbox.callable
        else frozenset[str]()
    )
    if chat.reasoning is None:
        return calls
    thoughts = chat.reasoning.keeps
    return None if thoughts is None else calls | thoughts


def _alternatives(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", *limits.TOP_LOGPROBS.range)
    if top is not None and not wanted:
        raise InvalidRequest(
            "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.", param="top_logprobs"
        )
    return (top or 0) if wanted else None


def _check_the_rest(fields: Fields) -> None:
    """Validate fields without effect, and reject unsupported ones."""
    parameters.reject_unsupported(fields, UNSUPPORTED)
    for modality in fields.array("modalities", 8) or ():
        if modality != "text":
            raise unsupported("modalities")
    fields.boolean("store")
    fields.choice("service_tier", TIERS)
    fields.choice("verbosity", ("low", "medium", "high"))
    fields.text("user")
    fields.text("safety_identifier", limits.SAFETY_IDENTIFIER.most)
    fields.text("prompt_cache_key")


def _prediction(fields: Fields, served: Served) -> tuple[int, ...]:
    """Return the tokens of the text that the client expects as the answer; empty without one."""
    prediction = fields.mapping("prediction")
    if prediction is None:
        return ()
    inner = Fields(prediction, "prediction")
    inner.require("type")
    inner.choice("type", ("content",))
    text = "".join(read_content(inner))
    check_text(served, "prediction.content", text)
    return tuple(served.tokenizer.encode(text, add_special_tokens=False))
