"""A Prometheus beside the node, which scrapes pods as the chart's PodMonitor says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from e2e import node
from e2e.installation import CHART, Installation
from e2e.kubernetes import Kubernetes
from e2e.polling import until
from e2e.services import node_address
from tests.ports import steady_port

READY_S = 60
INTERVAL = "2s"
REFRESH = "10s"
"""Interval of the discovery, and its time limit: kubectl may take seconds on a busy machine."""

FIELDS = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
"""Fields of a PodMonitor's relabelings by their names in a configuration of Prometheus."""

OPERATOR_LABELS = {"namespace": "__meta_kubernetes_namespace", "pod": "__meta_kubernetes_pod_name"}
"""Labels that the Prometheus operator adds to each target of a PodMonitor."""


@contextmanager
def running(installation: Installation, cluster: Kubernetes, folder: Path) -> Iterator[str]:
    """Yield the URL of a Prometheus for the pods of `cluster`. Skips the test if pods cannot reach it."""
    node.needed()
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (on Debian: apt install prometheus)")
    address = f"{node_address(cluster)}:{steady_port()}"
    command = ("prometheus", "--config.file=prometheus.yml", f"--web.listen-address={address}")
    with _discovery(cluster) as discovery, (folder / "log").open("wb") as log:
        (folder / "prometheus.yml").write_text(yaml.safe_dump(_configuration(installation, discovery)))
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:

            def is_ready() -> bool:
                assert process.poll() is None, (folder / "log").read_text()
                with suppress(httpx.TransportError):
                    return httpx.get(f"http://{address}/-/ready", trust_env=False).is_success
                return False

            until("Prometheus is ready", is_ready, READY_S)
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait()


@contextmanager
def _discovery(cluster: Kubernetes) -> Iterator[str]:
    """Yield a URL with the pods as targets: Debian's Prometheus does not ask Kubernetes."""

    class Targets(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps([one for pod in cluster.objects("pods") for one in _targets(pod)]).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Targets) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def _targets(pod: Any) -> Iterator[dict[str, Any]]:
    """Yield the ports of a pod as targets, with the labels of Prometheus' discovery by Kubernetes."""
    metadata = pod["metadata"]
    labels = {
        f"__meta_kubernetes_pod_label_{re.sub('[^a-zA-Z0-9]', '_', name)}": value
        for name, value in metadata["labels"].items()
    }
    for port in pod["spec"]["containers"][0].get("ports", ()):
        if address := pod["status"].get("podIP"):
            yield {
                "targets": [f"{address}:{port['containerPort']}"],
                "labels": {
                    **labels,
                    "__meta_kubernetes_namespace": metadata["namespace"],
                    "__meta_kubernetes_pod_name": metadata["name"],
                    "__meta_kubernetes_pod_container_port_name": port.get("name", ""),
                },
            }


def _configuration(installation: Installation, discovery: str) -> dict[str, Any]:
    """Return what the Prometheus operator makes of the chart's PodMonitor."""
    values = ("observing.podMonitor.enabled=true", f"observing.podMonitor.interval={INTERVAL}")
    text = installation.helm(
        *("template", "baton", str(CHART), "--show-only=templates/podmonitor.yaml"),
        "--api-versions=monitoring.coreos.com/v1/PodMonitor",
        *(f"--set={one}" for one in values),
    )
    endpoints = yaml.safe_load(text)["spec"]["podMetricsEndpoints"]
    return {"scrape_configs": [_scraped(one, discovery) for one in endpoints]}


def _scraped(endpoint: Mapping[str, Any], discovery: str) -> dict[str, Any]:
    port = {"source_labels": ["__meta_kubernetes_pod_container_port_name"], "regex": endpoint["port"]}
    labels = [{"source_labels": [source], "target_label": label} for label, source in OPERATOR_LABELS.items()]
    relabelings = [
        {FIELDS.get(name, name): value for name, value in one.items()} for one in endpoint["relabelings"]
    ]
    return {
        "job_name": endpoint["port"],
        "metrics_path": endpoint["path"],
        "scrape_interval": endpoint["interval"],
        "scrape_timeout": endpoint["interval"],
        "honor_labels": endpoint["honorLabels"],
        "http_sd_configs": [{"url": discovery, "refresh_interval": REFRESH}],
        "relabel_configs": [{**port, "action": "keep"}, *labels, *relabelings],
    }
