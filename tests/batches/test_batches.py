"""`/v1/batches`: cases J5, J7, J8 and J9, files and counts, cancelling."""

from __future__ import annotations

import time
from typing import Any

import pytest

from baton_api import headers
from baton_api.batch_jobs import OWN, window_fields
from baton_api.errors import (
    INTEGER_BELOW_MIN_VALUE,
    INVALID_TYPE,
    INVALID_VALUE,
    MISSING_REQUIRED_PARAMETER,
    STRING_ABOVE_MAX_LENGTH,
)
from baton_batches.values import BatchStatus, LineResult
from tests.batches.serving import (
    answered,
    check_error,
    content,
    create,
    created,
    get,
    line,
    reaching,
    rows,
    run_lines,
    serving,
    upload,
    uploaded,
)

KEYS = {
    "id", "object", "endpoint", "model", "errors", "input_file_id", "completion_window", "status",
    "output_file_id", "error_file_id", "created_at", "in_progress_at", "expires_at", "finalizing_at",
    "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at", "request_counts", "usage",
    "metadata",
}  # fmt: skip


async def test_batch_runs_from_creation_to_its_files() -> None:
    async with serving() as router:
        file = await uploaded(router, line("a") + line("b") + b"\n" + line("c"))
        shown = (await create(router, file, metadata={"job": "night"})).json()
        assert shown.keys() == KEYS
        assert (shown["status"], shown["metadata"], shown["input_file_id"]) == (
            "validating",
            {"job": "night"},
            file,
        )
        assert shown["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
        assert shown["expires_at"] == shown["created_at"] + 86400
        id = shown["id"]
        running = await reaching(router, id, "in_progress")
        assert (running["request_counts"]["total"], running["model"]) == (3, "tiny")
        assert running["output_file_id"] is None
        refused = LineResult(2, 400, b'{"error":{"param":"temperature"}}', "req_2")
        run_lines(router.router.storage.ledger, id, [answered(4), refused], time.time())
        assert (await get(router, id))["request_counts"] == {"total": 3, "completed": 1, "failed": 1}
        run_lines(router.router.storage.ledger, id, [answered(1)], time.time())
        router.router.batch_controller.wake()
        ended = await reaching(router, id, "completed")
        assert ended["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        stamps = [ended[f"{name}_at"] for name in ("created", "in_progress", "finalizing", "completed")]
        assert stamps == sorted(stamps)
        assert ended["usage"]["total_tokens"] == 10
        output = rows(await content(router, ended["output_file_id"]))
        assert [row["custom_id"] for row in output] == ["a", "c"]
        assert output[0]["response"]["body"]["choices"][0]["message"]["content"] == "yes 1"
        (error,) = rows(await content(router, ended["error_file_id"]))
        assert (error["custom_id"], error["response"]["status_code"]) == ("b", 400)
        kept = (await router.client.get(f"/v1/files/{ended['output_file_id']}")).json()
        assert kept["purpose"] == "batch_output"
        assert kept["expires_at"] == kept["created_at"] + 30 * 86400
        assert (await router.client.delete(f"/v1/files/{file}")).status_code == 200


async def test_j7_streaming_line_is_an_error_of_that_line() -> None:
    async with serving() as router:
        id = await created(router, line("a", body={"stream": True}) + line("b"))
        await reaching(router, id, "in_progress")
        run_lines(router.router.storage.ledger, id, [answered(2)], time.time())
        ended = await reaching(router, id, "completed")
        assert ended["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        (error,) = rows(await content(router, ended["error_file_id"]))
        assert error["response"]["body"]["error"]["param"] == "stream"


async def test_output_files_expire_as_requested() -> None:
    async with serving() as router:
        expiry = {"anchor": "created_at", "seconds": 3600}
        id = await created(router, line("a", body={"stream": True}), output_expires_after=expiry)
        ended = await reaching(router, id, "completed")
        assert ended["output_file_id"] is None
        kept = (await router.client.get(f"/v1/files/{ended['error_file_id']}")).json()
        assert kept["expires_at"] == kept["created_at"] + 3600


J5_ENDS = {"completed": line("a", body={"stream": True}), "failed": b"nonsense\n"}


@pytest.mark.parametrize("end", J5_ENDS)
async def test_j5_ended_batch_cannot_be_cancelled(end: str) -> None:
    async with serving() as router:
        id = await created(router, J5_ENDS[end])
        await reaching(router, id, end)
        answer = await router.client.post(f"/v1/batches/{id}/cancel")
        check_error(answer, 409, None, None)
        assert answer.json()["error"]["message"] == f"Cannot cancel a batch with status '{end}'."
        assert answer.headers[headers.SHOULD_RETRY] == "false"


async def test_j5_cancelling_twice_equals_once_and_keeps_results() -> None:
    async with serving() as router:
        id = await created(router, line("a") + line("b"))
        await reaching(router, id, "in_progress")
        ledger = router.router.storage.ledger
        epoch = ledger.lease(id, "a runner", time.time(), 30)
        assert epoch is not None
        ledger.record(id, epoch, [answered(2)], int(time.time()))
        for _ in range(2):
            shown = (await router.client.post(f"/v1/batches/{id}/cancel")).json()
            assert shown["status"] == "cancelling" and shown["cancelling_at"]
        assert ledger.renew(id, epoch, time.time(), 30).status is BatchStatus.CANCELLING
        ledger.record(id, epoch, [LineResult(1, 0, b'{"code":"c","message":"m"}')], int(time.time()))
        assert (await get(router, id))["status"] == "cancelling", "its runner has not let go of it"
        ledger.release(id, epoch)
        ended = await reaching(router, id, "cancelled")
        assert ended["cancelled_at"] and ended["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        assert [row["custom_id"] for row in rows(await content(router, ended["output_file_id"]))] == ["b"]
        assert (await router.client.post(f"/v1/batches/{id}/cancel")).json() == ended
        check_error(await router.client.post("/v1/batches/batch_none/cancel"), 404, "id")
        check_error(await router.client.get("/v1/batches/batch_none"), 404, "id")


async def test_batch_cancelled_before_any_line_has_no_files() -> None:
    async with serving() as router:
        id = await created(router, line("a"))
        await router.client.post(f"/v1/batches/{id}/cancel")
        ended = await reaching(router, id, "cancelled")
        assert (ended["output_file_id"], ended["error_file_id"]) == (None, None)


J8: dict[str, tuple[bytes, str, int | None]] = {
    "no json on line 2": (line("a") + b"{\n", "invalid_json_line", 2),
    "duplicate custom_id": (line("a") + line("a"), "duplicate_custom_id", 2),
    "no custom_id": (line("a", custom_id=None), MISSING_REQUIRED_PARAMETER, 1),
    "method GET": (line("a", method="GET"), "invalid_method", 1),
    "another endpoint": (line("a", url="/v1/completions"), "invalid_url", 1),
    "no lines": (b"\n\n", "empty_file", None),
}  # fmt: skip


@pytest.mark.parametrize("name", J8)
async def test_j8_invalid_input_file_fails_with_line_and_code(name: str) -> None:
    text, code, number = J8[name]
    async with serving() as router:
        failed = await reaching(router, await created(router, text), "failed")
        assert failed["failed_at"] and failed["output_file_id"] is None and failed["error_file_id"] is None
        assert failed["errors"]["object"] == "list"
        (error,) = failed["errors"]["data"]
        assert (error["code"], error["line"]) == (code, number)
        assert error["message"] and set(error) == {"code", "message", "param", "line"}


J9: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "an unknown file": ({"input_file_id": "file-none"}, 404, "input_file_id", ""),
    "no file": ({"input_file_id": None}, 400, "input_file_id", MISSING_REQUIRED_PARAMETER),
    "a number for a file": ({"input_file_id": 7}, 400, "input_file_id", INVALID_TYPE),
    "a window that is none": ({"completion_window": "1 week"}, 400, "completion_window", INVALID_VALUE),
    "another window than OpenAI's": ({"completion_window": "1h"}, 400, "completion_window", INVALID_VALUE),
    "a window of no time": ({OWN: "59s"}, 400, OWN, INVALID_VALUE),
    "an endless window": ({OWN: "31d"}, 400, OWN, INVALID_VALUE),
    "no window": ({"completion_window": None}, 400, "completion_window", MISSING_REQUIRED_PARAMETER),
    "another endpoint": ({"endpoint": "/v1/foo"}, 400, "endpoint", INVALID_VALUE),
    "17 keys": ({"metadata": {str(n): "" for n in range(17)}}, 400, "metadata", INVALID_VALUE),
    "a long key": ({"metadata": {"k" * 65: ""}}, 400, f"metadata.{'k' * 65}", INVALID_VALUE),
    "a long value": ({"metadata": {"k": "v" * 513}}, 400, "metadata.k", STRING_ABOVE_MAX_LENGTH),
    "a number in metadata": ({"metadata": {"k": 1}}, 400, "metadata.k", INVALID_TYPE),
    "metadata a list": ({"metadata": []}, 400, "metadata", INVALID_TYPE),
    "another anchor": (
        {"output_expires_after": {"anchor": "now", "seconds": 3600}}, 400, "output_expires_after.anchor",
        INVALID_VALUE,
    ),
    "too short": (
        {"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, 400,
        "output_expires_after.seconds", INTEGER_BELOW_MIN_VALUE,
    ),
    "no seconds": (
        {"output_expires_after": {"anchor": "created_at"}}, 400, "output_expires_after.seconds",
        MISSING_REQUIRED_PARAMETER,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", J9)
async def test_j9_impossible_batch_is_refused(name: str) -> None:
    fields, status, param, code = J9[name]
    async with serving() as router:
        file = await uploaded(router, line("a"))
        check_error(await create(router, file, **fields), status, param, code)
        assert (await router.client.get("/v1/batches")).json()["data"] == []


async def test_j9_file_of_another_purpose_is_refused() -> None:
    async with serving() as router:
        file = (await upload(router, line("a"), purpose="user_data")).json()["id"]
        check_error(await create(router, file), 400, "input_file_id", INVALID_VALUE)


BODIES = {
    "no json": (b"{", "application/json", 400),
    "a list": (b"[]", "application/json", 400),
    "a text": (b"{}", "text/plain", 400),
    "too large": (b" " * 70_000, "application/json", 413),
}


@pytest.mark.parametrize("name", BODIES)
async def test_invalid_batch_body_is_refused(name: str) -> None:
    body, kind, status = BODIES[name]
    async with serving() as router:
        answer = await router.client.post("/v1/batches", content=body, headers={"content-type": kind})
        check_error(answer, status, None)


async def test_batches_are_listed_in_pages_newest_first() -> None:
    async with serving() as router:
        ids = [await created(router, line("a")) for _ in range(3)]
        page = (await router.client.get("/v1/batches", params={"limit": 2})).json()
        assert [one["id"] for one in page["data"]] == ids[:0:-1]
        assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[2], ids[1], True)
        rest = (await router.client.get("/v1/batches", params={"after": page["last_id"]})).json()
        assert ([one["id"] for one in rest["data"]], rest["has_more"]) == (ids[:1], False)
        for query in ("limit=0", "limit=101", "limit=x"):
            check_error(await router.client.get(f"/v1/batches?{query}"), 400, "limit")


async def test_batch_has_its_completion_window() -> None:
    async with serving() as router:
        for window, seconds in (("24h", 86_400), ("90m", 5400), ("60s", 60), ("30d", 2_592_000)):
            id = await created(router, line("a"), **window_fields(window))
            shown = await get(router, id)
            assert shown["completion_window"] == window
            assert shown["expires_at"] == shown["created_at"] + seconds
