"""
Templates that come with requests run in a process of their own, which the system bounds.

What the sandbox meters is a template's own turns. One call into Python's library may cost any time and
memory all the same, and only a process can be stopped in the middle of it. So whoever may bring templates
gets a process for each: bounded in memory and processor time before it reads anything, killed when it is
late, and with nothing open but its pipes. It takes a tenth of a second to start, which nobody else pays.
"""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict

from baton_engine.api.chat.template.prompt import TemplateInput, render
from baton_engine.api.chat.template.sandbox import MOST_CHARACTERS, TemplateError

MOST_MEMORY = 512 * 1024 * 1024
"""Bytes of address space, the interpreter included."""
MOST_PROCESSOR_S = 5
DEADLINE_S = 10.0
"""From start to answer: more than the processor time, for machines that are busy."""
MOST_AT_ONCE = 2
"""Processes; who comes later waits."""

_slots = threading.BoundedSemaphore(MOST_AT_ONCE)


def render_apart(source: str, conversation: TemplateInput, specials: Mapping[str, str]) -> str:
    """As `render`, in a new process. Blocks; raises TemplateError."""
    job = json.dumps({"source": source, "conversation": asdict(conversation), "specials": dict(specials)})
    with _slots:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-m", __name__],
                input=job.encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={},  # which may have keys in it
                timeout=DEADLINE_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise TemplateError(f"it takes more than {DEADLINE_S:g} s") from error
    answer: dict[str, str] = {}
    with contextlib.suppress(ValueError):  # cut off, as it is when the system has stopped the process
        answer = json.loads(done.stdout)
    if "prompt" in answer:
        return answer["prompt"]
    raise TemplateError(answer.get("error", "it takes too much time or memory"))


def main() -> None:
    """One job in, one answer out; for `python -m`."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_PROCESSOR_S, MOST_PROCESSOR_S))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    job = json.load(sys.stdin)
    try:
        prompt = render(job["source"], TemplateInput(**job["conversation"]), job["specials"])
        answer = {"prompt": prompt[:MOST_CHARACTERS]}
    except TemplateError as error:
        answer = {"error": str(error)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
