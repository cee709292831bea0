"""
A hostile tenant beside another one, against a router, a prefill and a decode worker with a model.

    python -m benchmarks.hostile --model smollm2 --seconds 60 [--only texts choices]

Both tenants have no limits. For `--seconds` the hostile one does all of this, or `--only` some of it, at the
same time:

- texts: chats of 4 MB, one after another, from four clients.
- choices: `n` = 128 with 32 prompts, and with 8, the most that is accepted, as streams of 200 tokens.
- bodies: 150 connections that announce 4 MB, send a part and then one byte a second.
- parts: two uploads whose multipart body never ends.
- downloads: 20 connections that ask for a file of 16 MB and read nothing.

The other tenant streams short chats at `--rate`. Printed are its time to the first token alone and beside the
attack, its errors, the largest memory of the router and its processes, and the processor time of each process
in both phases. The attacker runs on the same machine: its share is what the attack costs without a server.
Exit status 1: the 99th percentile is more than twice the one alone, a request failed, or the router took more
than 512 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.replay import running

MIB = 1024 * 1024
MEMORY_LIMIT = 512 * MIB
"""Memory limit of a router's container, by default."""

START_S = 300.0
TEXT_BYTES = 4_000_000
GOOD, HOSTILE = "good", "hostile"
KINDS = ("texts", "choices", "bodies", "parts", "downloads")
BATON = str(Path(sys.executable).with_name("baton"))


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        listening = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in listening]


@contextmanager
def deployed(model: str, folder: Path) -> Iterator[tuple[int, dict[str, psutil.Process]]]:
    """The router's port, and the processes by name."""
    router, prefill, decode, control = free_ports(4)
    tenants = folder / "tenants.yaml"
    keys = {name: f"sha256:{hashlib.sha256(name.encode()).hexdigest()}" for name in (GOOD, HOSTILE)}
    tenants.write_text(json.dumps({"tenants": [{"name": name, "keys": [key]} for name, key in keys.items()]}))
    common = ["--served-model-name=m", "--threads=1", "--host=127.0.0.1", "--kv-cache-tokens=16384"]
    workers = {
        "prefill": [BATON, "prefill", model, *common, f"--port={prefill}", f"--control-port={control}"],
        "decode": [BATON, "decode", model, *common, f"--port={decode}"],
    }
    command = [BATON, "router", "--host=127.0.0.1", f"--port={router}", f"--tenants-file={tenants}"]
    command += [f"--prefill=http://127.0.0.1:{prefill}", f"--decode=http://127.0.0.1:{decode}"]
    # As in a container of that size, of whose memory it takes a fifth by default.
    command.append(f"--connection-memory={MEMORY_LIMIT // 5}")
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(running(one, folder / f"{name}.log"))
            for name, one in {**workers, "router": [*command, f"--state={folder / 'state'}"]}.items()
        }
        yield router, processes


def request(
    path: str, body: bytes, key: str, kind: str = "application/json", length: int | None = None
) -> bytes:
    size = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nhost: r\r\nauthorization: Bearer {key}\r\ncontent-type: {kind}\r\n"
    return f"{head}content-length: {size}\r\nconnection: close\r\n\r\n".encode() + body


def chat(text: str, key: str, **fields: object) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
    return request("/v1/chat/completions", json.dumps(body).encode(), key)


