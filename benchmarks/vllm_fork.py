"""
Starts workers of vLLM on a CPU as forks of one process that has imported it. Runs in vLLM's environment.

A worker of vLLM spends about a minute of processor time on imports: in its API server, and again in its
engine. Forks skip both and start in seconds. They also wait where vLLM spins, because here many workers share
few cores. The protocol is one JSON line each way: standard input takes
`{"arguments": [...], "environment": {...}, "log": PATH}`, the answer is `{"pid": PID}`. Each worker leads a
process group of its own. Workers that end are reaped, and all end with this process.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

PRELOADED = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.llama",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
    "transformers.models.llama.modeling_llama",
)


GET_CONTEXT = (
    "vllm.utils.system_utils",
    "vllm.v1.engine.utils",
    "vllm.v1.engine.coordinator",
    "vllm.v1.executor.multiproc_executor",
)
"""Modules of vLLM that choose how a process starts."""

NICENESS = 5
"""Of workers, so that they do not delay the router and the clients, which elsewhere have their own cores."""

PROGRESS_PAUSE_US = 1000
"""Pause of NIXL's progress thread. Its Python API has 0, by which each idle worker takes one core whole."""

LOOK_AGAIN_MS = 1


def main() -> None:
    loaded = [name for name in PRELOADED if _loaded(name)]
    print(json.dumps({"preloaded": loaded}), flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    pids: list[int] = []
    try:
        for line in sys.stdin:
            order = json.loads(line)
            pid = os.fork()
            if not pid:
                _serve(order)
            pids.append(pid)
            print(json.dumps({"pid": pid}), flush=True)
    except KeyboardInterrupt:
        return
    finally:
        _kill(pids)


def _kill(pids: Sequence[int]) -> None:
    """Kill the process groups of the workers that still run."""
    for pid in pids:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _loaded(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def _serve(order: dict[str, Any]) -> None:
    """Become `vllm serve`. Does not return."""
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(order["environment"])
    _fork_engines()
    _pause_progress_threads()
    _wait_without_spinning()
    _leave_cores_free()
    os.nice(NICENESS)
    sys.argv = ["vllm", "serve", *order["arguments"]]
    entry = importlib.import_module("vllm.entrypoints.cli.main")
    try:
        entry.main()
    finally:
        os._exit(1)


def _fork_engines() -> None:
    """Let vLLM fork its engine too: on CPUs it spawns it, which imports everything again."""
    for name in GET_CONTEXT:
        vars(importlib.import_module(name))["get_mp_context"] = lambda: multiprocessing.get_context("fork")


def _pause_progress_threads() -> None:
    bindings = importlib.import_module("nixl._bindings")

    class Config(bindings.nixlAgentConfig):  # type: ignore[name-defined, misc]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, PROGRESS_PAUSE_US if name == "pthrDelay" else value)

    vars(importlib.import_module("nixl._api"))["nixlBind"].nixlAgentConfig = Config


def _wait_without_spinning() -> None:
    """
    Let engine and worker processes sleep until the other one writes: by default they spin for a second.

    A reader that sleeps misses some notifications, so it looks again after `LOOK_AGAIN_MS`.
    """
    broadcast = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    condition = vars(broadcast)["SpinCondition"]
    condition.__init__.__defaults__ = (0.0,)
    wait = condition.wait

    def wait_briefly(self: Any, timeout_ms: int | None = None) -> None:
        wait(self, LOOK_AGAIN_MS if timeout_ms is None else min(timeout_ms, LOOK_AGAIN_MS))

    condition.wait = wait_briefly


def _leave_cores_free() -> None:
    """Let workers run on any core: vLLM's NIXL connector for CPUs binds each main thread to the last one."""
    vars(os)["sched_setaffinity"] = lambda pid, cores: None


if __name__ == "__main__":
    main()
