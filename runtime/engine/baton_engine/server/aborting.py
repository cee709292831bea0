"""`POST /abort_request`: ends requests by the id of the answer, of the HTTP request, or of the client."""

from __future__ import annotations

from baton_api.errors import MISSING_REQUIRED_PARAMETER, InvalidRequest
from baton_engine.server.fields import Fields
from baton_engine.server.running import Running, read_names


def abort_request(fields: Fields, running: Running) -> dict[str, int]:
    """
    How many requests ended: none is no error, since they may have ended on their own.

    For the event loop, to which the running requests belong.
    """
    if fields.boolean("abort_all"):
        return {"aborted": running.abort_all()}
    names = read_names(fields)
    if not names:
        raise InvalidRequest(
            "Say which request to abort: 'rid' or 'request_id', or 'abort_all'.",
            param="rid",
            code=MISSING_REQUIRED_PARAMETER,
        )
    return {"aborted": sum(running.abort(name) for name in dict.fromkeys(names))}
