"""
The real HorizontalPodAutoscaler writes RoleScalers: kube-controller-manager beside a real API server.

A stand-in for the server of external metrics acts as an adapter for Prometheus does: it serves the values of
the operator's /metrics.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from baton_api import labels, metrics
from baton_operator.cluster.api_resources import path
from tests.operator.real_cluster import Inside, Listed, RealCluster, client, real_cluster, until
from tests.operator.scaling.test_autoscaler import SCALING, SPEC, Scaled
from tests.router.real_kubernetes import program

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[3] / "examples"
GROUP = "external.metrics.k8s.io"


@asynccontextmanager
async def external_metrics(cluster: RealCluster, service: Scaled) -> AsyncIterator[None]:
    """Serves each series of the autoscaler's, by its labels, as the HPA asks for it."""
    registry = CollectorRegistry()
    registry.register(service.shown)

    async def answer(request: web.Request) -> web.Response:
        wanted = dict(one.split("=") for one in request.query.get("labelSelector", "").split(",") if one)
        families = text_string_to_metric_families(generate_latest(registry).decode())
        items = [
            {
                "metricName": sample.name,
                "metricLabels": sample.labels,
                "timestamp": "2026-01-01T00:00:00Z",
                "value": f"{round(sample.value * 1000)}m",
            }
            for family in families
            for sample in family.samples
            if sample.name == request.match_info["metric"] and wanted.items() <= sample.labels.items()
        ]
        return web.json_response(
            {
                "kind": "ExternalMetricValueList",
                "apiVersion": f"{GROUP}/v1beta1",
                "metadata": {},
                "items": items,
            }
        )

    async def resources(request: web.Request) -> web.Response:
        return web.json_response(
            {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": f"{GROUP}/v1beta1",
                "resources": [],
            }
        )

    app = web.Application()
    app.router.add_get(f"/apis/{GROUP}/v1beta1", resources)
    app.router.add_get(f"/apis/{GROUP}/v1beta1/namespaces/models/{{metric}}", answer)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cluster.folder / "server.pem")
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    port = runner.addresses[0][1]
    await cluster.api.post(
        "/api/v1/namespaces/models/services",
        {
            "metadata": {"name": "metrics"},
            "spec": {
                "type": "ExternalName",
                "externalName": "localhost",
                "ports": [{"port": port, "name": "https"}],
            },
        },
    )
    await cluster.api.post(
        "/apis/apiregistration.k8s.io/v1/apiservices",
        {
            "metadata": {"name": f"v1beta1.{GROUP}"},
            "spec": {
                "group": GROUP,
                "version": "v1beta1",
                "service": {"name": "metrics", "namespace": "models", "port": port},
                "insecureSkipTLSVerify": True,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
            },
        },
    )
    try:
        await cluster.served(f"/apis/{GROUP}/v1beta1")
        yield
    finally:
        await runner.cleanup()


@asynccontextmanager
async def controllers(cluster: RealCluster) -> AsyncIterator[None]:
    """Of all controllers the one for HPAs, looking each second."""
    kubeconfig = cluster.folder / "admin.kubeconfig"
    settings = yaml.safe_load(cluster.kubeconfig.read_text())
    settings["users"][0]["user"] = {"token": "token-of-the-admin"}
    kubeconfig.write_text(yaml.safe_dump(settings))
    with (cluster.folder / "controllers.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            program("kube-controller-manager"), f"--kubeconfig={kubeconfig}", "--leader-elect=false",
            "--controllers=horizontal-pod-autoscaler-controller", "--secure-port=0",
            "--horizontal-pod-autoscaler-sync-period=1s", stdout=log, stderr=log,
        )  # fmt: skip
        try:
            yield
        finally:
            process.terminate()
            await process.wait()


def example(name: str, service: str) -> dict[str, Any]:
    """The HorizontalPodAutoscaler of an example, for a service of another name."""
    text = (EXAMPLES / name).read_text().replace("smollm2", service)
    example_manifest: dict[str, Any] = next(
        one for one in yaml.safe_load_all(text) if one["kind"] == "HorizontalPodAutoscaler"
    )
    return example_manifest


async def test_hpa_external_metric_scales_the_deployment(tmp_path: Path) -> None:
    program("kube-controller-manager")
    async with real_cluster(tmp_path) as cluster, client(cluster) as asking:
        inside = Inside(asking)
        service = Scaled(cluster, Listed(asking), inside, "chat")
        spec = {
            **SPEC,
            "prefill": {},
            "decode": {"scaling": SCALING},
            "autoscaling": {**SPEC["autoscaling"], "mode": "External"},
        }
        await cluster.put(spec, "chat")
        await service.settle()
        full = {
            "demand_answer": 900.0, "decode_generated": 300.0, "decode_usage": 0.8, "decode_mean_usage": 0.8,
            "decode_mean_running": 20.0, "decode_fullest": 0.8,
        }  # fmt: skip
        service.see(1, 1, in_flight=20.0, decode_token=0.01, **full)
        await service.look()
        assert service.gauge(metrics.AUTOSCALER_DESIRED.name, "decode") == [4]
        async with external_metrics(cluster, service), controllers(cluster):
            hpa = example("scaled-by-hpa.yaml", "chat")
            await cluster.api.post("/apis/autoscaling/v2/namespaces/models/horizontalpodautoscalers", hpa)

            async def followed() -> bool:
                return (await service.wanted("decode"))[0] == 4

            await until(followed)
            await service.settle()
            service.see(1, 4, in_flight=20.0, decode_token=0.01, **full)
            deployments = (await cluster.admin.get(path("apps/v1", "Deployment", "models"))).json()["items"]
            replicas = {
                one["metadata"]["labels"][labels.ROLE]: one["spec"]["replicas"] for one in deployments
            }
            assert replicas["decode"] == 4
            # 4 are requested and 4 exist: an HPA that took the number for a ratio would scale further.
            await service.look()

            async def steady() -> bool:
                where = "/apis/autoscaling/v2/namespaces/models/horizontalpodautoscalers"
                status = (await cluster.admin.get(where)).json()["items"][0]["status"]
                return (
                    json.dumps(status).count('"currentReplicas": 4') == 1 and status["desiredReplicas"] == 4
                )

            await until(steady)
            assert await followed()
