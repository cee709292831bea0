"""What a request's constraint and thoughts become before it starts: guides, one for each choice."""

from __future__ import annotations

import dataclasses

from baton_api.errors import InvalidRequest
from baton_engine.grammar.grammars import Grammars
from baton_engine.server import structured
from baton_engine.server.fields import Fields
from baton_engine.server.work import Work


def guided(work: Work, fields: Fields, grammars: Grammars) -> Work:
    """
    `work` with its constraint compiled. Takes a while: not for the event loop.

    Raises InvalidRequest for the field that asks for what cannot be.
    """
    sampling = work.parameters.sampling
    if sampling.constraint is None and sampling.thinking is None:
        return work
    try:
        guides = grammars.guides(sampling.constraint, sampling.thinking)
    except InvalidRequest as error:
        param = structured.constrained_by(fields)
        if param is None and fields.given("tools"):
            param = "tools"
        raise InvalidRequest(str(error), param=param, code=error.code) from error
    return dataclasses.replace(work, guides=guides)
