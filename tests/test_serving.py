"""The memory that `benchmarks.serving` reports counts workers that were forked."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from benchmarks.serving import memory_of

MIB = 2**20
SERVER = f"""
import os, sys
shared = bytearray(b"s") * {64 * MIB}
for number in range(2):
    reading, writing = os.pipe()
    if not os.fork():
        (os.setsid if number else os.setpgrp)()  # a forked worker has a group of its own
        own = bytearray(b"o") * {32 * MIB}
        os.write(writing, b"1")
        sys.stdin.read()
        os._exit(0)
    os.close(writing)
    os.read(reading, 1)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux divides pages among processes")
def test_memory_counts_forks_and_shares_pages_once() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as server:
        assert server.stdout is not None and server.stdin is not None
        assert server.stdout.readline() == b"ready\n"
        assert 128 * MIB <= memory_of(psutil.Process(server.pid)) < 128 * MIB + 64 * MIB
        server.stdin.close()
