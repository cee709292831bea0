"""
Runs a batch on workers of a real vLLM and kills a decode worker meanwhile. Each line must be answered once.

    python -m benchmarks.vllm_batch --vllm VENV/bin/python --model FOLDER --lines 200
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from baton_cli.batch_service import BatchService
from benchmarks.vllm_chaos import URL, router_before
from benchmarks.vllm_workers import opened

CHAT = "/v1/chat/completions"
END_S = 900.0
TOKENS = 40


def write_lines(path: Path, count: int) -> None:
    with path.open("w") as file:
        for number in range(count):
            messages = [
                {"role": "user", "content": f"Question {number}: " + "why is it so? " * (number % 60)}
            ]
            body = {"model": "vllm", "messages": messages, "max_tokens": TOKENS, "temperature": 0}
            line = {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body}
            file.write(json.dumps(line) + "\n")


def await_lines(service: BatchService, id: str, least: int) -> None:
    """Returns once so many lines are answered or the batch has ended."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        batch = service.batch(id)
        if batch["request_counts"]["completed"] >= least or batch["status"] in ("completed", "failed"):
            return
        time.sleep(0.2)
    raise SystemExit(f"fewer than {least} lines are answered after {END_S:g} s: {service.batch(id)}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", type=Path, required=True, help="Python of vLLM's environment")
    parser.add_argument("--model", type=Path, required=True, help="a small model's folder")
    parser.add_argument("--lines", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("build/vllm-batch"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    source, output = given.out / "input.jsonl", given.out / "output.jsonl"
    write_lines(source, given.lines)
    with (
        tempfile.TemporaryDirectory(prefix="vllm-batch-") as state,
        opened(given.vllm, given.out) as workers,
        router_before(workers, given.model, given.out, f"--state={state}") as running,
    ):
        service = BatchService(URL, "", lambda reason: print(reason, file=sys.stderr))
        file = service.upload(source, lambda done, of: None)
        id = service.create(file["id"], CHAT, {})["id"]
        await_lines(service, id, given.lines // 4)
        victim = running["decode"][0]
        victim.signal(signal.SIGKILL)
        at_kill = service.batch(id)["request_counts"]["completed"]
        workers.start(victim.spec)
        await_lines(service, id, given.lines)
        batch = service.batch(id)
        while batch["status"] in ("in_progress", "finalizing"):
            time.sleep(0.2)
            batch = service.batch(id)
        written = service.file(batch["output_file_id"])
        service.download(written["id"], written["bytes"], output, lambda done, of: None)
        service.close()
    answered = Counter(json.loads(line)["custom_id"] for line in output.read_text().splitlines())
    once = sum(count == 1 for count in answered.values())
    counts = batch["request_counts"]
    print(f"{batch['status']}, {counts}; killed at {at_kill}; {once} of {given.lines} lines answered once")
    return 0 if once == given.lines == len(answered) else 1


if __name__ == "__main__":
    sys.exit(main())
