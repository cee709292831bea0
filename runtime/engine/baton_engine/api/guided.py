"""What a request's constraint and thoughts become before it starts: guides, one for each choice."""

from __future__ import annotations

import dataclasses

from baton_api.errors import InvalidRequest
from baton_engine.api import structured_output
from baton_engine.api.fields import Fields
from baton_engine.api.work import Work
from baton_engine.grammar.grammars import Grammars


def named(work: Work, fields: Fields) -> Work:
    """`work` with the field of the request noted that an error of its constraint names."""
    param = structured_output.constrained_by(fields)
    if param is None and fields.given("tools"):
        param = "tools"
    return dataclasses.replace(work, constrained_by=param)


async def guided(work: Work, grammars: Grammars) -> Work:
    """`work` with its constraint compiled. Raises InvalidRequest for one that cannot be kept to."""
    sampling = work.parameters.sampling
    if sampling.constraint is None and sampling.thinking is None:
        return work
    try:
        matchers = await grammars.prepare(sampling.constraint, sampling.thinking)
    except InvalidRequest as error:
        raise InvalidRequest(str(error), param=work.constrained_by, code=error.code) from error
    return dataclasses.replace(work, matchers=matchers)
