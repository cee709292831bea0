"""Schemas of requests. Other fields are ignored, and null means absent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton_api import limits
from baton_api.openapi.values import (
    ANYTHING,
    BOOLEAN,
    COUNT,
    INTEGER,
    NULL,
    OBJECT,
    TEXT,
    Schema,
    array,
    either,
    exactly,
    integer,
    mapping,
    nullable,
    number,
    one_of,
    optional,
    record,
    ref,
    text,
)

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
TIERS = ("auto", "default", "flex", "scale", "priority", "fast")

SAMPLING = optional(
    **{limit.field: number(limit) for limit in limits.SAMPLING_NUMBERS},
    top_k=integer(limits.TOP_K),
    logit_bias=mapping(number(limits.BIAS), limits.LOGIT_BIAS),
    seed=integer(limits.SEED),
    n=integer(limits.N),
    min_tokens=integer(limits.MIN_TOKENS),
    stop=either(text(limits.STOP), array(text(limits.STOP), limits.STOPS)),
    stop_token_ids=array(COUNT, limits.STOP_IDS),
    ignore_eos=BOOLEAN,
    skip_special_tokens=BOOLEAN,
    include_stop_str_in_output=BOOLEAN,
    bad_words=array(text(limits.BAD_WORD), limits.BAD_WORDS),
    allowed_token_ids=array(COUNT, limits.ALLOWED_IDS),
    regex=TEXT,
    ebnf=TEXT,
    json_schema=either(TEXT, OBJECT),
    structured_outputs=record(
        optional(
            json=either(TEXT, OBJECT),
            regex=TEXT,
            choice=array(TEXT, limits.CHOICES),
            grammar=TEXT,
            json_object=BOOLEAN,
            structural_tag=TEXT,
        )
    ),
)
"""Sampling fields of all generation endpoints."""

SHOWN = optional(
    stream=BOOLEAN,
    stream_options=record(
        optional(include_usage=BOOLEAN, continuous_usage_stats=BOOLEAN, include_obfuscation=BOOLEAN)
    ),
    response_format=either(
        record({"type": one_of("text", "json_object")}, ["type"]),
        record({"type": exactly("json_schema"), "json_schema": ref("NamedSchema")}, ["type", "json_schema"]),
        record({"type": exactly("structural_tag")}, ["type"]),
    ),
    return_token_ids=BOOLEAN,
    prompt_logprobs=integer(limits.PROMPT_LOGPROBS),
    logprob_token_ids=array(COUNT, limits.LOGPROB_IDS),
    user=TEXT,
    cache_salt=text(limits.CACHE_SALT),
    rid=either(text(limits.REQUEST_ID), array(text(limits.REQUEST_ID), limits.ABORTS)),
    request_id=text(limits.REQUEST_ID),
)

CONVERSATION = optional(
    tools=array(ref("Tool"), limits.TOOLS),
    tool_choice=either(one_of("none", "auto", "required"), OBJECT),
    parallel_tool_calls=BOOLEAN,
    chat_template_kwargs=mapping(ANYTHING, limits.TEMPLATE_KWARGS),
    add_generation_prompt=BOOLEAN,
    continue_final_message=BOOLEAN,
    reasoning_effort=one_of(*EFFORTS),
)
"""Fields that determine the prompt of a conversation."""

PROMPTS = either(
    TEXT,
    array(TEXT, limits.PROMPTS),
    array(COUNT, least=1),
    array(array(COUNT, least=1), limits.PROMPTS),
)

TEXTS = either(TEXT, array(TEXT, limits.INPUTS))
"""One text or several to score."""


def schemas(models: Sequence[str]) -> dict[str, Schema]:
    """Return all schemas of requests by name, for servers of these models."""
    model: Schema = {"type": "string", "enum": list(models)} if models else TEXT
    return {
        "NamedSchema": record(
            {"name": text(limits.SCHEMA_NAME) | {"pattern": "^[A-Za-z0-9_-]+$"}, "schema": OBJECT}
            | optional(strict=BOOLEAN, description=TEXT),
            ["name", "schema"],
        ),
        "Tool": _tool(),
        "TextPart": record({"type": one_of("text"), "text": TEXT}, ["type", "text"]),
        "Message": _message(),
        "ChatRequest": _chat(model),
        "CompletionRequest": _completion(model),
        "EmbeddingRequest": _embedding(model),
        "RerankRequest": record(
            {"model": model, "query": TEXT, "documents": TEXTS}
            | optional(top_n=COUNT, return_documents=BOOLEAN, user=TEXT, cache_salt=text(limits.CACHE_SALT)),
            ["model", "query", "documents"],
        ),
        "ScoreRequest": record(
            {"model": model, "text_1": TEXTS, "text_2": TEXTS}
            | optional(user=TEXT, cache_salt=text(limits.CACHE_SALT)),
            ["model", "text_1", "text_2"],
        ),
        "ResponseRequest": _response(model),
        "GenerateRequest": _generate(),
        **_messages(model),
        **_tokens(model),
    }


def _chat(model: Schema) -> Schema:
    return record(
        {"model": model, "messages": array(ref("Message"), limits.MESSAGES)}
        | SAMPLING
        | SHOWN
        | CONVERSATION
        | optional(
            max_tokens=integer(limits.MAX_TOKENS),
            max_completion_tokens=integer(limits.MAX_TOKENS),
            logprobs=BOOLEAN,
            top_logprobs=integer(limits.TOP_LOGPROBS),
            metadata=_metadata(),
            safety_identifier=text(limits.SAFETY_IDENTIFIER),
            prompt_cache_key=TEXT,
            service_tier=one_of(*TIERS),
            verbosity=one_of("low", "medium", "high"),
            store=BOOLEAN,
            modalities=array(one_of("text")),
            prediction=record(
                {"type": one_of("content"), "content": either(TEXT, array(ref("TextPart"), limits.PARTS))},
                ["type", "content"],
            ),
            separate_reasoning=BOOLEAN,
            stream_reasoning=BOOLEAN,
            include_reasoning=BOOLEAN,
            thinking_token_budget=integer(limits.THINKING_BUDGET),
            echo=BOOLEAN,
        ),
        ["model", "messages"],
    )


def _completion(model: Schema) -> Schema:
    return record(
        {"model": model, "prompt": PROMPTS}
        | SAMPLING
        | SHOWN
        | optional(
            max_tokens=integer(limits.MAX_TOKENS_OR_NONE),
            logprobs=integer(limits.LOGPROBS),
            best_of=integer(limits.BEST_OF),
            echo=BOOLEAN,
        ),
        ["model", "prompt"],
    )


def _embedding(model: Schema) -> Schema:
    return record(
        {
            "model": model,
            "input": either(
                TEXT,
                array(TEXT, limits.INPUTS),
                array(COUNT, least=1),
                array(array(COUNT, least=1), limits.INPUTS),
            ),
        }
        | optional(
            encoding_format=one_of("float", "base64"),
            dimensions={"type": "integer", "minimum": 1},
            user=TEXT,
            cache_salt=text(limits.CACHE_SALT),
        ),
        ["model", "input"],
    )


def _tokens(model: Schema) -> dict[str, Schema]:
    return {
        "TokenizeRequest": either(
            record(
                {"prompt": either(TEXT, array(TEXT, limits.PROMPTS)), "messages": NULL}
                | optional(model=model, add_special_tokens=BOOLEAN, return_token_strs=BOOLEAN),
                ["prompt"],
            ),
            record(
                {"messages": array(ref("Message"), limits.MESSAGES), "prompt": NULL}
                | CONVERSATION
                | optional(model=model, return_token_strs=BOOLEAN),
                ["messages"],
            ),
        ),
        "DetokenizeRequest": record(
            {"tokens": either(array(COUNT), array(array(COUNT), limits.TOKEN_LISTS))}
            | optional(model=model, skip_special_tokens=BOOLEAN),
            ["tokens"],
        ),
        "AbortRequest": record(
            optional(
                rid=either(text(limits.REQUEST_ID), array(text(limits.REQUEST_ID), limits.ABORTS)),
                request_id=text(limits.REQUEST_ID),
                abort_all=BOOLEAN,
            )
        ),
        "LoadAdapterRequest": record(
            {"lora_name": TEXT, "lora_path": TEXT} | optional(load_inplace=BOOLEAN),
            ["lora_name", "lora_path"],
        ),
        "UnloadAdapterRequest": record({"lora_name": TEXT}, ["lora_name"]),
    }


def _metadata() -> Schema:
    keys = {"propertyNames": {"maxLength": limits.METADATA_KEY.most}}
    return mapping(text(limits.METADATA_VALUE), limits.METADATA) | keys


def _tool() -> Schema:
    name = text(limits.TOOL_NAME) | {"pattern": "^[A-Za-z0-9_-]+$"}
    function = record(
        {"name": name}
        | optional(description=text(limits.TOOL_DESCRIPTION), parameters=OBJECT, strict=BOOLEAN),
        ["name"],
    )
    custom = record({"name": name} | optional(description=text(limits.TOOL_DESCRIPTION)), ["name"])
    return either(
        record({"type": exactly("function"), "function": function}, ["type", "function"]),
        record({"type": exactly("custom"), "custom": custom}, ["type", "custom"]),
    )


def _message() -> Schema:
    content = either(TEXT, array(ref("TextPart"), limits.PARTS))
    call = record(
        {
            "id": TEXT,
            "type": exactly("function"),
            "function": record({"name": TEXT, "arguments": TEXT}, ["name", "arguments"]),
        },
        ["id", "type", "function"],
    )
    name = optional(name=TEXT)
    return either(
        record(
            {"role": one_of("developer", "system", "user"), "content": content} | name, ["role", "content"]
        ),
        record({"role": exactly("assistant"), "content": content} | name, ["role", "content"]),
        record(
            {"role": exactly("assistant"), "tool_calls": array(call, least=1), "content": nullable(content)},
            ["role", "tool_calls"],
        ),
        record(
            {"role": exactly("tool"), "tool_call_id": TEXT, "content": content},
            ["role", "tool_call_id", "content"],
        ),
    )


def _response(model: Schema) -> Schema:
    item = either(ref("Message"), record({"type": TEXT}, ["type"]))
    specific: dict[str, Any] = {"model": model, "input": either(TEXT, array(item, least=1))}
    names = ("temperature", "top_p", "stream", "parallel_tool_calls", "user", "cache_salt")
    shared = {name: schema for name, schema in (SAMPLING | SHOWN | CONVERSATION).items() if name in names}
    more = optional(
        instructions=TEXT,
        max_output_tokens=integer(limits.MAX_TOKENS),
        previous_response_id=TEXT,
        store=BOOLEAN,
        metadata=_metadata(),
        include=array(exactly("message.output_text.logprobs")),
        top_logprobs=integer(limits.TOP_LOGPROBS),
        text=record(
            optional(format=record({"type": TEXT}, ["type"]), verbosity=one_of("low", "medium", "high"))
        ),
        reasoning=record(optional(effort=one_of(*EFFORTS), summary=one_of("auto", "concise", "detailed"))),
        tools=array(record({"type": TEXT}, ["type"]), limits.TOOLS),
        tool_choice=either(one_of("none", "auto", "required"), OBJECT),
        truncation=one_of("auto", "disabled"),
        safety_identifier=text(limits.SAFETY_IDENTIFIER),
    )
    return record(specific | shared | more, ["model"])


def _messages(model: Schema) -> dict[str, Schema]:
    """Return the schemas of requests in Anthropic's format."""
    block = record({"type": TEXT}, ["type"])
    roles = one_of("user", "assistant", "system")
    message = record(
        {"role": roles, "content": either(TEXT, array(block, limits.PARTS))}, ["role", "content"]
    )
    tool = record(
        {"name": text(limits.TOOL_NAME) | {"pattern": "^[A-Za-z0-9_-]+$"}, "input_schema": OBJECT}
        | optional(type=exactly("custom"), description=text(limits.TOOL_DESCRIPTION), strict=BOOLEAN),
        ["name", "input_schema"],
    )
    prompt = {"model": model, "messages": array(message, limits.MESSAGES)} | optional(
        system=either(TEXT, array(block)),
        tools=array(tool, limits.TOOLS),
        tool_choice=record({"type": one_of("auto", "any", "tool", "none")}, ["type"]),
        thinking=record({"type": one_of("enabled", "adaptive", "disabled")}, ["type"]),
        output_config=record(optional(effort=one_of(*EFFORTS), format=OBJECT)),
        chat_template_kwargs=mapping(ANYTHING, limits.TEMPLATE_KWARGS),
    )
    names = ("temperature", "top_p", "top_k", "stream", "seed", "cache_salt", "request_id")
    shared = {name: schema for name, schema in (SAMPLING | SHOWN).items() if name in names}
    more = optional(stop_sequences=array(text(limits.STOP), limits.STOPS), metadata=OBJECT)
    answer = {"max_tokens": integer(limits.MAX_TOKENS)}
    return {
        "MessagesRequest": record(prompt | answer | shared | more, ["model", "messages", "max_tokens"]),
        "CountTokensRequest": record(prompt, ["model", "messages"]),
    }


def _generate() -> Schema:
    sampling = SAMPLING | optional(
        max_new_tokens=integer(limits.MAX_TOKENS_OR_NONE), min_new_tokens=integer(limits.MIN_TOKENS)
    )
    common = optional(
        sampling_params=record(sampling),
        stream=BOOLEAN,
        return_logprob=BOOLEAN,
        top_logprobs_num=integer(limits.TOP_LOGPROBS),
        logprob_start_len={"type": "integer", "minimum": -1, "maximum": limits.TOKENS},
        return_text_in_logprobs=BOOLEAN,
        cache_salt=text(limits.CACHE_SALT),
        rid=either(text(limits.REQUEST_ID), array(text(limits.REQUEST_ID), limits.ABORTS)),
    )
    texts = either(TEXT, array(TEXT, limits.PROMPTS))
    ids = either(array(INTEGER, least=1), array(array(INTEGER, least=1), limits.PROMPTS))
    return either(
        record({"text": texts, "input_ids": NULL} | common, ["text"]),
        record({"input_ids": ids, "text": NULL} | common, ["input_ids"]),
    )
