"""Collect the metrics, logs and spans of a service after traffic with a secret in every prompt."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton_api import headers, metrics
from tests.cli.service import END_S, RunningUp, await_true, running_up, start_baton
from tests.engine.models import make_model
from tests.router.collector import Collector, Span

SECRET = "a heron nobody may hear of"
"""Part of every prompt; it must not appear in any telemetry."""

STREAMED, ANSWERED, WRONG, LINE = "req_streamed", "req_answered", "req_wrong", "line-1"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"

ROUNDS_S = 300.0


@dataclass
class Telemetry:
    """All that a service exposed."""

    pages: dict[str, str] = field(default_factory=dict)
    """Responses of `/metrics`, by process."""
    log: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    sent: bytes = b""
    """Bytes that the collector received."""

    def families(self, process: str) -> dict[str, Any]:
        return {family.name: family for family in text_string_to_metric_families(self.pages[process])}

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The JSON lines of the log."""
        return [json.loads(line) for line in self.log if line.startswith("{")]


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """Run a trace collector in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    collector = Collector()

    def call(work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(END_S)

    try:
        call(collector.__aenter__())
        try:
            yield collector
        finally:
            call(collector.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def collect(folder: Path) -> Telemetry:
    """Start a service, send requests, stop it."""
    telemetry = Telemetry()
    model = make_model(folder / "tiny")
    with collecting() as collector, pytest.MonkeyPatch.context() as environment:
        for name, value in {
            "BATON_TRACING_ENDPOINT": collector.url,
            "BATON_ROUTER_LOG_REQUESTS": "1",
            "BATON_ROUTER_PROCESSES": "2",
            "BATON_ROUTER_STATE": str(folder / "state"),
        }.items():
            environment.setenv(name, value)
        with running_up(model, "--log-format=json", "--metrics-names=vllm,sglang") as up:
            _ask(up)
            workers = up.workers()
            _scrape(telemetry, up, workers)
            telemetry.pages["alone"] = _single_process(folder, workers["decode"])
            assert up.end(signal.SIGINT) == 0
        telemetry.log = up.lines
        telemetry.spans = list(collector.spans)
        telemetry.sent = collector.heard
    return telemetry


def _ask(up: RunningUp) -> None:
    question = {"model": "tiny", "prompt": f"{SECRET}. " * 8, "max_tokens": 6, "ignore_eos": True}
    with httpx.Client(base_url=up.url, trust_env=False, timeout=ROUNDS_S) as client:

        def post(name: str, body: object, **given: str) -> httpx.Response:
            return client.post("/v1/completions", json=body, headers={headers.REQUEST_ID: name, **given})

        traced = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert post(STREAMED, {**question, "stream": True}, **traced).is_success
        assert post(ANSWERED, {**question, "prompt": f"Again: {SECRET}. " * 8, "max_tokens": 40}).is_success
        for wrong in ({"n": SECRET}, {"temperature": [SECRET]}, {"prompt": {"text": SECRET}}):
            assert post(WRONG, {**question, **wrong}).status_code == 400
        assert post(WRONG, {**question, "model": "unknown"}).status_code == 404
        line = {"custom_id": LINE, "method": "POST", "url": "/v1/completions", "body": question}
        file = client.post(
            "/v1/files", files={"file": ("in.jsonl", json.dumps(line))}, data={"purpose": "batch"}
        ).json()
        batch = client.post(
            "/v1/batches",
            json={
                "input_file_id": file["id"],
                "endpoint": "/v1/completions",
                "completion_window": "24h",
            },
        ).json()

        def through() -> bool:
            status: str = client.get(f"/v1/batches/{batch['id']}").json()["status"]
            return status == "completed"

        await_true(through, ROUNDS_S, "the batch is completed")


def _scrape(telemetry: Telemetry, up: RunningUp, workers: dict[str, str]) -> None:
    def page(url: str) -> str:
        return httpx.get(f"{url}/metrics", timeout=ROUNDS_S, trust_env=False).raise_for_status().text

    def counted() -> bool:
        """Return whether the metrics of all processes have arrived. They are sent once per second."""
        telemetry.pages["router"] = page(up.url)
        requests = telemetry.families("router").get("baton_router_requests")
        ended = [one for one in requests.samples if one.name.endswith("_total")] if requests else []
        batches = telemetry.families("router")[metrics.BATCHES.name].samples
        done = [one.value for one in batches if one.labels["status"] == "completed"]
        return sum(one.value for one in ended) >= 8 and done == [1.0]

    await_true(counted, ROUNDS_S, "the router has counted all requests and the batch")
    telemetry.pages.update({role: page(url) for role, url in workers.items()})


def _single_process(folder: Path, decode: str) -> str:
    """Return the metrics of a router with one process and with tenants."""
    file = folder / "tenants.yaml"
    key = "of-an-admin"
    digest = hashlib.sha256(key.encode()).hexdigest()
    file.write_text(json.dumps({"tenants": [{"name": "a", "keys": [f"sha256:{digest}"], "admin": True}]}))
    process = start_baton(
        *("router", f"--decode={decode}", "--port=0", "--processes=1", "--log-format=json"),
        *(f"--tenants-file={file}", f"--state={folder / 'alone'}"),
    )
    assert process.stderr is not None
    try:
        deadline = time.monotonic() + ROUNDS_S
        for line in process.stderr:
            assert time.monotonic() < deadline
            if "listens on http" in line:
                url = json.loads(line)["message"].partition("listens on ")[2].split()[0]
                admin = {"Authorization": f"Bearer {key}"}
                page = httpx.get(f"{url}/metrics", headers=admin, timeout=ROUNDS_S, trust_env=False)
                return page.raise_for_status().text
        raise AssertionError("the router did not start")
    finally:
        process.terminate()
        process.communicate(timeout=END_S)
