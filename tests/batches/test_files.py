"""`/v1/files`: cases I1 to I6 of the specification, ranges, names, limits, owners, nothing left behind."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import random
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton_api import headers as header_names
from baton_api.errors import (
    INTEGER_ABOVE_MAX_VALUE,
    INTEGER_BELOW_MIN_VALUE,
    INVALID_TYPE,
    INVALID_VALUE,
    MISSING_REQUIRED_PARAMETER,
    BodyTooLarge,
    QuotaExceeded,
)
from tests.batches.serving import (
    bearer,
    check_error,
    content,
    create,
    created,
    reaching,
    serving,
    upload,
    uploaded,
)
from tests.router.running import until

DAYS_30 = 30 * 86400


async def test_i1_file_is_stored_and_described() -> None:
    async with serving() as router:
        before = int(time.time())
        shown = (await upload(router, b"\xef\xbb\xbfa\r\n\x00")).json()
        assert shown.items() >= {
            "object": "file", "bytes": 7, "filename": "in.jsonl", "purpose": "batch", "status": "processed",
        }.items()  # fmt: skip
        assert shown["id"].startswith("file-")
        assert before <= shown["created_at"] <= before + 5
        assert shown["expires_at"] == shown["created_at"] + DAYS_30
        kept = (await upload(router, b"x", purpose="user_data")).json()
        assert kept["expires_at"] is None


async def test_i2_file_is_returned_byte_by_byte() -> None:
    sent = b"\xef\xbb\xbfa\r\n\x00\xff" + random.Random(1).randbytes(3_000_000)
    async with serving() as router:
        id = await uploaded(router, sent)
        shown = await router.client.get(f"/v1/files/{id}")
        assert shown.json()["id"] == id
        answer = await router.client.get(f"/v1/files/{id}/content")
        assert answer.content == sent
        assert answer.headers["content-length"] == str(len(sent))
        assert answer.headers["etag"] == f'"{hashlib.sha256(sent).hexdigest()}"'
        assert answer.headers["x-content-type-options"] == "nosniff"


RANGES: dict[str, tuple[str, int, bytes]] = {
    "from the start": ("bytes=0-3", 206, b"0123"),
    "from the middle": ("bytes=7-", 206, b"789"),
    "the last ones": ("bytes=-2", 206, b"89"),
    "more than there is": ("bytes=5-99", 206, b"56789"),
    "all": ("bytes=0-", 200, b"0123456789"),
    "another unit": ("lines=1-2", 200, b"0123456789"),
    "several": ("bytes=1-2,4-5", 200, b"0123456789"),
    "backwards": ("bytes=5-2", 200, b"0123456789"),
    "behind the end": ("bytes=10-", 416, b""),
    "the last none": ("bytes=-0", 416, b""),
}


@pytest.mark.parametrize("name", RANGES)
async def test_range_of_a_file_is_returned(name: str) -> None:
    header, status, wanted = RANGES[name]
    async with serving() as router:
        id = await uploaded(router, b"0123456789")
        answer = await router.client.get(f"/v1/files/{id}/content", headers={"range": header})
        assert answer.status_code == status
        if status == 416:
            check_error(answer, 416, None)
            assert answer.headers["content-range"] == "bytes */10"
            return
        assert answer.content == wanted
        if status == 206:
            start = b"0123456789".index(wanted)
            assert answer.headers["content-range"] == f"bytes {start}-{start + len(wanted) - 1}/10"
            tag = {"range": header, "if-range": '"another"'}
            whole = await router.client.get(f"/v1/files/{id}/content", headers=tag)
            assert (whole.status_code, whole.content) == (200, b"0123456789")


async def test_i3_deleted_file_is_gone() -> None:
    async with serving() as router:
        id = await uploaded(router, b"x")
        gone = await router.client.delete(f"/v1/files/{id}")
        assert gone.json() == {"id": id, "object": "file", "deleted": True}
        for method, path in (("DELETE", ""), ("GET", ""), ("GET", "/content")):
            answer = await router.client.request(method, f"/v1/files/{id}{path}")
            check_error(answer, 404, "id", None)
            assert answer.json()["error"]["message"] == f"No such File object: {id}"


I4: dict[str, tuple[dict[str, Any], str, str]] = {
    "purpose nope": ({"files": {"file": b"x"}, "data": {"purpose": "nope"}}, "purpose", INVALID_VALUE),
    "no purpose": ({"files": {"file": b"x"}}, "purpose", MISSING_REQUIRED_PARAMETER),
    "no file": ({"files": {"purpose": (None, b"batch")}}, "file", MISSING_REQUIRED_PARAMETER),
    "an empty file": ({"files": {"file": b""}, "data": {"purpose": "batch"}}, "file", INVALID_VALUE),
    "another anchor": (
        {"files": {"file": b"x"}, "data": {"purpose": "batch", "expires_after[anchor]": "now"}},
        "expires_after[anchor]",
        INVALID_VALUE,
    ),
    "no seconds": (
        {"files": {"file": b"x"}, "data": {"purpose": "batch", "expires_after[anchor]": "created_at"}},
        "expires_after[seconds]",
        MISSING_REQUIRED_PARAMETER,
    ),
}


@pytest.mark.parametrize("name", I4)
async def test_i4_invalid_upload_form_is_refused_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    form, param, code = I4[name]
    async with serving(state=str(tmp_path)) as router:
        check_error(await router.client.post("/v1/files", **form), 400, param, code)
        await until(lambda: nothing_in(tmp_path / "files"))
        assert (await router.client.get("/v1/files")).json()["data"] == []


SECONDS = {"3599": INTEGER_BELOW_MIN_VALUE, "2592001": INTEGER_ABOVE_MAX_VALUE, "1e4": INVALID_TYPE}


@pytest.mark.parametrize("seconds", SECONDS)
async def test_i4_expiry_out_of_bounds_is_refused(seconds: str) -> None:
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": seconds}
    async with serving() as router:
        answer = await upload(router, b"x", **fields)
        check_error(answer, 400, "expires_after[seconds]", SECONDS[seconds])


async def test_expiry_is_set_by_the_upload() -> None:
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    async with serving() as router:
        shown = (await upload(router, b"x", **fields)).json()
        assert shown["expires_at"] == shown["created_at"] + 3600


PART = b'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
NOT_FORMS: dict[str, tuple[bytes, str]] = {
    "json": (b"{}", "application/json"),
    "no type": (b"{}", ""),
    "no boundary": (b"--x\r\n", "multipart/form-data"),
    "another boundary": (b"--y\r\n", "multipart/form-data; boundary=x"),
    "cut off": (b"--x\r\n" + PART + b"abc", "multipart/form-data; boundary=x"),
    "a long boundary": (b"--x\r\n", f"multipart/form-data; boundary={'x' * 5000}"),
    "nothing": (b"", "multipart/form-data; boundary=x"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_FORMS)
async def test_invalid_form_is_refused(name: str, tmp_path: Path) -> None:
    body, kind = NOT_FORMS[name]
    async with serving(state=str(tmp_path)) as router:
        answer = await router.client.post("/v1/files", content=body, headers={"content-type": kind})
        check_error(answer, 400, None)
        await until(lambda: nothing_in(tmp_path / "files"))


def nothing_in(folder: Path) -> bool:
    return not [file for file in folder.rglob("*") if file.is_file()]


async def test_i6_files_are_listed_in_pages() -> None:
    async with serving() as router:
        ids = [await uploaded(router, b"x") for _ in range(5)]
        other = (await upload(router, b"x", purpose="vision")).json()["id"]
        seen: list[str] = []
        query: dict[str, Any] = {"limit": 2, "purpose": "batch"}
        while True:
            page = (await router.client.get("/v1/files", params=query)).json()
            data = [one["id"] for one in page["data"]]
            assert (page["object"], page["first_id"], page["last_id"]) == ("list", data[0], data[-1])
            seen += data
            if not page["has_more"]:
                break
            query["after"] = page["last_id"]
        assert seen == ids[::-1]
        ascending = (await router.client.get("/v1/files", params={"order": "asc"})).json()
        assert [one["id"] for one in ascending["data"]] == [*ids, other]
        empty = (await router.client.get("/v1/files", params={"purpose": "nope"})).json()
        assert empty == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


BAD_PAGES = {
    "limit=0": "limit",
    "limit=10001": "limit",
    "limit=x": "limit",
    "order=up": "order",
    "after=f": "after",
}


@pytest.mark.parametrize("query", BAD_PAGES)
async def test_i6_invalid_page_is_refused(query: str) -> None:
    async with serving() as router:
        check_error(await router.client.get(f"/v1/files?{query}"), 400, BAD_PAGES[query])


NAMES = {
    "../../x": "x",
    "..%2f..%2fx": "..%2f..%2fx",
    "C:\\temp\\x": "x",
    "x\u202egnp": "xgnp",
    "..": "upload",
    "CON": "CON",
    "n" * 4096: "n" * 255,
    "d\u00e9j\u00e0 vu.jsonl": "d\u00e9j\u00e0 vu.jsonl",
}


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
async def test_file_name_is_shown_without_a_path(name: str, tmp_path: Path) -> None:
    async with serving(state=str(tmp_path / "state")) as router:
        shown = (await upload(router, b"x", name)).json()
        assert shown["filename"] == NAMES[name]
        (kept,) = [file for file in (tmp_path / "state" / "files").rglob("*") if file.is_file()]
        assert len(kept.name) == 32 and set(kept.name) <= set("0123456789abcdef")
        answer = await router.client.get(f"/v1/files/{shown['id']}/content")
        assert answer.content == b"x" and "attachment" in answer.headers["content-disposition"]


async def test_key_sees_only_its_own_files_and_batches() -> None:
    async with serving(api_key=["one", "two"]) as router:
        id = await uploaded(router, b"x\n", key="one")
        batch = (await create(router, id, key="one")).json()["id"]
        requests = [
            ("GET", f"/v1/files/{id}"), ("GET", f"/v1/files/{id}/content"), ("DELETE", f"/v1/files/{id}"),
            ("GET", f"/v1/batches/{batch}"), ("POST", f"/v1/batches/{batch}/cancel"),
        ]  # fmt: skip
        for method, path in requests:
            check_error(await router.client.request(method, path, headers=bearer("two")), 404, "id")
        check_error(await create(router, id, key="two"), 404, "input_file_id")
        for path in ("/v1/files", "/v1/batches"):
            assert (await router.client.get(path, headers=bearer("two"))).json()["data"] == []
            after = id if path == "/v1/files" else batch
            paged = await router.client.get(path, params={"after": after}, headers=bearer("two"))
            check_error(paged, 400, "after")
            assert len((await router.client.get(path, headers=bearer("one"))).json()["data"]) == 1
            assert (await router.client.get(path)).status_code == 401


async def test_oversized_file_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    async with serving(state=str(tmp_path), file_limit=1000) as router:
        assert (await upload(router, b"x" * 1000)).status_code == 200
        for size in (1001, 5_000_000):
            check_error(await upload(router, b"x" * size), 413, None, BodyTooLarge.code)
        await until(lambda: len([f for f in (tmp_path / "files").rglob("*") if f.is_file()]) == 1)


async def test_key_stores_no_more_than_its_quota() -> None:
    async with serving(files_per_key=2, file_bytes_per_key=100) as router:
        first = await uploaded(router, b"x" * 60)
        check_error(await upload(router, b"x" * 60), 429, None, QuotaExceeded.code)
        await uploaded(router, b"x" * 40)
        full = await upload(router, b"x")
        check_error(full, 429, None, QuotaExceeded.code)
        assert full.headers[header_names.SHOULD_RETRY] == "false"
        await router.client.delete(f"/v1/files/{first}")
        assert (await upload(router, b"x")).status_code == 200


async def test_disconnected_upload_leaves_nothing(tmp_path: Path) -> None:
    async with serving(state=str(tmp_path)) as router:
        _, writer = await asyncio.open_connection("127.0.0.1", router.port)
        head = "POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n"
        part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"x" * 3_000_000
        writer.write(head.encode() + b"content-length: 9000000\r\n\r\n" + part)
        await until(lambda: not nothing_in(tmp_path / "files"))
        writer.transport.abort()
        await until(lambda: nothing_in(tmp_path / "files"))
        assert (await router.client.get("/v1/files")).json()["data"] == []


async def test_stalled_upload_is_rejected(tmp_path: Path) -> None:
    async with serving(state=str(tmp_path), body_s=0.2) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        head = b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n"
        writer.write(head + b"content-length: 9000000\r\n\r\n--b\r\n")
        assert b"408" in await asyncio.wait_for(reader.readline(), 60)
        writer.close()
        await until(lambda: nothing_in(tmp_path / "files"))


ENDLESS = {
    "parts": (b"", b'--b\r\nContent-Disposition: form-data; name="p"\r\n\r\nb\r\n' * 1000, 400),
    "bytes behind the form": (b"--b--\r\n", b"x" * 100_000, 413),
    "bytes of a field": (b'--b\r\nContent-Disposition: form-data; name="p"\r\n\r\n', b"x" * 10_000, 400),
    "headers of a part": (b"--b\r\n", b"a: b\r\n" * 1000, 400),
}


@pytest.mark.parametrize(("start", "part", "status"), ENDLESS.values(), ids=ENDLESS.keys())
async def test_endless_upload_is_rejected(tmp_path: Path, start: bytes, part: bytes, status: int) -> None:
    async with serving(state=str(tmp_path), file_limit=1_000_000) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        head = b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n"
        writer.write(head + b"transfer-encoding: chunked\r\n\r\n")

        async def flood() -> None:
            for piece in itertools.chain([start], itertools.repeat(part)):
                if piece:
                    writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()

        flooding = asyncio.create_task(flood())
        line = await asyncio.wait_for(reader.readline(), 60)
        flooding.cancel()
        writer.transport.abort()
        await asyncio.gather(flooding, return_exceptions=True)
        assert str(status).encode() in line
        await until(lambda: nothing_in(tmp_path / "files"))
        await until(lambda: not router.router.memory.used)


async def test_large_upload_and_download_use_little_memory() -> None:
    size, memory = 64 * 1024 * 1024, psutil.Process(os.getpid()).memory_info
    piece = b"x" * 65536

    async def form() -> Any:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        for _ in range(size // len(piece)):
            yield piece
        yield b'\r\n--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'

    headers = {"content-type": "multipart/form-data; boundary=b"}
    async with serving() as router:
        await uploaded(router, b"x")  # modules loaded by the first upload do not count
        before = memory().rss
        shown = (await router.client.post("/v1/files", content=form(), headers=headers)).json()
        assert shown["bytes"] == size
        received = 0
        async with router.client.stream("GET", f"/v1/files/{shown['id']}/content") as answer:
            async for part in answer.aiter_raw():
                received += len(part)
        assert received == size
        assert memory().rss - before < 24 * 1024 * 1024


async def test_files_and_batches_outlive_their_router(tmp_path: Path) -> None:
    async with serving(state=str(tmp_path)) as router:
        id = await uploaded(router, b"not json\n")
        batch = (await create(router, id)).json()["id"]
    async with serving(state=str(tmp_path)) as router:
        assert await content(router, id) == b"not json\n"
        shown = await reaching(router, batch, "failed")
        assert shown["errors"]["data"][0]["line"] == 1


async def test_router_without_files_creates_no_folder(tmp_path: Path) -> None:
    async with serving(state=str(tmp_path / "state")) as router:
        assert (await router.client.get("/health")).status_code == 200
        await asyncio.sleep(0.2)  # several looks
    assert not (tmp_path / "state").exists()


async def test_deleted_input_does_not_disturb_its_batch() -> None:
    async with serving() as router:
        id = await created(router, b"not json\n")
        shown = (await router.client.get(f"/v1/batches/{id}")).json()
        await router.client.delete(f"/v1/files/{shown['input_file_id']}")
        assert (await reaching(router, id, "failed"))["errors"]["data"][0]["code"] == "invalid_json_line"


async def test_concurrent_uploads_stay_separate(tmp_path: Path) -> None:
    async with serving(state=str(tmp_path)) as router:
        ids = await asyncio.gather(*(uploaded(router, bytes([65 + n]) * 100_000) for n in range(8)))
        for number, id in enumerate(ids):
            assert await content(router, id) == bytes([65 + number]) * 100_000
