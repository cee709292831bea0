"""
Self-tests of copies between processes, the native kernels and NIXL.

Each runs in its own process, because a failure may crash it.

    python -m baton_cli.doctor.selftests kernels|nixl       prints one JSON object
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from baton_cli.doctor.machine import SelfTest

SELF_TEST_TIMEOUT_S = 300.0
"""Kernels may have to be compiled."""

SHARED_BYTES = 4096

OWNER = """
import ctypes, os, sys
memory = ctypes.create_string_buffer(bytes([7]) * int(sys.argv[1]))
print(os.getpid(), ctypes.addressof(memory), flush=True)
sys.stdin.read()
"""

READER = """
import ctypes, os, sys
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
process, address, size = map(int, sys.argv[1:])
memory = ctypes.create_string_buffer(size)
call = ctypes.CDLL(None, use_errno=True).process_vm_readv
call.restype = ctypes.c_ssize_t
mine, theirs = Part(ctypes.addressof(memory), size), Part(address, size)
one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
done = call(process, ctypes.byref(mine), one, ctypes.byref(theirs), one, none)
print("" if done == size else os.strerror(ctypes.get_errno()))
"""


@dataclass(frozen=True, slots=True)
class SelfTests:
    """The results of all self-tests."""

    copies: SelfTest
    kernels: SelfTest
    nixl: SelfTest


def run() -> SelfTests:
    """Run all self-tests at once."""
    with ThreadPoolExecutor() as pool:
        kernels, nixl, copies = pool.submit(apart, "kernels"), pool.submit(apart, "nixl"), pool.submit(copy)
        return SelfTests(copies.result(), kernels.result(), nixl.result())


def copy() -> SelfTest:
    """Test whether a process may read the memory of another one that is not its child, as workers do."""
    try:
        return SelfTest("process_vm_readv", _copied())
    except (OSError, ValueError) as error:
        return SelfTest("process_vm_readv", f"the test failed to start: {error}")


def _copied() -> str:
    python = [sys.executable, "-I", "-S", "-c"]
    with subprocess.Popen(
        [*python, OWNER, str(SHARED_BYTES)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        process, address = owner.stdout.readline().split()
        done = subprocess.run(
            [*python, READER, process, address, str(SHARED_BYTES)],
            capture_output=True,
            text=True,
            check=False,
        )
        owner.communicate()
    reason = done.stdout.strip() if not done.returncode else f"status {done.returncode}"
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    setting = f" (kernel.yama.ptrace_scope is {scope.read_text().strip()})" if scope.exists() else ""
    return f"{reason}{setting}" if reason else ""


def apart(what: str) -> SelfTest:
    """Run a self-test in its own process."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "baton_cli.doctor.selftests", what],
            capture_output=True,
            text=True,
            check=False,
            timeout=SELF_TEST_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return SelfTest("", f"the test did not finish within {SELF_TEST_TIMEOUT_S:g} s")
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode or not last.startswith("{"):
        words = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return SelfTest("", f"status {done.returncode}: {words[:300]}")
    return SelfTest(**json.loads(last))


def kernels() -> SelfTest:
    """Load the native kernels, and compile them if necessary. The library tests itself."""
    try:
        from baton_engine.ops.native import library, products
    except ModuleNotFoundError:
        return SelfTest("", installed=False)
    from baton_api.errors import SetupError

    try:
        chosen = products.products_of(library.load(os.environ), os.environ)
    except (library.Unavailable, SetupError) as error:
        return SelfTest("", str(error))
    return SelfTest(f"compiled for this processor; self-test passed; {chosen}")


def nixl() -> SelfTest:
    """Create a NIXL agent as a worker does."""
    try:
        from baton_engine.transfer import nixl as means
    except ModuleNotFoundError:
        return SelfTest("", installed=False)
    from baton_api.errors import SetupError

    try:
        return SelfTest(means.try_out())
    except SetupError as error:
        return SelfTest("", error.message, installed=means.is_installed())


if __name__ == "__main__":
    outcome = {"kernels": kernels, "nixl": nixl}[sys.argv[1]]()
    print(
        json.dumps({"means": outcome.means, "trouble": outcome.trouble, "installed": outcome.installed}),
        flush=True,
    )
    os._exit(0)  # NIXL's shutdown may take seconds, or crash
