"""The pages of errors and of limits, written from the tables that the servers themselves read."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from baton_api import limits
from baton_api.errors import CODES, MESSAGE_LIMIT, RETRY_LIMIT_S, RETRY_SPREAD_S, BatonError, InvalidRequest

ERRORS = f"""\
# Errors

Written by `make fix` from `baton_api.errors`; change the docstrings there.

Every error is JSON in the form of OpenAI's, in an answer of its own or as an event of a stream that had
begun:

```json
{{"error": {{"message": "...", "type": "invalid_request_error", "param": "n", "code": "invalid_type"}}}}
```

All four are always there; `param` and `code` may be null. A message has at most {MESSAGE_LIMIT:,} characters.
Answers with `Retry-After` say a whole number of seconds up to {RETRY_LIMIT_S}, drawn anew for each client and
spread over {RETRY_SPREAD_S} seconds, so that those who are refused together do not come back together.
"""

LIMITS = """\
# Limits of a request

Written by `make fix` from `baton_api.limits`; change the table there.

What lies beyond a limit is refused before anything is computed, with the status and code of its row, and
with the field as `param`. Fields that no row names are bounded by the body. Besides, numbers must be finite
and within double precision, strings must be whole Unicode (no lone surrogates), and of a member that is
given twice the last one counts.
"""


def errors_page() -> str:
    return "\n".join([ERRORS, *_classes(), *_codes()])


def limits_page() -> str:
    rows = ["| what | where | from | to | beyond |", "|---|---|---|---|---|"]
    rows += ["| " + " | ".join(row) + " |" for row in limits.rows()]
    return "\n".join([LIMITS, *rows, ""])


def _classes() -> Iterator[str]:
    yield "| class | status | type | code | param | meaning | what to do |"
    yield "|---|---|---|---|---|---|---|"
    for error in descendants(BatonError):
        meaning, advice = told(error)
        code = "see below" if error is InvalidRequest else _shown(error, "code")
        param = "the field" if issubclass(error, InvalidRequest) else _shown(error, "param")
        cells = (error.__name__, str(error.status), f"`{error.type}`", code, param, meaning, advice)
        yield f"| {' | '.join(cells)} |"
    yield ""


def _codes() -> Iterator[str]:
    yield "## Codes of InvalidRequest\n"
    yield "Without a code, fields contradict one another, or the body is no JSON object.\n"
    yield "| code | meaning |"
    yield "|---|---|"
    for code, meaning in CODES.items():
        yield f"| `{code}` | {meaning} |"
    yield ""


def descendants(root: type[BatonError]) -> Iterator[type[BatonError]]:
    """All errors below `root` that the tree has, in its order."""
    for child in root.__subclasses__():
        if child.__module__ == root.__module__:
            yield child
            yield from descendants(child)


def told(error: type[BatonError]) -> tuple[str, str]:
    """What the error's docstring says that it means, and what to do."""
    meaning, _, advice = inspect.cleandoc(error.__doc__ or "").partition("\n\n")
    return " ".join(meaning.split()), " ".join(advice.split())


def _shown(error: type[BatonError], name: str) -> str:
    value = getattr(error, name)
    return "" if value is None else f"`{value}`"
