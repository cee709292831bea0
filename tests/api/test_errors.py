"""Every error has its place in the tree, its status and OpenAI's shape."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_api import errors
from baton_api.errors import (
    CODES,
    INVALID_VALUE,
    MESSAGE_LIMIT,
    RETRY_SPREAD_S,
    AdapterNotFound,
    BatchEnded,
    BatchNotFound,
    BatonError,
    BodyTooLarge,
    BodyTooSlow,
    ClientError,
    ConstraintBroken,
    ContextTooLong,
    FileNotFound,
    Forbidden,
    HeadTooLarge,
    IncompatiblePeer,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    NotInTime,
    NotReady,
    Overloaded,
    PoisonRequest,
    PreviousResponseNotFound,
    PromptTooLarge,
    QuotaExceeded,
    RangeNotSatisfiable,
    RateLimited,
    RequestAborted,
    ResponseNotFound,
    RouteNotFound,
    SetupError,
    StaleLease,
    StorageFull,
    StorageUnavailable,
    TransferFailed,
    Unauthorized,
    WorkerLost,
)
from baton_api.limits import table

ROOT = Path(__file__).parents[2]


def below(root: type[BatonError], depth: int = 0) -> Iterator[tuple[int, type[BatonError]]]:
    yield depth, root
    for child in root.__subclasses__():
        if child.__module__.startswith(errors.__name__):  # other components may have more particular ones
            yield from below(child, depth + 1)


EXAMPLES: list[BatonError] = [
    InvalidRequest("temperature must be at least 0", param="temperature"),
    ContextTooLong(9000, 10, 8192, param="messages"),
    PromptTooLarge(600, 512, 16),
    Unauthorized(),
    ModelNotFound("gpt-x", ("smollm2",)),
    BodyTooLarge(4096),
    BodyTooSlow(60.0),
    Overloaded(4096, 4096, retry_after=900),
    NotInTime(30.2, 10.0),
    NotInTime(300.0, 300.0, waited=True),
    RateLimited(1000, "tokens per minute", 7),
    RateLimited(4, "requests at once", 900),
]


LONG = "x" * 100_000
HOSTILE: list[BatonError] = [
    InvalidRequest(LONG, param="a", code=INVALID_VALUE),
    ContextTooLong(10**400, 10**400, 10**400, param="messages"),
    PromptTooLarge(10**400, 10**400, 10**400),
    PreviousResponseNotFound(LONG),
    Unauthorized(),
    Forbidden(LONG, LONG),
    ModelNotFound(LONG, (LONG,)),
    AdapterNotFound(LONG),
    ResponseNotFound(LONG),
    FileNotFound(LONG),
    BatchNotFound(LONG),
    BatchEnded(LONG),
    StaleLease(LONG, 10**400, 10**400, LONG),
    QuotaExceeded(LONG, 10**400, 10**400),
    StorageUnavailable(LONG),
    StorageFull(LONG),
    RouteNotFound("GET", LONG),
    MethodNotAllowed(LONG, LONG, "POST"),
    BodyTooLarge(10**400),
    BodyTooSlow(10.0**300),
    HeadTooLarge(10**400),
    RangeNotSatisfiable(10**400),
    RateLimited(10**400, LONG, 10**400),
    RequestAborted(),
    Overloaded(10**400, 10**400),
    NotInTime(1e300, 0.0),
    NotReady(LONG),
    WorkerLost(LONG),
    PoisonRequest(10**400),
    InternalError(),
    ConstraintBroken(10**400),
    TransferFailed(LONG),
    IncompatiblePeer(LONG),
    SetupError(LONG),
]


def test_error_messages_are_bounded_for_any_arguments() -> None:
    kinds = {kind for _, kind in below(BatonError)} - {BatonError, ClientError}
    assert {type(error) for error in HOSTILE} == kinds
    for error in HOSTILE:
        assert 0 < len(error.message) <= MESSAGE_LIMIT


def test_error_messages_state_cause_and_remedy() -> None:
    for _, kind in below(BatonError):
        if kind in (BatonError, ClientError):
            continue
        meaning, _, advice = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")
        assert meaning.endswith(".") and advice.endswith("."), kind.__name__


def test_error_codes_are_all_documented() -> None:
    """Covers codes in sources and in the table of limits. Documented codes must also be in use."""
    codes = {code for limit in table().values() for code in (limit.code, limit.code_below) if code}
    codes |= {kind.code for _, kind in below(InvalidRequest) if kind.code}
    for file in ROOT.rglob("baton_*/**/*.py"):
        if "baton_observing" in file.parts:
            continue  # there a code is a label of a metric
        for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
            for keyword in call.keywords:
                value = keyword.value
                if keyword.arg == "code" and isinstance(value, ast.Name) and hasattr(errors, value.id):
                    codes.add(getattr(errors, value.id))
                elif keyword.arg == "code" and isinstance(value, ast.Constant):
                    codes.add(str(value.value))
    assert codes - {BodyTooLarge.code} == set(CODES)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_error_body_has_all_four_fields_of_openai(error: BatonError) -> None:
    body = error.body()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"] == error.message
    assert (body["type"] == "server_error") == (error.status >= 500)


def test_messages_contain_the_number_and_the_remedy() -> None:
    assert str(ContextTooLong(9000, 10, 8192, param="messages")) == (
        "This model's maximum context length is 8192 tokens, but the request has 9000 prompt tokens "
        "and 10 to generate. Shorten the prompt or lower max_tokens."
    )
    assert "--kv-cache-memory" in str(PromptTooLarge(600, 512, 16))
    assert "Served here: smollm2." in str(ModelNotFound("gpt-x", ("smollm2",)))


def test_long_message_is_truncated_for_clients() -> None:
    assert len(InvalidRequest("x" * 10_000).message) == MESSAGE_LIMIT


def test_simultaneous_rejections_get_different_retry_times() -> None:
    waits = [int(Overloaded(1, 1).headers["retry-after"]) for _ in range(200)]
    assert set(waits) == set(range(1, 2 + RETRY_SPREAD_S))
    assert all(0 < int(Overloaded(1, 1, retry_after=119).headers["retry-after"]) <= 120 for _ in range(50))
    assert NotReady("later").headers.keys() == {"retry-after"}
    assert InvalidRequest("never").headers == {}


@pytest.mark.parametrize("requested, expected", [(0, 1), (5, 5), (900, 120)])
def test_retry_after_stays_within_the_range_clients_accept(requested: int, expected: int) -> None:
    assert Overloaded(1, 1, retry_after=requested).retry_after == expected
