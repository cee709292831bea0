"""
A program of three processes that report when they begin and end, to test `prefork`.

`python -m tests.router.prefork_program [refuse|stubborn|early]`: with `refuse` the second process fails to
start; with `stubborn` it ignores the signal to stop; with `early` it is stopped before it has begun.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

from baton_api.errors import SetupError
from baton_router.frontends.prefork import ChildMain, ChildProcess, ProcessSupervisor, ReadySignal

LOST_S = 60.0
"""Seconds after which a signal that a process has not received is lost."""


def member(name: str, how: str) -> ChildMain:
    def body(started: ReadySignal, life: int) -> None:
        def stop(number: int, frame: object) -> None:
            say("told")
            if how != "stubborn":
                say("ends")
                os._exit(0)

        def say(what: str) -> None:
            os.write(1, f"{name} {what} {os.getpid()}\n".encode())

        if how == "refuse":
            raise SetupError(f"{name} cannot start: it is Monday.")
        signal.signal(signal.SIGTERM, stop)
        say("begins")
        started()
        while life not in select.select([life], [], [])[0]:
            pass
        say("is an orphan")

    return body


def stop_at_second_fork() -> None:
    """Stop the program by its second process, before that has signal handlers of its own."""
    parent, forks = os.getpid(), list[int]()

    def stop() -> None:
        if len(forks) == 2:
            os.kill(parent, signal.SIGTERM)
            deadline = time.monotonic() + LOST_S
            while signal.SIGTERM not in signal.sigpending() and time.monotonic() < deadline:
                time.sleep(0.01)

    os.register_at_fork(before=lambda: forks.append(1), after_in_child=stop)


def main(how: str) -> None:
    if how == "early":
        stop_at_second_fork()
    members = [
        ChildProcess(name, member(name, how if name == "two" else "")) for name in ("one", "two", "three")
    ]
    try:
        # Long enough for those that stop, even if they have to wait for a processor.
        ProcessSupervisor(members, stop_s=3.0 if how == "stubborn" else 300.0).run(
            lambda: print("ready", flush=True), lambda: print("stopping", flush=True)
        )
    except SetupError as error:
        print(f"refused {error.message}", flush=True)
    print("over", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