@dataclass
class Client:
    """The other tenant's requests."""

    port: int
    first_tokens_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    async def send(self, seconds: float, rate: float, rng: random.Random) -> None:
        """Open loop: requests arrive at random, whether or not the others were answered."""
        async with asyncio.TaskGroup() as tasks:
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                tasks.create_task(self._one(rng.random()))
                await asyncio.sleep(rng.expovariate(rate))

    async def _one(self, number: float) -> None:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(60):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(chat(f"{number} Say hello.", GOOD, max_tokens=8, stream=True))
                seen = b""
                while b'"content":"' not in seen.replace(b'"content":""', b"") and (
                    piece := await reader.read(65536)
                ):
                    seen += piece
                self.first_tokens_s.append(time.perf_counter() - began)
                seen += await reader.read()
                writer.close()
            status = seen[9:12].decode()
            if status != "200" or b"[DONE]" not in seen:
                self.errors[status if status != "200" else "cut"] += 1
        except (OSError, TimeoutError) as error:
            self.errors[type(error).__name__] += 1

    def percentile(self, share: float) -> float:
        ordered = sorted(self.first_tokens_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("inf")


class Attack:
    """The hostile tenant. Each method runs until it is cancelled."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._text_body = chat("ab " * (TEXT_BYTES // 3), HOSTILE, max_tokens=1)
        self.answers: Counter[str] = Counter()
        """Answers by attack and status; `cut` without one."""

    async def run(self, kinds: Sequence[str]) -> None:
        """Until SIGTERM."""
        file = await self._upload()
        attacks: dict[str, list[tuple[str, Callable[[], Awaitable[bytes]]]]] = {
            "texts": [("texts", self._text)] * 4,
            "choices": [(f"choices 128 x {count}", self._choices(count)) for count in (32, 8, 8)],
            "bodies": [("bodies", self._body)] * 150,
            "parts": [("parts", self._parts)] * 2,
            "downloads": [("downloads", self._download(file))] * 20,
        }
        under_way = asyncio.gather(*(self._again(*one) for kind in kinds for one in attacks[kind]))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, under_way.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await under_way

    async def _again(self, name: str, attack: Callable[[], Awaitable[bytes]]) -> None:
        while True:
            try:
                answer = await attack()
            except OSError:
                answer = b""
            self.answers[f"{name}: {answer[9:12].decode() or 'cut'}"] += 1
            await asyncio.sleep(0.05)

    async def _exchange(self, *parts: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
            return await reader.read()
        finally:
            writer.close()

    async def _text(self) -> bytes:
        return await self._exchange(self._text_body)

    def _choices(self, prompts: int) -> Callable[[], Awaitable[bytes]]:
        body = {"model": "m", "prompt": [f"p{number}" for number in range(prompts)], "n": 128, "stream": True}
        raw = json.dumps({**body, "max_tokens": 200, "ignore_eos": True}).encode()
        return lambda: self._exchange(request("/v1/completions", raw, HOSTILE))

    async def _body(self) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            head = request("/v1/chat/completions", b'{"model": "m", "x": "', HOSTILE, length=TEXT_BYTES)
            writer.write(head + b"x" * (TEXT_BYTES - 100_000))
            while True:
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1):
                        return await reader.read()
                writer.write(b"x")
        finally:
            writer.close()

    async def _parts(self) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        answer = asyncio.create_task(reader.read())
        try:
            writer.write(request("/v1/files", b"", HOSTILE, "multipart/form-data; boundary=b", length=10**9))
            part = b'--b\r\ncontent-disposition: form-data; name="x"\r\n\r\ny\r\n' * 100
            while not answer.done():
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            return await answer
        finally:
            answer.cancel()
            writer.close()

    async def _upload(self) -> str:
        part = b'--b\r\ncontent-disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
        fields = part % (b"purpose", b"", b"user_data")
        fields += part % (b"file", b'; filename="f"', b"x" * 16 * MIB) + b"--b--\r\n"
        answer = await self._exchange(
            request("/v1/files", fields, HOSTILE, "multipart/form-data; boundary=b")
        )
        return str(json.loads(answer.partition(b"\r\n\r\n")[2])["id"])

    def _download(self, file: str) -> Callable[[], Awaitable[bytes]]:
        async def ask() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**10)
            head = (
                f"GET /v1/files/{file}/content HTTP/1.1\r\nhost: r\r\nauthorization: Bearer {HOSTILE}\r\n\r\n"
            )
            writer.write(head.encode())
            try:
                await reader.read(64)
                return await asyncio.Future()  # read nothing more until the attack ends
            finally:
                writer.transport.abort()

        return ask


async def memory(process: psutil.Process, most: list[int]) -> None:
    """Keep the largest resident memory of a process and its children, in bytes."""
    while True:
        total = 0
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += one.memory_info().rss
        most[0] = max(most[0], total)
        await asyncio.sleep(0.2)


def processor_s(processes: Mapping[str, psutil.Process]) -> dict[str, float]:
    """Processor seconds so far, by name."""
    seconds = {}
    for name, process in processes.items():
        times = process.cpu_times()
        seconds[name] = times.user + times.system
    return seconds


async def probe(port: int, seen_s: list[float]) -> None:
    """Ask for /health again and again, and keep how long each answer took."""
    while True:
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: r\r\nconnection: close\r\n\r\n")
        await reader.read()
        writer.close()
        seen_s.append(time.perf_counter() - began)
        await asyncio.sleep(0.05)


async def measure(
    port: int, processes: Mapping[str, psutil.Process], seconds: float, rate: float, kinds: Sequence[str]
) -> bool:
    """Print the results. Returns whether they are as they should be."""
    deadline = time.perf_counter() + START_S
    while True:
        warm = Client(port)
        await warm.send(1.0, 2.0, random.Random(0))
        if not warm.errors:
            break
        if time.perf_counter() > deadline:
            raise SystemExit(f"The service did not start within {START_S:g} s: {dict(warm.errors)}")
    alone, beside, most = Client(port), Client(port), [0]
    health_s: list[float] = []
    begin_s = processor_s(processes)
    await alone.send(seconds, rate, random.Random(1))
    alone_s = {name: now - begin_s[name] for name, now in processor_s(processes).items()}
    watching = asyncio.create_task(memory(processes["router"], most))
    command = (sys.executable, "-m", "benchmarks.hostile", "--attack", str(port), "--only", *kinds)
    attack = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    await asyncio.sleep(2)
    probing = asyncio.create_task(probe(port, health_s))
    everybody = {**processes, "attacker": psutil.Process(attack.pid)}
    begin_s = processor_s(everybody)
    await beside.send(seconds, rate, random.Random(2))
    held = attack.returncode is None
    beside_s: dict[str, float] = {}
    if held:
        beside_s = {name: now - begin_s[name] for name, now in processor_s(everybody).items()}
        attack.terminate()
    output, _ = await attack.communicate()
    for task in (watching, probing):
        task.cancel()
    for name, client in (("alone", alone), ("beside the attack", beside)):
        p50, p99 = client.percentile(0.5), client.percentile(0.99)
        count = len(client.first_tokens_s)
        print(
            f"{name}: {count} requests, errors {dict(client.errors)},",
            f"TTFT p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms",
        )
    ratio = beside.percentile(0.99) / alone.percentile(0.99)
    print(f"ratio of the p99: {ratio:.2f} (at most 2)")
    health_s.sort()
    longest = f"p99 {health_s[int(len(health_s) * 0.99)] * 1e3:.0f} ms, longest {health_s[-1] * 1e3:.0f} ms"
    print(f"health beside the attack: {longest}")
    for name, spent in (("alone", alone_s), ("beside the attack", beside_s)):
        print(f"processor time {name}:", ", ".join(f"{who} {used:.1f} s" for who, used in spent.items()))
    print(f"memory of the router: {most[0] / MIB:.0f} MiB (at most {MEMORY_LIMIT // MIB})")
    print(f"attacks{'' if held else ', which broke off'}: {output.decode().strip()}")
    return held and ratio <= 2 and not beside.errors and most[0] <= MEMORY_LIMIT


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second of the other tenant")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="parts of the attack")
    parser.add_argument("--logs", type=Path, help="folder of the logs; default: a temporary one")
    parser.add_argument("--attack", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.attack:
        attack = Attack(given.attack)
        asyncio.run(attack.run(given.only))
        print(", ".join(f"{name} x{count}" for name, count in sorted(attack.answers.items())))
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        deployed(given.model, given.logs or Path(folder)) as (port, processes),
    ):
        right = asyncio.run(measure(port, processes, given.seconds, given.rate, given.only))
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
