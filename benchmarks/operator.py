"""
Cost of the operator: many InferenceServices against a real API server, after a restart, and at rest.

    KUBEBUILDER_ASSETS=FOLDER python -m benchmarks.operator --services 1000

There are no nodes and no controllers: only the operator and its API server are measured. A
service has settled when its status belongs to its spec and writes have ended. Each round prints
the operator's usage: requests, writes, memory, and its requests at rest. A watch counts once, when it
begins. The operator scales `--scaled` of the services, without a Prometheus.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from baton_operator.cluster.api_resources import API, path
from tests.operator.real_cluster import Process, RealCluster, counted, real_cluster, running_operator

PAIR: dict[str, Any] = {"model": {"uri": "builtin://smollm2"}, "prefill": {}, "decode": {"replicas": 2}}
SCALED: dict[str, Any] = {
    "model": {"uri": "builtin://smollm2"},
    "prefill": {"scaling": {"minReplicas": 1, "maxReplicas": 4}},
    "decode": {"scaling": {"minReplicas": 1, "maxReplicas": 4}},
    "autoscaling": {"mode": "Internal"},
}
QUIET_S = 5.0
"""Seconds without a request about a service after which nothing more is to come."""


async def main(given: argparse.Namespace) -> None:
    services, namespaces = given.services, given.namespaces
    with tempfile.TemporaryDirectory() as folder:
        async with real_cluster(Path(folder)) as cluster:
            for number in range(namespaces):
                await cluster.api.post("/api/v1/namespaces", {"metadata": {"name": f"n{number}"}})
            began = time.monotonic()
            for number in range(services):
                spec = SCALED if number < given.scaled else PAIR
                await cluster.put(spec, f"s{number}", f"n{number % namespaces}")
            print(f"{services} services created in {time.monotonic() - began:.0f} s", flush=True)
            for label in ("first start", "restart"):
                await measure(cluster, label, given)


async def measure(cluster: RealCluster, label: str, given: argparse.Namespace) -> None:
    """Start the operator, wait until all has settled, and print what that took."""
    services = given.services
    before = len(cluster.requests())
    began = time.monotonic()
    async with running_operator(cluster, "operator", f"--concurrency={given.concurrency}") as operator:
        looked = await settled(operator, given, began)
        count = await settled_count(cluster)
        assert count == services, f"{count} of {services} have a status"
        requests = cluster.requests(before)
        writes = [one for one in requests if one.is_work]
        print(
            f"{label}: settled after {looked:.1f} s, {len(requests)} requests, {len(writes)} writes, "
            f"{operator.resident_mb:.0f} MB, {operator.cpu_s:.0f} s of CPU",
            flush=True,
        )
        print(f"  {dict(counted(requests).most_common(8))}", flush=True)
        before, cpu_s = len(cluster.requests()), operator.cpu_s
        await asyncio.sleep(given.rest_s)
        requests = cluster.requests(before)
        print(
            f"  at rest: {len(requests) / given.rest_s:.2f} requests/s "
            f"{dict(counted(requests).most_common(8))}, "
            f"{(operator.cpu_s - cpu_s) / given.rest_s:.1%} of a core, load {os.getloadavg()[0]:.0f}",
            flush=True,
        )


async def settled(operator: Process, given: argparse.Namespace, began: float) -> float:
    """Seconds until the last look at a service before a quiet while."""
    services, limit_s = given.services, given.limit_s
    looks, last = 0.0, began
    while True:
        await asyncio.sleep(0.5)
        now = time.monotonic()
        assert now - began < limit_s, f"{looks:.0f} looks in {limit_s:.0f} s, and no end"
        try:
            count = await operator.figure(LOOKS)
        except httpx.TimeoutException:  # the machine has much to do
            continue
        if count != looks:
            looks, last = count, now
        elif looks >= services and now - last > QUIET_S:
            print(f"  {looks:.0f} looks", flush=True)
            return last - began


LOOKS = 'baton_operator_reconcile_seconds_count{kind="InferenceService",result="success"}'
"""The autoscaler reconciles scaled services all the time."""


async def settled_count(cluster: RealCluster) -> int:
    """Services whose status is about their spec."""
    items = (await cluster.admin.get(path(API, "InferenceService"), timeout=60)).json()["items"]
    return sum(
        one.get("status", {}).get("observedGeneration") == one["metadata"]["generation"] for one in items
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--services", type=int, default=1000)
    parser.add_argument("--namespaces", type=int, default=20)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=1800.0)
    parser.add_argument("--rest-s", type=float, default=60.0)
    parser.add_argument("--scaled", type=int, default=0)
    asyncio.run(main(parser.parse_args()))
