"""
A pair on two machines: a prefill and a decode worker in network namespaces of their own, with one cable.

Neither reaches anything of the other by a loopback address, so an address that is announced must be one that
the other machine can use. The addresses (RFC 5737) exist only inside the namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.engine.models import make_model

pytestmark = [pytest.mark.nixl, pytest.mark.slow]

PREFILL, DECODE = "198.51.100.1", "198.51.100.2"
TIMEOUT_S = 300.0
PROMPT = list(range(3, 303))
CALL = """
import json, sys, urllib.request
url, body = json.load(sys.stdin)
data = None if body is None else json.dumps(body).encode()
request = urllib.request.Request(url, data, {"content-type": "application/json"})
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
sys.stdout.write(opener.open(request, timeout=120).read().decode())
"""


@dataclass
class Machine:
    """One network namespace, and what was started in it."""

    name: str
    address: str
    logs: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def command(self, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, sys.executable, *arguments]

    def start(self, *arguments: str) -> None:
        """Start `baton` with these arguments, and wait until it answers requests."""
        log = self.logs / f"{arguments[0]}.log"
        with log.open("wb") as written:
            process = subprocess.Popen(
                self.command("-m", "baton_cli.main", *arguments),
                stdout=written,
                stderr=written,
                env={**os.environ, "UCX_TLS": "tcp,self", "OMP_NUM_THREADS": "1"},
            )
        self.processes.append(process)
        port = next(argument for argument in arguments if argument.startswith("--port=")).partition("=")[2]
        deadline = time.monotonic() + TIMEOUT_S
        while self.get(f"http://127.0.0.1:{port}/ready") is None:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    def get(self, url: str, body: dict[str, Any] | None = None) -> str | None:
        """The answer to one request made on this machine; None if it failed."""
        requested = json.dumps([url, body]).encode()
        done = subprocess.run(self.command("-c", CALL), input=requested, capture_output=True, check=False)
        return done.stdout.decode() if done.returncode == 0 else None

    def json(self, url: str, body: dict[str, Any] | None = None) -> Any:
        answer = self.get(url, body)
        assert answer is not None, f"{url} was not answered on {self.name}: {self.messages()}"
        return json.loads(answer)

    def messages(self) -> str:
        return "\n".join(log.read_text()[-3000:] for log in sorted(self.logs.glob("*.log")))

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    """Two namespaces and the cable between them, each with the other one as its default gateway."""
    pytest.importorskip("nixl", reason="the NIXL library is missing")
    if shutil.which("ip") is None:
        pytest.skip("ip is not installed (on Debian: apt install iproute2)")
    names = [f"baton-{role}-{os.getpid()}" for role in ("prefill", "decode")]
    first, second = (
        Machine(name, address, tmp_path) for name, address in zip(names, (PREFILL, DECODE), strict=True)
    )
    with contextlib.ExitStack() as stack:
        for machine in (first, second):
            created = subprocess.run(
                ["ip", "netns", "add", machine.name], capture_output=True, text=True, check=False
            )
            if created.returncode:
                pytest.skip(
                    f"network namespaces cannot be made here (root is needed): {created.stderr.strip()}"
                )
            stack.callback(subprocess.run, ["ip", "netns", "del", machine.name], check=True)
        cable = f"link add eth0 netns {first.name} type veth peer name eth0 netns {second.name}"
        joined = subprocess.run(["ip", *cable.split()], capture_output=True, text=True, check=False)
        if joined.returncode:
            pytest.skip(f"a veth cable cannot be made here: {joined.stderr.strip()}")
        for machine, gateway in ((first, DECODE), (second, PREFILL)):
            for step in (
                "link set lo up",
                "link set eth0 up",
                f"address add {machine.address}/24 dev eth0",
                f"route add default via {gateway}",
            ):
                subprocess.run(["ip", "-n", machine.name, *step.split()], check=True)
        for machine in (first, second):
            stack.callback(machine.end)
        yield first, second


def test_pair_on_two_machines_relays_prompt_over_tcp(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    """
    A prefill worker that listens on all addresses announces the one that the other machine reaches.

    It announced 0.0.0.0, at which the decode worker dialled itself: every prompt was computed by decode.
    """
    first, second = machines
    model = str(make_model(tmp_path / "tiny", max_position_embeddings=1024))
    shared = ("--served-model-name=tiny", "--dtype=float32", "--threads=1", "--kv-cache-memory=16MiB")
    listening = ("--host=0.0.0.0", "--port=8000", "--kv-events=tcp://*:5557", "--kv-replay=tcp://*:5558")
    control = ("--control-host=0.0.0.0", "--control-port=7000")
    first.start("prefill", model, *shared, *listening, *control, "--name=prefill-0")
    events = ("--kv-events=tcp://*:5557", "--local-prefill-tokens=8")
    second.start("decode", model, *shared, "--port=8000", *events)
    second.start(
        "router",
        f"--prefill=http://{PREFILL}:8000",
        "--decode=http://127.0.0.1:8000",
        "--port=8080",
        "--local-prefill-max-tokens=0",
    )

    load = second.json(f"http://{PREFILL}:8000/load")
    assert load["control"] == f"{PREFILL}:7000"
    assert (load["kv_events"], load["kv_replay"]) == (f"tcp://{PREFILL}:5557", f"tcp://{PREFILL}:5558")

    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "seed": 7, "ignore_eos": True}
    answer = second.json("http://127.0.0.1:8080/v1/completions", body)
    relays = second.json("http://127.0.0.1:8000/debug/requests")["data"][0]["relays"]
    assert relays, second.messages()
    assert (relays[0]["prefill_worker"], relays[0]["transport"]) == ("prefill-0", "nixl/ucx tcp")
    assert relays[0]["computed_tokens"] == len(PROMPT)
    expected = first.json("http://127.0.0.1:8000/v1/completions", body)
    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]


def test_worker_without_default_route_demands_advertised_host(
    machines: tuple[Machine, Machine],
) -> None:
    """Where no route shows which address others reach, the process says which setting it needs."""
    first, _ = machines
    subprocess.run(["ip", "-n", first.name, "route", "del", "default"], check=True)
    show = "import sys; from baton_api import exposure; print(exposure.advertised_host(*sys.argv[1:]))"
    arguments = ("-c", show, "0.0.0.0", "--control-host")
    refused = subprocess.run(first.command(*arguments), capture_output=True, text=True, check=False)
    assert refused.returncode and "Set --advertise-host" in refused.stderr
    advertised = first.command(*arguments, PREFILL)
    advertised_address = subprocess.run(advertised, capture_output=True, text=True, check=True)
    assert advertised_address.stdout.strip() == PREFILL
