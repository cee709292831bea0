"""
Instructions of a router's process for each request, counted by valgrind.

    apt-get install valgrind
    python -m benchmarks.instructions --cases plain:short:300,plain:short:whole --tree . --tree ../before

The count of a case differs by 1 to 3 % between two runs, on a machine however busy, where processor time
differs by 15 %. It leaves out the kernel and what waits for memory, so it shows changes and no speed. Each
`--tree` is a checkout, whose router runs in this Python. One client sends its requests one after the other,
after some that are not counted. Cases are those of `benchmarks.router`, before workers that both compute and
generate.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import mock_worker, router_load
from benchmarks.answering import until_answering
from benchmarks.mock_worker import PLAIN_PORTS
from benchmarks.router import OTHER_CORE, answer_tokens

PORT = 31_950
UNCOUNTED = 20
"""Requests until every worker's speed is known."""

START_S, ANSWER_S = 600.0, 120.0
"""Valgrind takes fifty times as long."""

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


def count(tree: Path, case: str, requests: int, folder: Path) -> int:
    """Return the instructions of one request."""
    _, prompt, _ = case.split(":")
    tokens, log, output = answer_tokens(case), folder / "router.log", folder / "counts"
    router = [sys.executable, "-m", "baton_cli.main", "router", "--port", str(PORT)]
    router += [f"--decode=http://127.0.0.1:{port}" for port in PLAIN_PORTS]
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
        process.terminate()
        process.wait(60)
    totals = (int(total) for file in folder.glob("counts*") for total in _TOTAL.findall(file.read_text()))
    return max(totals) // requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", default="plain:short:whole,plain:short:300")
    parser.add_argument("--tree", type=Path, action="append", help="a checkout; several are compared")
    parser.add_argument("--requests", type=int, default=10)
    options = parser.parse_args()
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
