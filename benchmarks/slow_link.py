"""
Time to the first token of a pair whose link is slow, for several settings of the prefill worker in one run.

    python -m benchmarks.slow_link --arm whole= --arm 'halved=--last-chunk-tokens 128'

Needs root, `ip` and `tc` (iproute2). The prefill workers, one for each arm, run in a network namespace; a
token bucket (tbf) limits what they send to the decode worker. Prompts are random token ids, new each time, so
that no prefix cache helps. The arms take turns, prompt by prompt. Numbers are medians, with the least and the
most. `rest` is the time to the first token without that of computing the prompt, most of it after that. Its
prediction is `roofline.relayed_s`, by the arm's time of computing, which all tokens share equally, and the
link's rate. `processor` is the processor time of the prefill worker.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from baton_api import headers
from benchmarks.roofline import chunks_of, relayed_s
from benchmarks.serving import end

NAMESPACE = "baton-slow-link"
PREFILL, DECODE = "198.51.100.1", "198.51.100.2"
"""RFC 5737: they exist only here."""
DEVICE = "baton-link"
DECODE_PORT = 8460
CHUNK = 512
"""Tokens of a chunk, without another flag."""
START_LIMIT_S = 300.0
WARM_TOKENS = 256
VOCABULARY = 8000
"""Random ids are below this."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A prefill worker, and the flags in which it differs from the others."""

    name: str
    flags: tuple[str, ...]
    number: int

    @property
    def control(self) -> str:
        return f"{PREFILL}:{7000 + self.number}"

    @property
    def chunk(self) -> int:
        return self._value("--chunk-tokens", CHUNK)

    @property
    def last(self) -> int:
        return self._value("--last-chunk-tokens", 0)

    def _value(self, flag: str, default: int) -> int:
        return int(self.flags[self.flags.index(flag) + 1]) if flag in self.flags else default

    def command(self, shared: Sequence[str]) -> list[str]:
        places = f"--host={PREFILL} --port={8000 + self.number} --control-host={PREFILL}"
        ports = f"--control-port={7000 + self.number} --name=prefill-{self.number}"
        worker = [sys.executable, "-m", "baton_cli.main", "prefill", *shared, *self.flags]
        return ["ip", "netns", "exec", NAMESPACE, *worker, *places.split(), *ports.split()]


@dataclass(frozen=True, slots=True)
class Measured:
    """One prompt."""

    ttft_s: float
    compute_s: float
    processor_s: float
    """Of the prefill worker."""
    bytes: int

    @property
    def rest_s(self) -> float:
        return self.ttft_s - self.compute_s


def run(*command: str) -> None:
    subprocess.run(command, check=True)


@contextlib.contextmanager
def link() -> Iterator[None]:
    """Two ends of a cable: one in the namespace, one here."""
    run("ip", "netns", "add", NAMESPACE)
    try:
        run(*f"ip link add {DEVICE} type veth peer name eth0 netns {NAMESPACE}".split())
        run(*f"ip address add {DECODE}/24 dev {DEVICE}".split())
        run(*f"ip link set {DEVICE} up".split())
        for step in ("link set lo up", "link set eth0 up", f"address add {PREFILL}/24 dev eth0"):
            run("ip", "-n", NAMESPACE, *step.split())
        yield
    finally:
        run("ip", "netns", "del", NAMESPACE)


def limit(megabytes_s: float) -> None:
    """Let the namespace send at most this rate. 0: no limit."""
    subprocess.run(
        ["tc", "-n", NAMESPACE, "qdisc", "del", "dev", "eth0", "root"], check=False, capture_output=True
    )
    if megabytes_s:
        bucket = f"tbf rate {megabytes_s * 8:g}mbit burst 128kb latency 20ms"
        run("tc", "-n", NAMESPACE, "qdisc", "add", "dev", "eth0", "root", *bucket.split())


