"""`POST /v1/messages` and `/v1/messages/count_tokens` on a worker."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from baton_api import anthropic, limits
from baton_engine.api import parameters
from baton_engine.api.chat import endpoint
from baton_engine.api.fields import Fields, renamed_fields
from baton_engine.api.generate import check_model
from baton_engine.api.messages import request
from baton_engine.api.messages.output import MessageShape
from baton_engine.api.messages.request import MessagesRequest
from baton_engine.api.served import Served
from baton_engine.api.work import Work, with_constraint_field


def prepare(fields: Fields, served: Served) -> Work:
    """
    Translate and prepare a request. Blocks for long conversations, so do not call it on the event loop.

    The context may end before `max_tokens`, as in Anthropic's API; the reason of the stop says so.
    """
    fields.require("max_tokens")
    wanted = fields.integer("max_tokens", *limits.MAX_TOKENS.range) or 1
    given = _read(fields, served)
    budget = given.chat.get("thinking_token_budget")
    if budget is not None and budget >= wanted:
        Fields({}, "thinking").wrong_value(
            "budget_tokens", f"expected less than 'max_tokens', which is {wanted}, but got {budget}"
        )
    chat, here = Fields(given.chat), partial(request.here, request=given)
    with renamed_fields(here):
        work = with_constraint_field(endpoint.prepare(chat, served), chat)
        (prompt,) = work.prompts
        limit = min(wanted, prompt.max_tokens)
        parameters.check_min_tokens(work.parameters, limit)
    return dataclasses.replace(
        work,
        prompts=(dataclasses.replace(prompt, max_tokens=limit),),
        shape=MessageShape(
            model=served.answering(fields.text("model")), cut_by_context=limit < wanted, edits=given.edits
        ),
        failure=anthropic.error_event,
        done=b"",
        constrained_by=work.constrained_by and here(work.constrained_by),
    )


def count_tokens(fields: Fields, served: Served) -> dict[str, Any]:
    """Return the number of tokens of the prompt, even if it exceeds the context."""
    fields.require("model")
    check_model(fields, served)
    given = _read(fields, served)
    with renamed_fields(partial(request.here, request=given)):
        count = len(endpoint.prompt_tokens(Fields(given.chat), served))
    edited = {"context_management": {"original_input_tokens": count}} if given.edits else {}
    return {"input_tokens": count} | edited


def _read(fields: Fields, served: Served) -> MessagesRequest:
    return request.read(fields, reasons=served.chat.reasoning is not None)
