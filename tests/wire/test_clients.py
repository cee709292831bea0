"""Clients and a proxy that users have, as programs of their own, before a real router."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton_api.headers import REQUEST_ID
from tests.ports import steady_port
from tests.router.fake_worker import FakeWorker, whole_answer, whole_stream
from tests.router.running import CHAT, QUESTION, STREAM, RunningRouter, running_router
from tests.wire.fuzz import answers

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PROGRAM_S = 120.0
"""Seconds for a client program, however busy the machine is."""

BODY, STREAMED = json.dumps(QUESTION), json.dumps(STREAM)


def need(program: str, package: str) -> str:
    """Path of a program; skips the test without it."""
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed (Debian's {package})")
    return path


async def output(*command: str) -> str:
    """What a program prints. It must succeed."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(PROGRAM_S):
            out, errors = await process.communicate()
    except BaseException:
        process.kill()
        raise
    assert process.returncode == 0, errors.decode()
    return out.decode()


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    async with FakeWorker() as worker:
        yield worker


@pytest.fixture
async def router(worker: FakeWorker) -> AsyncIterator[RunningRouter]:
    async with running_router([worker]) as router:
        yield router


async def test_java_http_client_gets_answers_although_it_offers_http_2(
    worker: FakeWorker, router: RunningRouter
) -> None:
    need("javac", "default-jdk-headless")
    printed = await output(
        need("java", "default-jdk-headless"), str(HERE / "Client.java"), router.url + CHAT, BODY
    )
    assert printed.splitlines() == [f"200 {whole_answer().decode()}"] * 2
    assert [request.body.decode() for request in worker.requests] == [BODY, BODY]


IN_CHUNKS = ("-H", "transfer-encoding: chunked")


@pytest.mark.parametrize(
    "flags", [("--http2",), ("--http2", *IN_CHUNKS), ("--http1.1", *IN_CHUNKS), ("--http1.0",)], ids=" ".join
)
async def test_curl_gets_answers_whatever_protocol_it_offers(
    flags: tuple[str, ...], worker: FakeWorker, router: RunningRouter
) -> None:
    curl = (need("curl", "curl"), "-sSN", "--fail-with-body", "-H", "content-type: application/json", *flags)
    for body, expected in ((BODY, whole_answer()), (STREAMED, whole_stream())):
        assert await output(*curl, "-d", body, router.url + CHAT) == expected.decode()
    assert [request.body.decode() for request in worker.requests] == [BODY, STREAMED]


async def test_node_fetch_gets_answers_and_streams(worker: FakeWorker, router: RunningRouter) -> None:
    printed = await output(need("node", "nodejs"), str(HERE / "client.mjs"), router.url + CHAT, BODY)
    whole, streamed = printed.splitlines()
    assert whole == f"200 {whole_answer().decode()}"
    assert streamed == "200 " + whole_stream().decode().replace("\n", "\\n")


