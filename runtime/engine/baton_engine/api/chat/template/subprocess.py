"""
Rendering of the templates of requests in a separate process with limits of the operating system.

The sandbox limits the steps of a template. A single call of Python's library can still need unlimited time
and memory, and only a process can be stopped during such a call. Each rendering has its own process. It has
limits of memory and processor time and a deadline, and only its pipes are open. Its start takes a tenth of a
second; requests without templates do not need it.
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
"""Maximum bytes of address space, including the interpreter."""
MOST_PROCESSOR_S = 5
DEADLINE_S = 10.0
"""Maximum seconds of a rendering. Longer than the processor time, for busy machines."""
MOST_AT_ONCE = 2
"""Maximum number of processes. Further renderings wait."""

_slots = threading.BoundedSemaphore(MOST_AT_ONCE)


def render_apart(source: str, conversation: TemplateInput, specials: Mapping[str, str]) -> str:
    """Render as `render` does, in a new process. Blocks. Raises TemplateError."""
    job = json.dumps({"source": source, "conversation": asdict(conversation), "specials": dict(specials)})
    with _slots:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-m", __name__],
                input=job.encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={},  # the worker's environment may contain secrets
                timeout=DEADLINE_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise TemplateError(f"it takes more than {DEADLINE_S:g} s") from error
    answer: dict[str, str] = {}
    with contextlib.suppress(ValueError):  # the output is truncated if the system has stopped the process
        answer = json.loads(done.stdout)
    if "prompt" in answer:
        return answer["prompt"]
    raise TemplateError(answer.get("error", "it takes too much time or memory"))


def main() -> None:
    """Read a job from stdin and write the result to stdout, for `python -m`."""
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
