"""Pods of Jobs as a kubelet would start them: the container that the operator would have run, a process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from baton_cli.batch_service import BatchService
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.manifests import batches as manifests
from tests.batches import chaos
from tests.batches.batch_cluster import NAMESPACE, SERVICE, BatchCluster
from tests.batches.chaos import Program, Router
from tests.batches.service_address import ServiceAddress
from tests.ports import steady_ports

LINES = 200
SPEC: Mapping[str, Any] = {
    "model": {"uri": "builtin://smollm2"},
    "decode": {},
    "router": {"batches": {"execution": "Jobs"}},
}


class Story:
    """Routers in external mode with a slow worker, and pods that the test starts."""

    def __init__(
        self,
        folder: Path,
        cluster: BatchCluster,
        routers: Sequence[Router],
        address: ServiceAddress,
        worker: int,
    ) -> None:
        """`worker` is its port."""
        self.folder = folder
        self.worker = worker
        self.cluster = cluster
        self.routers = routers
        self.address = address
        self.url = address.url
        self.service = BatchService(self.url, "", lambda reason: None)
        self.pods: list[subprocess.Popen[bytes]] = []

    def submit_held(self, lines: int = LINES) -> str:
        """Return a batch that cannot end before the worker is released."""
        chaos.hold(self.worker, lines // 2)
        return self.submit(lines)

    def release(self) -> None:
        chaos.release(self.worker)

    def submit(self, lines: int = LINES) -> str:
        source = self.folder / "input.jsonl"
        chaos.write_lines(source, lines)
        return chaos.submit(self.service, source)

    def batch_job(self, name: str) -> dict[str, Any]:
        chaos.await_true(lambda: name in self.cluster.jobs, chaos.START_S, f"there is a BatchJob {name}")
        return self.cluster.jobs[name]

    def pod(self, job: dict[str, Any], pod: str, **environment: str) -> subprocess.Popen[bytes]:
        """Starts one as a kubelet would: the Job's arguments, its environment and its token."""
        manifest = manifests.job(job, InferenceServiceSpec.model_validate(SPEC), "image")
        (container,) = manifest["spec"]["template"]["spec"]["containers"]
        token = self.folder / pod
        token.write_text(self.cluster.token(pod))
        addresses = {
            f"http://{SERVICE}": self.url,
            f"{manifests.TOKEN_FOLDER}/{manifests.TOKEN_FILE}": str(token),
        }
        arguments = [_replaced(one, addresses) for one in container["args"]]
        with (self.folder / f"{pod}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "baton_cli.main", *arguments],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=chaos.ROOT,
                env={**os.environ, **environment},
            )  # fmt: skip
        self.pods.append(process)
        return process

    def ended(self, pod: subprocess.Popen[bytes]) -> int:
        return pod.wait(chaos.END_S)

    def some_done(self, id: str, least: int) -> None:
        def so() -> bool:
            return bool(self.service.batch(id)["request_counts"]["completed"] >= least)

        chaos.await_true(so, chaos.END_S, f"{least} lines of {id} are done")

    def check(self, id: str, lines: int = LINES) -> None:
        """Every line was answered, and once."""
        batch = chaos.ended(self.service, id)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": lines, "completed": lines, "failed": 0}
        output = chaos.output_of(self.service, batch, self.folder)
        report = chaos.Report()
        report.add(id, output, chaos.anonymous(id, output))
        assert (report.lines, report.lost, report.doubled) == (lines, 0, 0)

    def set_phase(self, name: str, phase: str) -> None:
        def so() -> bool:
            return bool(self.cluster.jobs[name].get("status", {}).get("phase") == phase)

        chaos.await_true(so, chaos.END_S, f"{name} has heard that it is {phase}")

    def close(self) -> None:
        for pod in self.pods:
            pod.kill()
            pod.wait()
        self.service.close()


def _replaced(flag: str, addresses: Mapping[str, str]) -> str:
    name, _, value = flag.partition("=")
    return f"{name}={addresses[value]}" if value in addresses else flag


@contextlib.contextmanager
def story_of(folder: Path, routers: int, environment: Mapping[str, str]) -> Iterator[Story]:
    """Of so many routers that share a folder; `environment` names the database, if it is not SQLite there."""
    ports = steady_ports(1 + routers)
    arguments = ["tests.batches.mock_worker", f"--port={ports[0]}", "--seconds=0.1", "--slots=8"]
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(BatchCluster())
        stack.callback(Program(arguments, folder / "worker.log", {}).kill)
        flags = ["--batch-execution=external", f"--batch-jobs={SERVICE}", "--batch-jobs-uid=uid-1"]
        flags += [f"--kubernetes-api={cluster.url}", f"--kubernetes-namespace={NAMESPACE}"]
        started = []
        for number, port in enumerate(ports[1:]):
            started.append(Router(folder, port, ports[:1], environment, f"router-{number}", *flags))
            stack.callback(started[-1].program.kill)
        for router in started:
            router.await_ready()
        address = stack.enter_context(ServiceAddress(ports[1:]))
        manifest = Story(folder, cluster, started, address, ports[0])
        stack.callback(manifest.close)
        yield manifest
