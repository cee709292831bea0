"""The programs beside the workers: Baton's router, and Prometheus, which scrapes each second."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from benchmarks.model_cluster import MODEL
from tests.router.fake_kubernetes import SELECTOR, FakeKubernetes

TIMEOUT_S = 120.0
"""Maximum waiting time in the router, in real seconds: longer than any policy takes to scale."""

LABELS = {"namespace": "models", "service": "chat"}


async def router(folder: Path, api: FakeKubernetes, port: int) -> asyncio.subprocess.Process:
    return await _run(
        folder, "router", sys.executable, "-m", "baton_cli.main", "router", f"--port={port}",
        f"--kubernetes-api={api.url}", f"--kubernetes-account={api.account}",
        f"--kubernetes-selector={SELECTOR}", f"--hold-models={MODEL}", f"--hold-s={TIMEOUT_S}",
        f"--wait-s={TIMEOUT_S}", f"--first-byte-s={TIMEOUT_S}", "--local-prefill-max-tokens=0",
        "--health-interval-s=0.5", f"--state={folder / 'state'}",
    )  # fmt: skip


async def prometheus(folder: Path, port: int) -> asyncio.subprocess.Process:
    """Start Prometheus. It scrapes the targets last written by `write_targets`."""
    discovery = {"files": [str(folder / "targets.json")], "refresh_interval": "1s"}
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [{"job_name": "baton", "file_sd_configs": [discovery]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    return await _run(
        folder, "prometheus", "prometheus", f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}",
    )  # fmt: skip


def write_targets(folder: Path, targets: Iterable[tuple[str, int, str]]) -> None:
    """Role, port and name of each."""
    groups = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {**LABELS, "role": role, "pod": name}}
        for role, port, name in targets
    ]
    write = folder / "targets.tmp"
    write.write_text(json.dumps(groups))
    write.rename(folder / "targets.json")


async def _run(folder: Path, name: str, *command: str) -> asyncio.subprocess.Process:
    log: IO[Any]
    with (folder / f"{name}.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
