"""Schemas of responses: OpenAI's specification, with Baton's additional fields."""

from __future__ import annotations

from baton_api.errors import QuotaExceeded
from baton_api.metrics import TIERS
from baton_api.openapi.values import (
    ANYTHING,
    BOOLEAN,
    COUNT,
    INTEGER,
    NULL,
    NUMBER,
    OBJECT,
    TEXT,
    Schema,
    array,
    either,
    exactly,
    full,
    mapping,
    nullable,
    one_of,
    record,
    ref,
)

FINISH = one_of("stop", "length", "tool_calls", "content_filter", "function_call")
MATCHED = {"matched_stop": nullable(either(TEXT, INTEGER)), "stop_reason": nullable(either(TEXT, INTEGER))}

BY_SOURCE = full({"local": COUNT}, peer=COUNT, **dict.fromkeys(TIERS, COUNT))
"""Cached tokens of the pool of the worker that computed the prompt, and those that it read from elsewhere."""


def schemas() -> dict[str, Schema]:
    """Return all schemas of responses by name."""
    return {
        "Error": full({
            "error": full({
                "message": TEXT | {"minLength": 1},
                "type": one_of("invalid_request_error", "server_error", QuotaExceeded.code),
                "param": nullable(TEXT),
                "code": nullable(TEXT),
            })
        }),
        "Model": full(
            {"id": TEXT, "object": exactly("model"), "created": COUNT, "owned_by": TEXT},
            root=TEXT,
            parent=NULL,
            max_model_len=nullable(COUNT),
        ),
        "Models": full({"object": exactly("list"), "data": array(ref("Model"))}),
        "Usage": full({
            "prompt_tokens": COUNT,
            "completion_tokens": COUNT,
            "total_tokens": COUNT,
            "prompt_tokens_details": full(
                {"cached_tokens": COUNT, "audio_tokens": COUNT},
                cached_tokens_by_source=BY_SOURCE,
            ),
            "completion_tokens_details": full({
                "reasoning_tokens": COUNT,
                "audio_tokens": COUNT,
                "accepted_prediction_tokens": COUNT,
                "rejected_prediction_tokens": COUNT,
            }),
        }),
        **_chat(),
        **_completions(),
        **_responses(),
        **_embeddings_and_tokens(),
        "Generated": _generated(),
        **_messages(),
        "Aborted": full({"aborted": COUNT}),
        "Flushed": full({"flushed_blocks": COUNT}),
        "Version": full({"version": TEXT, "server": TEXT}),
        "ModelInfo": full({
            "model_path": TEXT,
            "served_model_name": TEXT,
            "is_generation": BOOLEAN,
            "max_model_len": nullable(COUNT),
        }),
        "ServerInfo": full({"version": TEXT, "status": TEXT, "started": COUNT, "settings": OBJECT}),
    }  # fmt: skip


def _embeddings_and_tokens() -> dict[str, Schema]:
    embedding = {"object": exactly("embedding"), "index": COUNT, "embedding": either(TEXT, array(NUMBER))}
    return {
        "Embeddings": full({
            "object": exactly("list"),
            "model": TEXT,
            "data": array(full(embedding)),
            "usage": full({"prompt_tokens": COUNT, "total_tokens": COUNT}),
        }),
        "RerankAnswer": full({
            "id": TEXT,
            "model": TEXT,
            "results": array(
                full({"index": COUNT, "relevance_score": NUMBER}, document=full({"text": TEXT}))
            ),
            "usage": full({"prompt_tokens": COUNT, "total_tokens": COUNT}),
        }),
        "ScoreAnswer": full({
            "id": TEXT,
            "object": exactly("list"),
            "created": COUNT,
            "model": TEXT,
            "data": array(full({"index": COUNT, "object": exactly("score"), "score": NUMBER})),
            "usage": full({"prompt_tokens": COUNT, "total_tokens": COUNT}),
        }),
        "Tokens": full({
            "tokens": either(array(COUNT), array(array(COUNT))),
            "count": either(COUNT, array(COUNT)),
            "max_model_len": COUNT,
            "token_strs": nullable(either(array(TEXT), array(array(TEXT)))),
        }),
        "Text": full({"text": either(TEXT, array(TEXT)), "prompt": either(TEXT, array(TEXT))}),
    }  # fmt: skip


def _chat() -> dict[str, Schema]:
    logprobs, called = _chat_logprobs(), full({"name": TEXT, "arguments": TEXT})
    message, delta = _chat_message(called), _chat_delta()
    choice = {"index": COUNT, "message": message, "finish_reason": FINISH, "logprobs": logprobs}
    chunk = {"index": COUNT, "delta": delta, "logprobs": logprobs, "finish_reason": nullable(FINISH)}
    envelope = {"id": {"type": "string", "pattern": "^chatcmpl-"}, "created": COUNT, "model": TEXT}
    return {
        "Chat": full(
            envelope
            | {
                "object": exactly("chat.completion"),
                "choices": array(full(choice, **MATCHED), least=1),
                "usage": ref("Usage"),
            }
        ),
        "ChatChunk": full(
            envelope | {"object": exactly("chat.completion.chunk"), "choices": array(full(chunk))},
            usage=nullable(ref("Usage")),
        ),
    }


