"""LoRA adapters: loaded into the running workers of a pair, again after a restart, and unloaded."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from baton_api import labels
from e2e.client import ask
from e2e.kubernetes import Kubernetes
from e2e.polling import until
from e2e.services import NAME, READY_S, tiny_service
from e2e.stopwatch import Stopwatch
from tests.engine.lora_adapters import make_adapter

ADAPTER = "pirate"
LOADED_S = 60
KNOWN_S = 10
"""Seconds in which a router sees what its workers have loaded: health checks come every 2 s."""
WORKERS = f"{labels.ROLE} in (prefill, decode)"

FORGOTTEN_S = 90
"""Seconds in which a router answers 404 for an adapter that no worker has any more: 503 in the first 60 s."""


@pytest.fixture(scope="module")
def served(cluster: Kubernetes, tmp_path_factory: pytest.TempPathFactory) -> Kubernetes:
    """A service whose workers mount an adapter's files."""
    model = tmp_path_factory.mktemp("model")
    manifest = tiny_service(cluster, model)
    adapter = make_adapter(tmp_path_factory.mktemp("adapter"), model, r=4)
    cluster.kubectl("create", "configmap", ADAPTER, f"--from-file={adapter}")
    spec = manifest["spec"]
    spec["engine"] = {**spec["engine"], "lora": {"maxAdapters": 1, "maxRank": 8}}
    for role in ("prefill", "decode"):
        pod = spec[role]["podTemplate"]["spec"]
        mount = {"name": ADAPTER, "mountPath": f"/{ADAPTER}", "readOnly": True}
        (main,) = pod["containers"]
        pod["containers"] = [{**main, "volumeMounts": [*main["volumeMounts"], mount]}]
        pod["volumes"] = [*pod["volumes"], {"name": ADAPTER, "configMap": {"name": ADAPTER}}]
    cluster.apply(manifest)
    cluster.wait(f"bsvc/{NAME}", "condition=Ready", READY_S)
    return cluster


def test_adapter_is_loaded_without_a_restart(served: Kubernetes) -> None:
    pods = _pods(served)
    watch = Stopwatch("an adapter")
    served.apply(
        {
            "apiVersion": "baton.dev/v1alpha1",
            "kind": "LoraAdapter",
            "metadata": {"name": ADAPTER},
            "spec": {"serviceName": NAME, "uri": f"file:///{ADAPTER}"},
        }
    )
    served.wait(f"loraadapter/{ADAPTER}", "condition=Active", LOADED_S)
    watch.note("applied -> loaded in all pods")
    with served.reach(NAME) as url:
        until("the router knows it", lambda: ADAPTER in _models(url), KNOWN_S)
        watch.note("-> known to the router")
        assert ask(url, ADAPTER) != ask(url, NAME)
    assert _pods(served) == pods


def test_new_pods_get_the_adapter(served: Kubernetes) -> None:
    with served.reach(NAME) as url:
        before = ask(url, ADAPTER)
        for role in ("prefill", "decode"):
            (pod,) = served.objects("pods", f"{labels.ROLE}={role}")
            served.kubectl("delete", "pod", pod["metadata"]["name"])
        watch = Stopwatch("an adapter")
        until("all pods have it", lambda: _loaded(served), READY_S)
        watch.note("pods deleted -> loaded in the new ones")
        until("the router knows it", lambda: ADAPTER in _models(url), KNOWN_S)
        assert ask(url, ADAPTER) == before


def test_deleted_adapter_is_unknown(served: Kubernetes) -> None:
    served.kubectl("delete", "loraadapter", ADAPTER, timeout_s=LOADED_S)
    with served.reach(NAME) as url:
        until("its name is unknown", lambda: not _is_known(url), FORGOTTEN_S)
        assert ask(url, NAME)


def _is_known(url: str) -> bool:
    try:
        ask(url, ADAPTER)
    except openai.NotFoundError:
        return False
    except openai.InternalServerError:  # it may be back soon, as after a restart of its workers
        pass
    return True


def _models(url: str) -> set[str]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        return {model.id for model in client.models.list()}


def _pods(cluster: Kubernetes) -> set[str]:
    return {pod["metadata"]["uid"] for pod in cluster.objects("pods", WORKERS)}


def _loaded(cluster: Kubernetes) -> bool:
    status: dict[str, Any] = cluster.object("loraadapter", ADAPTER)["status"]
    ready = {
        pod["metadata"]["name"]
        for pod in cluster.objects("pods", WORKERS)
        if "deletionTimestamp" not in pod["metadata"]
    }
    states = {pod["name"]: pod["state"] for pod in status["pods"]}
    return len(ready) == 2 and all(states.get(pod) == "Loaded" for pod in ready)
