"""
Instructions of a router's process for each request, counted by valgrind.

    apt-get install valgrind
    python -m benchmarks.instructions --cases plain:short:300,plain:short:whole --tree . --tree ../before

The count leaves out the kernel and what waits for memory, so it shows changes and no speed. Each `--tree` is
a checkout, whose router runs in this Python. One client sends its requests one after the other, after some
that are not counted. Cases are those of `benchmarks.router`.

Only requests are counted: what the router does every so often, such as health checks, it does once here. A
request takes fifty times as long under valgrind, and longer still on a busy machine: as much of the count
would be of that as of requests.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import mock_worker, router_load
from benchmarks.answering import until_answering
from benchmarks.router import COMMANDS, OTHER_CORE, answer_tokens, command

PORT = 31_950
UNCOUNTED = 20
"""Requests until every worker's speed is known."""

START_S, ANSWER_S = 600.0, 120.0
"""Valgrind takes fifty times as long."""

LEAST_SLEEP_S = 3600.0
"""Between two runs of what the router does every so often."""

PARTS = ("api", "cli", "router")
"""Folders of a checkout that a router is made of."""

_TOTAL = re.compile(r"^(?:summary|totals): (\d+)", re.MULTILINE)
_LENGTH = re.compile(rb"content-length: (\d+)")


def ask(connection: socket.socket, request: bytes) -> None:
    """Send a request, and read the whole answer. Raises SystemExit if it is no answer."""
    connection.sendall(request)
    answer = b""
    while not whole(answer):
        piece = connection.recv(1 << 16)
        if not piece:
            raise SystemExit(f"The router closed the connection after {answer[:200]!r}")
        answer += piece
    if not answer.startswith(b"HTTP/1.1 200 "):
        raise SystemExit(f"The router answered {answer[:200]!r}")


def whole(answer: bytes) -> bool:
    """
    >>> whole(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\nab"), whole(b"HTTP/1.1 200 OK\\r\\n\\r\\n5")
    (True, False)
    """
    head, separator, body = answer.partition(b"\r\n\r\n")
    if length := _LENGTH.search(head.lower()):
        return bool(separator) and len(body) >= int(length[1])
    return answer.endswith(b"\r\n0\r\n\r\n")


def serve(arguments: list[str]) -> None:
    """Run `baton` with these arguments; what it does every so often it does only once."""
    from baton_cli.main import main

    sleep = asyncio.sleep

    async def sleep_long(delay: float, result: Any = None) -> Any:
        return await sleep(max(delay, LEAST_SLEEP_S) if delay else 0, result)

    asyncio.sleep = sleep_long  # this module is all that the process runs
    main(arguments)


def count(tree: Path, case: str, requests: int, folder: Path) -> int:
    """Return the instructions of one request."""
    mode, prompt, _ = case.split(":")
    tokens, log, output = answer_tokens(case), folder / "router.log", folder / "counts"
    _, _, _, *arguments = command(COMMANDS["baton"][mode], PORT)
    arguments.append(f"--health-interval-s={ANSWER_S:g}")  # the limit of the only check, too
    router = [sys.executable, "-m", "benchmarks.instructions", "--serve", *arguments]
    with log.open("wb") as written:
        process = subprocess.Popen(
            ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={output}", *router],
            env=os.environ | {"PYTHONPATH": ":".join(str(tree.resolve() / part) for part in PARTS)},
            stdout=written,
            stderr=subprocess.STDOUT,
        )

    def control(*words: str) -> None:
        subprocess.run(["callgrind_control", *words, str(process.pid)], check=True, capture_output=True)

    try:
        until_answering(PORT, "m", log, START_S)
        messages = router_load.requests(prompt, tokens)
        with socket.create_connection(("127.0.0.1", PORT), ANSWER_S) as connection:
            for message in messages[:UNCOUNTED]:
                ask(connection, message)
            control("--instr=on")
            for message in messages[UNCOUNTED : UNCOUNTED + requests]:
                ask(connection, message)
            control("--instr=off")
            control("--dump")
    finally:
        process.kill()  # its end would wait for a sleep
        process.wait()
    totals = (int(total) for file in folder.glob("counts*") for total in _TOTAL.findall(file.read_text()))
    return max(totals) // requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", default="plain:short:whole,plain:short:300")
    parser.add_argument("--tree", type=Path, action="append", help="a checkout; several are compared")
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--serve", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    trees: list[Path] = options.tree or [Path()]
    print(f"| case | {' | '.join(map(str, trees))} |\n|---|{'---|' * len(trees)}")
    for case in options.cases.split(","):
        counts = []
        for tree in trees:
            mocks = mock_worker.started(OTHER_CORE)  # new ones have cached no prompt
            try:
                with tempfile.TemporaryDirectory() as folder:
                    counts.append(count(tree, case, options.requests, Path(folder)))
            finally:
                mocks.terminate()
                mocks.join()
        print(f"| {case} | {' | '.join(f'{number:,}' for number in counts)} |", flush=True)


if __name__ == "__main__":
    main()
