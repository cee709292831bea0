"""
`POST /v1/chat/completions`: a conversation in, the assistant's next message out.

The chat template makes the prompt of messages and tools. The text that follows it is read in two steps:
thoughts are told from the answer as the model family marks them, and calls from words as it writes them.
What the answer must be, a call or of some form, holds from the end of the thoughts on. Stop strings do not
know of parts: they are looked for in the whole text, thoughts included, as in SGLang and vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from baton_api import limits
from baton_api.errors import UNSUPPORTED_PARAMETER, InvalidRequest
from baton_api.sampling import SamplingParams, Thinking
from baton_engine.api import parameters, structured_output
from baton_engine.api.chat.answer import ChatShape
from baton_engine.api.chat.format import ChatFormat
from baton_engine.api.chat.prompt import ChatPrompt, read_prompt
from baton_engine.api.fields import Fields
from baton_engine.api.logprobs import token_name
from baton_engine.api.parameters import not_served
from baton_engine.api.parsing.parts import Reader
from baton_engine.api.parsing.reasoning.formats import Opening
from baton_engine.api.parsing.reasoning.visibility import ReasoningOptions, Showing, read_options
from baton_engine.api.parsing.tools.request import refuse_beside
from baton_engine.api.served import Served
from baton_engine.api.work import Work, fit, read_max_tokens

NOT_SERVED = ("audio", "web_search_options")
TIERS = ("auto", "default", "flex", "scale", "priority", "fast")


def prepare(fields: Fields, served: Served) -> Work:
    """Check, render and tokenise. Takes a while for long conversations: not for the event loop."""
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
        refuse_beside(chat_prompt.toolbox, structured_output.constrained_by(fields) or "response_format")
    opening = Opening(
        prompt=chat_prompt.text,
        continued=chat_prompt.last if chat_prompt.continued else None,
        toolbox=chat_prompt.toolbox,
        apart=options.apart,
        exact=common.sampling.constraint is not None,
    )
    sampling = _formed(common.sampling, opening, options, served)
    shape = ChatShape(
        tokenizer=served.tokenizer,
        model=served.name,
        streaming=common.streaming,
        alternatives=common.alternatives,
        name=token_name(served.tokenizer, common.tokens_as_ids),
        prompt=prompt.tokens,
        prompt_alternatives=common.sampling.prompt_logprobs,
        prompt_ids=prompt.tokens if common.return_token_ids else None,
        metadata=fields.mapping("metadata"),
        toolbox=chat_prompt.toolbox,
        echo=chat_prompt.last or "" if fields.boolean("echo") else "",
    )
    common = replace(common, sampling=sampling)
    held = common.streaming.wanted and not options.streamed
    return Work(
        (prompt,),
        common,
        shape,
        reader=_reader(served.chat, opening, options, held),
        marks=_marks(served.chat, chat_prompt),
    )


def prompt_tokens(fields: Fields, served: Served) -> tuple[int, ...]:
    """The prompt that `prepare` would make of this conversation, however long it is: for /tokenize."""
    return read_prompt(fields, served).tokens


def _formed(
    sampling: SamplingParams, opening: Opening, options: ReasoningOptions, served: Served
) -> SamplingParams:
    """With what the tools demand of the answer, and with what may come before it."""
    chat = served.chat
    constraint = chat.tools.constraint(opening.toolbox, chat.tokens, sampling.constraint)
    marks = None if chat.reasoning is None else chat.reasoning.thinking(opening)
    if chat.reasoning is None and options.budget is not None:
        raise InvalidRequest(
            "'thinking_token_budget' needs to know how the model marks its thoughts: start the worker with "
            "--reasoning-parser.",
            param="thinking_token_budget",
            code=UNSUPPORTED_PARAMETER,
        )
    thinking = None
    if marks is not None and (constraint is not None or options.budget is not None):
        start, end = (tuple(served.tokenizer.encode(mark, add_special_tokens=False)) for mark in marks)
        thinking = Thinking(start, end, options.budget)
    return replace(sampling, constraint=constraint, thinking=thinking)


def _reader(
    chat: ChatFormat, opening: Opening, options: ReasoningOptions, held: bool
) -> Callable[[], Reader]:
    """Makes what tells the parts of one choice; `held` are thoughts until all of one is there."""

    def reader() -> Reader:
        calls = chat.tools.reader(opening.toolbox)
        if chat.reasoning is None:
            return calls
        thoughts = chat.reasoning.reader(opening, calls)
        if held or not options.included:
            return Showing(thoughts, left_out=not options.included)
        return thoughts

    return reader


def _marks(chat: ChatFormat, chat_prompt: ChatPrompt) -> frozenset[str] | None:
    """The special tokens by which parts are told."""
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
    """Fields that are known and change nothing here, or that are not served."""
    parameters.refuse_not_served(fields, NOT_SERVED)
    for modality in fields.array("modalities", 8) or ():
        if modality != "text":
            raise not_served("modalities")
    fields.boolean("store")
    fields.choice("service_tier", TIERS)
    fields.choice("verbosity", ("low", "medium", "high"))
    fields.text("user")
    fields.text("safety_identifier", limits.SAFETY_IDENTIFIER.most)
    fields.text("prompt_cache_key")
    _check_prediction(fields)
    _check_metadata(fields)


def _check_prediction(fields: Fields) -> None:
    """What the answer is expected to be would make it quicker elsewhere."""
    prediction = fields.mapping("prediction")
    if prediction is None:
        return
    inner = Fields(prediction, "prediction")
    inner.require("type")
    inner.choice("type", ("content",))
    if not isinstance(inner.require("content"), str | list):
        inner.wrong_type("content", "a string or an array of text parts", inner.get("content"))


def _check_metadata(fields: Fields) -> None:
    metadata = fields.mapping("metadata") or {}
    if len(metadata) > limits.METADATA.most:
        most = limits.METADATA.most
        fields.wrong_value("metadata", f"Expected at most {most} pairs, but got {len(metadata)}")
    inner = Fields(metadata, "metadata")
    for key in metadata:
        if len(key) > limits.METADATA_KEY.most:
            most = limits.METADATA_KEY.most
            fields.wrong_value("metadata", f"a key has at most {most} characters, not {len(key)}")
        inner.require(key)
        inner.text(key, limits.METADATA_VALUE.most)