async def test_http_1_0_client_reads_a_stream_to_its_end(router: RunningRouter) -> None:
    def ask() -> tuple[int, str | None, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=PROGRAM_S)
        connection._http_vsn, connection._http_vsn_str = 10, "HTTP/1.0"  # type: ignore[attr-defined]
        with contextlib.closing(connection):
            connection.request("POST", CHAT, STREAMED, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.getheader("transfer-encoding"), answer.read()

    assert await asyncio.to_thread(ask) == (200, None, whole_stream())


INGRESS = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}
  upstream router {{ server 127.0.0.1:{router}; keepalive 4; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://router;
      proxy_http_version {version};
      proxy_set_header Host $host;
      proxy_set_header Upgrade $http_upgrade;
      proxy_set_header Connection $connection_upgrade;
      proxy_buffering off;
      proxy_request_buffering off;
    }}
  }}
}}
"""


@contextlib.asynccontextmanager
async def ingress(router: RunningRouter, folder: Path, version: str = "1.1") -> AsyncIterator[int]:
    """The port of an nginx in front of the router, with the lines that an Ingress controller writes."""
    nginx = need("nginx", "nginx-light")
    port = steady_port()
    path = folder / "nginx.conf"
    path.write_text(INGRESS.format(folder=folder, router=router.port, port=port, version=version))
    process = await asyncio.create_subprocess_exec(nginx, "-p", str(folder), "-c", str(path))
    try:
        async with asyncio.timeout(PROGRAM_S):
            while True:
                with contextlib.suppress(ConnectionError):
                    (await asyncio.open_connection("127.0.0.1", port))[1].close()
                    break
                await asyncio.sleep(0.02)
        yield port
    finally:
        process.terminate()
        await process.wait()


async def ask(port: int, *parts: str) -> tuple[int, bytes]:
    """Status and whole response of one request, which is sent in these parts."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    async with asyncio.timeout(PROGRAM_S):
        for part in parts:
            writer.write(part.encode())
            await asyncio.sleep(0.001)  # a segment of its own, where the machine is fast enough
        while data := await reader.read(65536):
            received += data
    writer.close()
    statuses, rest = answers(received)
    assert len(statuses) == 1
    assert not rest
    return statuses[0], received


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_nginx_in_front_passes_answers_and_streams(
    version: str, router: RunningRouter, tmp_path: Path
) -> None:
    async with ingress(router, tmp_path, version) as port:
        for body, expected in ((BODY, whole_answer()), (STREAMED, whole_stream())):
            curl = (
                need("curl", "curl"),
                "-sSN",
                "--fail-with-body",
                "--http2",
                "-H",
                "content-type: application/json",
            )
            assert await output(*curl, "-d", body, f"http://127.0.0.1:{port}{CHAT}") == expected.decode()


TRIES = 1000
LEFT_OPEN = "POST /flush_cache HTTP/1.1\r\nhost: x\r\nx: "
WHOLE = "GET /workers HTTP/1.1\r\nhost: x\r\nauthorization: Bearer stolen\r\n\r\n"


async def test_nginx_in_front_smuggles_nothing_to_another_client(worker: FakeWorker, tmp_path: Path) -> None:
    """An admin's requests share connections with those of a tenant, whose bodies look like requests."""
    file = tmp_path / "tenants.yaml"
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("attacker", "admin")}
    file.write_text(
        f"tenants:\n  - {{name: attacker, keys: ['sha256:{digests['attacker']}']}}\n"
        f"  - {{name: admin, admin: true, keys: ['sha256:{digests['admin']}']}}\n"
    )
    seen: Counter[tuple[str, int, bool]] = Counter()

    async def attack(port: int, number: int) -> None:
        body = (LEFT_OPEN, WHOLE, "\r\n" * 40 + LEFT_OPEN)[number % 3]
        offer = ("websocket", "h2c", "x")[number // 3 % 3]
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer attacker\r\n"
            f"connection: upgrade, close\r\nupgrade: {offer}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        status, _ = await ask(port, *((head, body) if number % 2 else (head + body,)))
        seen["attacker", status, True] += 1

    async def use(port: int, number: int) -> None:
        name = f"admin-{number}"
        status, received = await ask(
            port,
            f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer admin\r\n{REQUEST_ID}: {name}\r\n"
            "connection: close\r\n\r\n",
        )
        own = f"{REQUEST_ID}: {name}\r\n".encode() in received and b'"object":"list"' in received
        seen["admin", status, own] += 1

    async with running_router([worker], tenants_file=str(file)) as router, ingress(router, tmp_path) as port:
        for start in range(0, TRIES, 4):
            await asyncio.gather(
                *(send(port, number) for number in range(start, start + 4) for send in (attack, use))
            )
    assert seen == {("attacker", 400, True): TRIES, ("admin", 200, True): TRIES}
    assert worker.requests == []
