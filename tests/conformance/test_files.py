"""I: files, which a router keeps."""

from __future__ import annotations

import io
import time
from pathlib import Path

import openai
import pytest

from tests.conformance.conftest import smollm2
from tests.conformance.deployment import PAIR, Deployment, Deployments
from tests.conformance.expected import check_error

pytestmark = pytest.mark.nixl

CONTENT = b"\xef\xbb\xbf{}\r\n\x00\xff"
MONTH = 30 * 86_400


@pytest.fixture
def served(deployments: Deployments) -> Deployment:
    """Behind a router: a worker by itself keeps nothing."""
    pytest.importorskip("nixl", reason="the NIXL library is missing")
    return smollm2(deployments, PAIR)


def test_I1_a_file_is_kept(served: Deployment, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(CONTENT)
    before = int(time.time())
    with path.open("rb") as file:
        named = served.client.files.create(file=file, purpose="batch")
    unnamed = served.client.files.create(file=io.BytesIO(CONTENT), purpose="batch")
    for kept, name in ((named, "requests.jsonl"), (unnamed, "upload")):
        assert kept.id.startswith("file-") and kept.object == "file"
        assert (kept.bytes, kept.filename, kept.purpose) == (len(CONTENT), name, "batch")
        assert kept.status == "processed"
        assert before <= kept.created_at <= time.time()
        assert kept.expires_at == kept.created_at + MONTH
        served.client.files.delete(kept.id)


def test_I2_a_file_comes_back(served: Deployment) -> None:
    kept = served.client.files.create(file=io.BytesIO(CONTENT), purpose="batch")
    assert served.client.files.retrieve(kept.id) == kept
    assert served.client.files.content(kept.id).read() == CONTENT
    served.client.files.delete(kept.id)


def test_I3_a_deleted_file_is_gone(served: Deployment) -> None:
    kept = served.client.files.create(file=io.BytesIO(CONTENT), purpose="batch")
    gone = served.client.files.delete(kept.id)
    assert (gone.id, gone.object, gone.deleted) == (kept.id, "file", True)
    with pytest.raises(openai.NotFoundError):
        served.client.files.delete(kept.id)
    for path in ("", "/content"):
        check_error(served.http.get(f"/v1/files/{kept.id}{path}"), 404, "id")


def test_I4_what_is_no_upload_is_named(served: Deployment) -> None:
    file = ("f", CONTENT)
    for data in ({"purpose": "nope"}, {}):
        check_error(served.http.post("/v1/files", files={"file": file}, data=data), 400, "purpose")
    check_error(served.http.post("/v1/files", files={"purpose": (None, "batch")}), 400, "file")


def test_I6_files_are_listed_in_pages(served: Deployment) -> None:
    ids = [served.client.files.create(file=io.BytesIO(b"x"), purpose="batch").id for _ in range(5)]
    other = served.client.files.create(file=io.BytesIO(b"x"), purpose="user_data").id
    listed = [file.id for file in served.client.files.list(limit=2, purpose="batch")]
    assert [id for id in listed if id in ids] == ids[::-1]
    assert len(listed) == len(set(listed)) and other not in listed
    ascending = [file.id for file in served.client.files.list(limit=2, order="asc")]
    assert [id for id in ascending if id in (*ids, other)] == [*ids, other]
    page = served.http.get("/v1/files", params={"limit": 2}).json()
    assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][1]["id"])
    assert page["has_more"] is True and page["object"] == "list"
    for id in (*ids, other):
        served.client.files.delete(id)