def _chat_logprobs() -> Schema:
    entry = {"token": TEXT, "logprob": {"type": "number", "maximum": 0}, "bytes": nullable(array(COUNT))}
    content = array(full(entry | {"top_logprobs": array(full(entry))}))
    return nullable(full({"content": content, "refusal": NULL}))


def _chat_message(called: Schema) -> Schema:
    call = either(
        full({"id": TEXT, "type": exactly("function"), "function": called}),
        full({"id": TEXT, "type": exactly("custom"), "custom": full({"name": TEXT, "input": TEXT})}),
    )
    return full(
        {"role": exactly("assistant"), "content": nullable(TEXT), "refusal": NULL},
        tool_calls=array(call, least=1),
        reasoning_content=nullable(TEXT),
        reasoning=nullable(TEXT),
        function_call=called,
        annotations=array(OBJECT),
    )


def _chat_delta() -> Schema:
    return record(
        {
            "role": exactly("assistant"),
            "content": nullable(TEXT),
            "reasoning_content": nullable(TEXT),
            "tool_calls": array(full({"index": COUNT}, id=TEXT, type=TEXT, function=OBJECT)),
        }
    )


def _completions() -> dict[str, Schema]:
    floor_or_less = nullable({"type": "number", "maximum": 0})
    logprobs = nullable(
        full(
            {
                "tokens": array(TEXT),
                "token_logprobs": array(floor_or_less),
                "top_logprobs": array(nullable(mapping(NUMBER))),
                "text_offset": array(COUNT),
            }
        )
    )
    choice = {"index": COUNT, "text": TEXT, "logprobs": logprobs}
    envelope = {
        "id": {"type": "string", "pattern": "^cmpl-"},
        "object": exactly("text_completion"),
        "created": COUNT,
        "model": TEXT,
    }
    return {
        "Completion": full(
            envelope
            | {
                "choices": array(full(choice | {"finish_reason": FINISH}, **MATCHED), least=1),
                "usage": ref("Usage"),
            }
        ),
        "CompletionChunk": full(
            envelope | {"choices": array(full(choice | {"finish_reason": nullable(FINISH)}))},
            usage=nullable(ref("Usage")),
        ),
    }


def _responses() -> dict[str, Schema]:
    usage = full(
        {
            "input_tokens": COUNT,
            "input_tokens_details": full({"cached_tokens": COUNT}, cached_tokens_by_source=BY_SOURCE),
            "output_tokens": COUNT,
            "output_tokens_details": full({"reasoning_tokens": COUNT}),
            "total_tokens": COUNT,
        }
    )
    return {
        "Response": full({
            "id": {"type": "string", "pattern": "^resp_"},
            "object": exactly("response"),
            "created_at": COUNT,
            "status": one_of("completed", "incomplete", "failed", "in_progress"),
            "error": nullable(full({"code": TEXT, "message": TEXT})),
            "incomplete_details": nullable(full({"reason": TEXT})),
            "instructions": nullable(TEXT),
            "model": TEXT,
            "output": array(full({"type": TEXT, "id": TEXT, "status": TEXT})),
            "parallel_tool_calls": BOOLEAN,
            "tools": array(OBJECT),
            "tool_choice": either(TEXT, OBJECT),
            "temperature": NUMBER,
            "top_p": NUMBER,
            "metadata": OBJECT,
            "usage": nullable(usage),
        }),
        "ResponseEvent": full({"type": TEXT, "sequence_number": COUNT}),
        "ResponseDeleted": full({"id": TEXT, "object": exactly("response"), "deleted": BOOLEAN}),
        "ResponseItems": full({
            "object": exactly("list"),
            "data": array(OBJECT),
            "first_id": nullable(TEXT),
            "last_id": nullable(TEXT),
            "has_more": BOOLEAN,
        }),
    }  # fmt: skip


def _messages() -> dict[str, Schema]:
    """Return the schemas of answers in Anthropic's format."""
    reasons = ("end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded")
    usage = {"input_tokens": COUNT, "cache_creation_input_tokens": COUNT, "cache_read_input_tokens": COUNT}
    error = full({"type": TEXT, "message": TEXT | {"minLength": 1}})
    return {
        "MessageAnswer": full({
            "id": {"type": "string", "pattern": "^msg_"},
            "type": exactly("message"),
            "role": exactly("assistant"),
            "model": TEXT,
            "content": array(full({"type": one_of("text", "thinking", "tool_use")})),
            "stop_reason": one_of(*reasons),
            "stop_sequence": nullable(TEXT),
            "usage": full(usage | {"output_tokens": COUNT}, cached_tokens_by_source=BY_SOURCE),
        }),
        "MessageEvent": full({"type": TEXT}),
        "MessageTokens": full({"input_tokens": COUNT}),
        "MessageError": full({"type": exactly("error"), "error": error, "request_id": TEXT}),
    }  # fmt: skip


def _generated() -> Schema:
    answer = full({
        "text": TEXT,
        "output_ids": array(COUNT),
        "meta_info": full({
            "id": TEXT,
            "finish_reason": nullable(full({"type": one_of("stop", "length")}, matched=ANYTHING)),
            "prompt_tokens": COUNT,
            "completion_tokens": COUNT,
            "cached_tokens": COUNT,
            "e2e_latency": NUMBER,
        }),
    })  # fmt: skip
    return either(answer, array(answer))
