"""
Workers of a real vLLM on this machine's processors, started in seconds, killed and stopped by process group.

`vllm_fork.py` runs in vLLM's environment, imports it once and forks each worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
}
TRANSFER = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_load_failure_policy": "recompute",
}
PROCESSOR = Path("/proc/cpuinfo")
START_LIMIT_S = 300.0
POLL_S = 0.1
SIDE_CHANNEL_OFFSET = 1000
EVENTS_OFFSET = 2000
REPLAY_OFFSET = 3000


def dtype() -> str:
    """bfloat16 where the processor has instructions for it: without them, PyTorch is much slower."""
    return "bfloat16" if "bf16" in PROCESSOR.read_text() else "float32"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker's place: `cores` as vLLM's VLLM_CPU_OMP_THREADS_BIND."""

    model: Path
    port: int
    cores: str = "nobind"
    arguments: tuple[str, ...] = ()

    def order(self, log: Path) -> dict[str, Any]:
        """The order that `vllm_fork` takes."""
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.port + EVENTS_OFFSET}",
            "replay_endpoint": f"tcp://*:{self.port + REPLAY_OFFSET}",
        }
        arguments = [str(self.model), "--served-model-name", "vllm", "--host", "127.0.0.1"]
        arguments += ["--port", str(self.port), "--max-model-len", "8192", "--enforce-eager"]
        arguments += [
            "--dtype",
            dtype(),
            "--enable-prompt-tokens-details",
            "--kv-transfer-config",
            json.dumps(TRANSFER),
        ]
        arguments += ["--kv-events-config", json.dumps(events), *self.arguments]
        environment = {
            **ENVIRONMENT,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.port + SIDE_CHANNEL_OFFSET),
            "VLLM_CPU_OMP_THREADS_BIND": self.cores,
        }
        return {"arguments": arguments, "environment": environment, "log": str(log)}


class VllmWorkers:
    """Starts workers by one process that has imported vLLM; use `opened`."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._answer("preloaded")

    def start(self, spec: WorkerSpec) -> VllmWorker:
        """A worker that may not answer yet."""
        assert self._process.stdin is not None
        order = spec.order(self._folder / f"vllm-{spec.port}.log")
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return VllmWorker(spec, int(self._answer("pid")))

    def _answer(self, name: str) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)[name]
        raise SystemExit(f"the process that imports vLLM has ended; its log is in {self._folder}")


@dataclass(slots=True)
class VllmWorker:
    spec: WorkerSpec
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.spec.port}"

    def signal(self, number: signal.Signals) -> None:
        """Send it to the API server and the engine."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def await_ready(self) -> None:
        await_answer(f"{self.url}/health")


def await_answer(url: str) -> None:
    """Returns once GET of `url` is answered with 200."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(POLL_S)
    raise SystemExit(f"{url} does not answer after {START_LIMIT_S:g} s")


@contextlib.contextmanager
def opened(python: Path, folder: Path, threads: int = 1) -> Iterator[VllmWorkers]:
    """
    `python` is that of vLLM's environment, `folder` takes logs. All workers end with it.

    `threads` compute in each worker. They are given here because OpenMP counts them when it is first loaded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # -P: this folder has a module `operator`, which must not be found before Python's.
    command = [str(python), "-P", str(Path(__file__).with_name("vllm_fork.py"))]
    with (folder / "vllm-fork.log").open("w") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        try:
            yield VllmWorkers(process, folder)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
