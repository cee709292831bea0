"""The cluster of the tests: kubectl in one namespace, and access to Services from this machine."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

Manifest = Mapping[str, Any]

CONNECTED_S = 2.0
ANSWERED_S = 60.0


class Refused(Exception):
    """A command failed; the message has its output."""


def command(arguments: Sequence[str], given: str = "", timeout_s: float = ANSWERED_S) -> str:
    """Run a command and return its output. Raises Refused."""
    try:
        done = subprocess.run(
            list(arguments), input=given, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Refused(f"{' '.join(arguments)}: no end within {timeout_s:g} s") from error
    if done.returncode:
        raise Refused(f"{' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """One namespace."""

    namespace: str

    def kubectl(self, *arguments: str, given: str = "", timeout_s: float = ANSWERED_S) -> str:
        return command(["kubectl", "--namespace", self.namespace, *arguments], given, timeout_s)

    def apply(self, what: Path | Manifest) -> None:
        """Apply a file or an object."""
        text = what.read_text() if isinstance(what, Path) else json.dumps(what)
        self.kubectl("apply", "--filename=-", given=text)

    def object(self, kind: str, name: str) -> Any:
        return json.loads(self.kubectl("get", kind, name, "--output=json"))

    def objects(self, kind: str, selector: str = "") -> list[Any]:
        listed = json.loads(self.kubectl("get", kind, f"--selector={selector}", "--output=json"))
        items: list[Any] = listed["items"]
        return items

    def wait(self, what: str, condition: str, timeout_s: int) -> None:
        """Wait for a condition of `what` (KIND/NAME), written as for `kubectl wait --for`."""
        arguments = ("wait", f"--for={condition}", f"--timeout={timeout_s}s", what)
        self.kubectl(*arguments, timeout_s=timeout_s + ANSWERED_S)

    def patch(self, what: str, change: Manifest) -> None:
        self.kubectl("patch", what, "--type=merge", f"--patch={json.dumps(change)}")

    @contextmanager
    def reach(self, service: str) -> Iterator[str]:
        """Yield a URL of the Service: its own address, or one that kubectl forwards to one of its pods."""
        spec = self.object("service", service)["spec"]
        port = spec["ports"][0]["port"]
        if services_are_near():
            yield f"http://{spec['clusterIP']}:{port}"
            return
        with self._forwarded(f"service/{service}", port) as address:
            yield f"http://{address}"

    @contextmanager
    def reach_pod(self, pod: str, port: int) -> Iterator[str]:
        """Yield ADDRESS:PORT of a pod: its own, or one that kubectl forwards to it."""
        if services_are_near():
            yield f"{self.object('pod', pod)['status']['podIP']}:{port}"
            return
        with self._forwarded(f"pod/{pod}", port) as address:
            yield address

    @contextmanager
    def _forwarded(self, what: str, port: int) -> Iterator[str]:
        forward = ["kubectl", "--namespace", self.namespace, "port-forward", what, f":{port}"]
        with subprocess.Popen(forward, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                match = re.search(r"127\.0\.0\.1:(\d+)", line)
                assert match, f"kubectl port-forward printed {line!r}"
                yield f"127.0.0.1:{match[1]}"
            finally:
                process.terminate()


@cache
def services_are_near() -> bool:
    """Return whether this machine reaches the cluster's Services by their addresses."""
    service = json.loads(command(["kubectl", "get", "service", "kubernetes", "--output=json"]))["spec"]
    try:
        with socket.create_connection((service["clusterIP"], 443), timeout=CONNECTED_S):
            return True
    except OSError:
        return False