@contextlib.contextmanager
def worker(command: Sequence[str], url: str, log: Path) -> Iterator[psutil.Process]:
    environment = {**os.environ, "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": DEVICE}
    if command[0] == "ip":
        environment["UCX_NET_DEVICES"] = "eth0"
    with log.open("wb") as written:
        process = subprocess.Popen(
            command, stdout=written, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            begun = time.monotonic()
            while not answers(url):
                if process.poll() is not None or time.monotonic() > begun + START_LIMIT_S:
                    raise SystemExit(f"{' '.join(command)} does not answer; its log is {log}")
                time.sleep(0.2)
            yield psutil.Process(process.pid)  # `ip netns exec` has become it
        finally:
            end(process, signal.SIGINT)


def answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def call(path: str, body: dict[str, Any] | None = None, **given: str) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{DECODE_PORT}{path}", data, {"content-type": "application/json", **given}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=600) as answer:
        return json.load(answer)


def prompt(arm: Arm, process: psutil.Process, tokens: int, chance: random.Random) -> Measured:
    """Send one prompt. The answer has one token, so its whole time is that to the first token."""
    body = {
        "model": "model",
        "prompt": [chance.randrange(300, VOCABULARY) for _ in range(tokens)],
        "max_tokens": 1,
        "ignore_eos": True,
    }
    before = processor_s(process)
    call("/v1/completions", body, **{headers.PREFILL: arm.control})
    used = processor_s(process) - before
    record = call("/debug/requests")["data"][0]
    if not record["relays"]:
        raise SystemExit("the decode worker computed the prompt itself; see its log")
    (relay,) = record["relays"]
    return Measured(record["total_s"], relay["compute_s"], used, relay["bytes"])


def processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the workers, and the namespace
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--arm", action="append", required=True, metavar="NAME=FLAGS")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--links", default="12.5,50,125", help="megabytes per second; 0: no limit")
    parser.add_argument("--prompts", default="2048,8000", help="tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("build/slow_link"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    arms = []
    for number, text in enumerate(options.arm):
        name, _, flags = text.partition("=")
        arms.append(Arm(name, tuple(flags.split()), number))
    shared = (options.model, "--served-model-name=model", "--threads=1", "--kv-cache-tokens=20000")
    decode = [sys.executable, "-m", "baton_cli.main", "decode", *shared, f"--port={DECODE_PORT}"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(link())
        url = f"http://127.0.0.1:{DECODE_PORT}/ready"
        stack.enter_context(worker(decode, url, options.out / "decode.log"))
        processes = []
        for arm in arms:
            url = f"http://{PREFILL}:{8000 + arm.number}/ready"
            log = options.out / f"{arm.name.replace(' ', '-')}.log"
            processes.append(stack.enter_context(worker(arm.command(shared), url, log)))
        chance = random.Random(1)
        for arm, process in zip(arms, processes, strict=True):
            prompt(arm, process, WARM_TOKENS, chance)  # connects
        print("| tokens | MB/s | arm | TTFT, ms | computing | processor | rest | predicted |")
        print("|---" * 8 + "|", flush=True)
        for tokens in map(int, options.prompts.split(",")):
            for rate in map(float, options.links.split(",")):
                limit(rate)
                measured: dict[str, list[Measured]] = {arm.name: [] for arm in arms}
                for _ in range(options.repeats):
                    for arm, process in zip(arms, processes, strict=True):
                        measured[arm.name].append(prompt(arm, process, tokens, chance))
                for arm in arms:
                    print(row(tokens, rate, arm, measured[arm.name]), flush=True)


def row(tokens: int, megabytes_s: float, arm: Arm, measured: Sequence[Measured]) -> str:
    computing = statistics.median(one.compute_s for one in measured) / tokens
    reading = measured[0].bytes / tokens / (1e6 * megabytes_s) if megabytes_s else 0.0
    chunks = chunks_of(tokens, arm.chunk, arm.last)
    _, rest_s = relayed_s((computing * chunk, reading * chunk) for chunk in chunks)
    cells = (
        f"{tokens}",
        f"{megabytes_s:g}" if megabytes_s else "no limit",
        arm.name,
        shown([one.ttft_s for one in measured]),
        shown([one.compute_s for one in measured]),
        shown([one.processor_s for one in measured]),
        shown([one.rest_s for one in measured]),
        f"{1e3 * rest_s:.0f}",
    )
    return "| " + " | ".join(cells) + " |"


def shown(seconds: Sequence[float]) -> str:
    least, middle, most = (
        1e3 * number for number in (min(seconds), statistics.median(seconds), max(seconds))
    )
    return f"{middle:.0f} ({least:.0f} to {most:.0f})"


if __name__ == "__main__":
    main()
