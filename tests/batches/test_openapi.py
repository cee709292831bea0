"""The OpenAPI description of files and batches, tested with generated valid and invalid requests."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, strategies
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from baton_api.openapi.document import OPERATIONS
from tests.batches.serving import created, line, reaching, serving, uploaded

EXAMPLES = int(os.environ.get("BATON_OPENAPI_EXAMPLES", "6"))

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
WAYS = [
    pytest.param(one.method, one.path, mode, id=f"{one.method} {one.path} {mode.value}")
    for one in OPERATIONS
    for mode in GenerationMode
    if one.served_by == ("router",) and (mode is GenerationMode.POSITIVE or one.request)
]


@pytest.mark.parametrize(("method", "path", "mode"), WAYS)
async def test_batch_responses_match_the_description(method: str, path: str, mode: GenerationMode) -> None:
    async with serving() as router:
        ids = [await uploaded(router, line("a"))]
        for text in (line("a"), b"x\n", line("a", body={"stream": True})):
            ids.append(await created(router, text, metadata={"a": "b"}))
            await reaching(router, ids[-1], "in_progress", "failed", "completed")
        described = (await router.client.get("/openapi.json")).json()
        operation = schemathesis.openapi.from_dict(described)[path][method.upper()]
        await asyncio.to_thread(try_it, operation, router.url, ids, mode)


def try_it(operation: Any, url: str, ids: list[str], mode: GenerationMode) -> None:
    """Good requests, of which some name what there is, or bad ones."""

    @hypothesis.seed(20_240_601)
    @hypothesis.settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @hypothesis.given(
        case=operation.as_strategy(generation_mode=mode), batch_id=strategies.sampled_from([*ids, ""])
    )
    def check_case(case: Any, batch_id: str) -> None:
        if batch_id and mode is GenerationMode.POSITIVE:  # generated ids never exist
            case.path_parameters = dict.fromkeys(case.path_parameters or {}, batch_id)
            if isinstance(case.body, dict) and "input_file_id" in case.body:
                case.body["input_file_id"] = batch_id
        case.call_and_validate(base_url=url, checks=CHECKS, timeout=60)

    check_case()
