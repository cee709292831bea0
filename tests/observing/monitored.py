"""Run a service and an operator under load, monitored by a real Prometheus."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from baton_api import headers as header_names
from baton_observing import rules
from tests.cli.service import RunningUp, await_true, running_up
from tests.observing.prometheus import Prometheus
from tests.operator.real_cluster import RealCluster, real_cluster, running_operator
from tests.ports import steady_port

READY_S = 300.0
END_S = 300.0
SCRAPE = "1s"
NAMESPACE, SERVICE = "models", "chat"
"""The service that the operator manages. Prometheus gives the same labels to the local processes."""
TOPICS = ("herons", "relays", "tides", "lighthouses", "bicycles", "glaciers")

LIMITS = {"scaling": {"minReplicas": 1, "maxReplicas": 4}}


def service(prometheus: str, canary: int) -> dict[str, Any]:
    """Return a spec with autoscaling. Another `canary` changes the spec, so that the operator reconciles."""
    return {
        "model": {"uri": "builtin://smollm2"},
        "prefill": LIMITS,
        "decode": LIMITS,
        "autoscaling": {"mode": "Internal", "interval": "5s", "prometheus": {"url": prometheus}},
        "router": {"replicas": 1 + canary % 2},
    }


def configuration(router: str, operator: str) -> str:
    """Return the Prometheus configuration of docs/guides/observability.md plus the operator."""
    name = {"namespace": NAMESPACE, "service": SERVICE}
    host = router.removeprefix("http://")
    jobs = [
        {
            "job_name": "baton-router",
            "static_configs": [{"targets": [host], "labels": name | {"role": "router"}}],
        },
        {
            "job_name": "baton-workers",
            "http_sd_configs": [{"url": f"{router}/workers/targets", "refresh_interval": SCRAPE}],
            "relabel_configs": [
                {"target_label": label, "replacement": value} for label, value in name.items()
            ],
        },
        {"job_name": "baton-operator", "static_configs": [{"targets": [operator.removeprefix("http://")]}]},
    ]
    every = {"scrape_interval": SCRAPE, "evaluation_interval": SCRAPE}
    return yaml.safe_dump(
        {
            "global": every,
            "rule_files": list(rules.files()),
            "scrape_configs": [{"honor_labels": True, **job} for job in jobs],
        }
    )


@contextlib.contextmanager
def running_prometheus(folder: Path, text: str) -> Iterator[Prometheus]:
    """Run Prometheus with a configuration. Skips the test where it is not installed."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (on Debian: apt install prometheus)")
    folder.mkdir()
    (folder / "prometheus.yml").write_text(text)
    for name, rule in rules.files().items():
        (folder / name).write_text(re.sub(r"interval: \d+s", f"interval: {SCRAPE}", rule))
    address = f"127.0.0.1:{steady_port()}"
    command = (
        *("prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=warn"),
        f"--web.listen-address={address}",
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:

        def ready() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"http://{address}/-/ready", trust_env=False).is_success
            return False

        await_true(ready, READY_S, "Prometheus is ready")
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(END_S)


@dataclass
class Load:
    """Clients that send one request after another, and a batch."""

    url: str
    model: str
    clients: int
    seed: int = 0
    problems: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def batch(self, lines: int) -> None:
        """Submit a batch."""
        body = {"model": self.model, "prompt": "Count: one, two,", "max_tokens": 8, "ignore_eos": True}
        text = "".join(
            json.dumps({"custom_id": f"{n}", "method": "POST", "url": "/v1/completions", "body": body}) + "\n"
            for n in range(lines)
        )
        with httpx.Client(base_url=self.url, trust_env=False, timeout=END_S) as client:
            sent = client.post("/v1/files", files={"file": ("in.jsonl", text)}, data={"purpose": "batch"})
            wanted = {
                "input_file_id": sent.json()["id"],
                "endpoint": "/v1/completions",
                "completion_window": "24h",
            }
            assert client.post("/v1/batches", json=wanted).is_success

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(self.clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(READY_S)

    def _ask(self, number: int) -> None:
        chance = random.Random(self.seed + number)
        with httpx.Client(base_url=self.url, trust_env=False, timeout=READY_S) as client:
            while not self._stop.is_set():
                try:
                    self._once(client, chance)
                except (httpx.HTTPError, AssertionError) as error:
                    self.problems.append(repr(error))

    def _once(self, client: httpx.Client, chance: random.Random) -> None:
        topic = chance.choice(TOPICS)
        prompt = f"The relay tells a story of {topic}. " * chance.randint(2, 8) + str(chance.random())
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": chance.randint(4, 24),
            "ignore_eos": True,
        }
        headers = {header_names.CLASS: chance.choice(("interactive", "default"))}
        with client.stream(
            "POST", "/v1/completions", json={**body, "stream": True}, headers=headers
        ) as answer:
            assert answer.is_success, answer.read()
            for _ in answer.iter_raw():
                pass
        if chance.random() < 0.05:
            assert client.post("/v1/completions", json={**body, "max_tokens": -1}).status_code == 400


@dataclass(frozen=True, slots=True)
class Monitored:
    """The running parts."""

    prometheus: Prometheus
    up: RunningUp
    cluster: RealCluster

    async def change(self, number: int) -> None:
        """Change the spec, and make the pods ready."""
        await self.cluster.put(service(self.prometheus.url, number))
        await self.cluster.ready_pods()


@contextlib.asynccontextmanager
async def monitored(folder: Path, model: Path, *flags: str) -> AsyncIterator[Monitored]:
    """Run a router, a prefill and a decode worker, and an operator with a service at a real API server."""
    async with (
        real_cluster(folder / "kubernetes") as cluster,
        running_operator(cluster, "monitored") as operator,
    ):
        with running_up(model, *flags) as up:
            text = configuration(up.url, operator.url)
            with running_prometheus(folder / "prometheus", text) as prometheus:
                it = Monitored(prometheus, up, cluster)
                await it.change(0)
                yield it
