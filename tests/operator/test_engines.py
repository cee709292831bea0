"""Pods of vLLM, SGLang and other engines: their commands, addresses and shutdown, and what is refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest

from baton_api import labels
from baton_api.workers import EngineKind
from baton_cli.options import options_of
from baton_operator.kinds.engine import EngineType
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.manifests.engines import ENGINES, checks, sglang, trtllm, vllm
from baton_operator.manifests.engines.container import flag_name, startup_s
from baton_operator.manifests.engines.spec import EngineSpec
from baton_operator.manifests.objects import Manifest, merged
from baton_operator.operator import engine_images
from baton_operator.settings import OperatorSettings
from tests.operator.fake_cluster import IMAGES, FakeCluster

VLLM: Manifest = {
    "engine": {"type": "vLLM", "image": "vllm/vllm-openai:v0.32.0"},
    "model": {"uri": "pvc://models/llama-3.1-8b", "name": "llama", "aliases": ["chat-model"]},
    "prefill": {},
    "decode": {},
}
SGLANG: Manifest = {
    **VLLM,
    "engine": {"type": "SGLang", "image": "lmsysorg/sglang:v0.5.23"},
    "model": {"uri": "pvc://models/qwen", "name": "qwen"},
}
TRTLLM: Manifest = {
    **SGLANG,
    "engine": {"type": "TensorRT-LLM", "image": "nvcr.io/nvidia/tensorrt-llm/release:1.3.0"},
}
CUSTOM: Manifest = {
    "engine": {"type": "Custom", "image": "llama.cpp:1", "args": ["-m", "$(BATON_MODEL)"]},
    "model": {"uri": "pvc://models/a.gguf"},
    "decode": {},
}


def settled(spec: Manifest, **over: Any) -> FakeCluster:
    """A cluster with this service, after all pods are ready."""
    cluster = FakeCluster(merged(spec, over))
    cluster.settle()
    assert cluster.condition("Ready")[0] == "True", cluster.message("Ready")
    return cluster


def pod(cluster: FakeCluster, role: str) -> Manifest:
    """The spec of the pods of a role."""
    (deployment,) = [
        one
        for (_, kind, _), one in cluster.objects.items()
        if kind == "Deployment" and one["metadata"]["labels"][labels.ROLE] == role
    ]
    spec: Manifest = deployment["spec"]["template"]["spec"]
    return spec


def main(cluster: FakeCluster, role: str) -> Manifest:
    (container,) = pod(cluster, role)["containers"]
    return dict(container)


def variables(container: Manifest) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


def flag(container: Manifest, name: str) -> str | None:
    """The value of `--name=value`."""
    values = [one.partition("=")[2] for one in container["args"] if one.startswith(f"{name}=")]
    return values[-1] if values else None


def events(container: Manifest) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(flag(container, "--kv-events-config") or "{}")
    return read


class TestVllm:
    @pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
    def test_worker_of_pair_moves_blocks_by_nixl(self, role: str, kv_role: str) -> None:
        container = main(settled(VLLM), role)
        assert json.loads(flag(container, "--kv-transfer-config") or "") == {
            "kv_connector": "NixlConnector",
            "kv_role": kv_role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kv_lease_duration": 30},
        }
        host, port = (variables(container)[one] for one in vllm.SIDE_CHANNEL_VARIABLES)
        assert (host, port) == ("$(POD_IP)", "5600")
        assert {"name": "side-channel", "containerPort": 5600} in container["ports"]
        assert container["env"][0]["name"] == "POD_IP", "Kubernetes replaces names that were set before only"

    def test_worker_alone_has_no_connector(self) -> None:
        spec = {name: value for name, value in VLLM.items() if name != "prefill"}
        container = main(settled(spec), "both")
        assert flag(container, "--kv-transfer-config") is None
        assert not {*vllm.SIDE_CHANNEL_VARIABLES} & variables(container).keys()
        assert events(container)["endpoint"] == "tcp://*:5557"

    def test_command_has_model_names_and_sizes(self) -> None:
        roles = {role: {"parallelism": {"tensor": 4, "pipeline": 2}} for role in ("prefill", "decode")}
        more = {"engine": {"maxModelLen": 4096, "dtype": "bfloat16", "kvCacheMemory": "4GiB"}}
        container = main(settled(merged(VLLM, roles), **more), "decode")
        assert container["command"] == ["vllm", "serve"]
        names = ["/models/llama-3.1-8b", "--served-model-name", "llama", "chat-model"]
        assert container["args"][:4] == names
        for name, value in {
            "--host": "0.0.0.0",
            "--port": "8000",
            "--dtype": "bfloat16",
            "--max-model-len": "4096",
            "--kv-cache-memory-bytes": str(4 * 2**30),
            "--tensor-parallel-size": "4",
            "--pipeline-parallel-size": "2",
        }.items():
            assert flag(container, name) == value

    def test_workers_load_adapters_only_with_lora(self) -> None:
        """On both sides of a pair: the prefill worker computes with the adapter, too."""
        flags = ["--enable-lora", "--max-loras=4", "--max-lora-rank=64"]
        cluster = settled(VLLM, engine={"lora": {"maxRank": 64}})
        for role in ("prefill", "decode"):
            container = main(cluster, role)
            assert [one for one in container["args"] if "lora" in one] == flags
            assert variables(container)[vllm.LORA_VARIABLE] == "1"
        container = main(settled(VLLM), "decode")
        assert not [one for one in container["args"] if "lora" in one]
        assert vllm.LORA_VARIABLE not in variables(container)

    def test_baton_workers_load_adapters_only_with_lora(self) -> None:
        baton = {"model": {"uri": "pvc://models/a"}, "prefill": {}, "decode": {}}
        cluster = settled(baton, engine={"lora": {"maxAdapters": 9}})
        for role in ("prefill", "decode"):
            args = main(cluster, role)["args"]
            assert args[-3:] == ["--enable-lora", "--max-loras=9", "--max-lora-rank=16"]
        assert not [one for one in main(settled(baton), "decode")["args"] if "lora" in one]

    def test_kv_events_are_published_and_replayed(self) -> None:
        container = main(settled(VLLM), "prefill")
        assert events(container) == {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": "tcp://*:5557",
            "replay_endpoint": "tcp://*:5558",
        }
        named = {one["name"]: one["containerPort"] for one in container["ports"]}
        assert (named["kv-events"], named["kv-replay"]) == (5557, 5558)

    def test_health_checks_stay_out_of_the_log(self) -> None:
        cluster = settled(VLLM)
        for role in ("prefill", "decode"):
            silent = flag(main(cluster, role), "--disable-access-log-for-endpoints")
            assert silent and set(silent.split(",")) == {"/health", "/metrics", "/v1/models"}

    def test_prefill_worker_keeps_blocks_for_their_lease(self) -> None:
        """Its shutdown covers its last requests and, after them, the lease of their blocks."""
        transfer = {"transfer": {"timeout": "45s"}}
        drain = {"drain": {"preStopDelay": "7s", "timeout": "1m"}}
        cluster = settled(VLLM, prefill=drain, decode=drain, **transfer)
        grace = {role: pod(cluster, role)["terminationGracePeriodSeconds"] for role in ("prefill", "decode")}
        assert flag(main(cluster, "prefill"), "--shutdown-timeout") == str(60 + 45)
        assert flag(main(cluster, "decode"), "--shutdown-timeout") == "60"
        assert grace == {"prefill": 7 + 60 + 45 + 15, "decode": 7 + 60 + 15}
        assert main(cluster, "prefill")["lifecycle"] == {"preStop": {"sleep": {"seconds": 7}}}

    def test_ports_differ_in_the_network_of_a_node(self) -> None:
        host = {"podTemplate": {"spec": {"hostNetwork": True}}}
        cluster = settled(VLLM, prefill=host, decode=host)
        taken = [
            one["containerPort"] for role in ("prefill", "decode") for one in main(cluster, role)["ports"]
        ]
        assert len(taken) == len(set(taken)) == 8
        prefill = main(cluster, "prefill")
        named = {one["name"]: one["containerPort"] for one in prefill["ports"]}
        assert variables(prefill)["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(named["side-channel"])
        assert events(prefill)["endpoint"] == f"tcp://*:{named['kv-events']}"


class TestSglang:
    def test_worker_of_pair_disaggregates_by_nixl(self) -> None:
        cluster = settled(SGLANG)
        for role in ("prefill", "decode"):
            container = main(cluster, role)
            assert container["command"] == ["python3", "-m", "sglang.launch_server"]
            for name, value in {
                "--model-path": "/models/qwen",
                "--served-model-name": "qwen",
                "--disaggregation-mode": role,
                "--disaggregation-transfer-backend": "nixl",
                "--disaggregation-bootstrap-port": "8998",
                "--tp-size": "1",
            }.items():
                assert flag(container, name) == value
            assert "--enable-metrics" in container["args"]
            assert variables(container)["SGLANG_HOST_IP"] == "$(POD_IP)"
        bootstrap = {"name": "bootstrap", "containerPort": 8998}
        assert bootstrap in main(cluster, "prefill")["ports"]
        assert bootstrap not in main(cluster, "decode")["ports"]

    def test_worker_alone_does_not_disaggregate(self) -> None:
        spec = {name: value for name, value in SGLANG.items() if name != "prefill"}
        container = main(settled(spec, engine={"maxModelLen": 4096}), "both")
        assert flag(container, "--disaggregation-mode") is None
        assert flag(container, "--context-length") == "4096"


MEMORY: Manifest = {"type": "Memory", "size": "64Gi"}
DISK: Manifest = {"type": "Disk", "size": "500Gi"}
CLAIM: Manifest = {**DISK, "volume": {"persistentVolumeClaim": {"claimName": "kv"}}}


def with_tiers(spec: Manifest, *tiers: Manifest) -> Manifest:
    return merged(spec, {"engine": {"kvCacheTiers": list(tiers)}})


BATON: Manifest = {"model": {"uri": "builtin://smollm2"}, "prefill": {}, "decode": {}}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_tier_of_baton_workers_is_a_flag(role: str) -> None:
    assert flag(main(settled(with_tiers(BATON, MEMORY)), role), "--kv-memory-tier") == str(64 * 2**30)
    assert flag(main(settled(BATON), role), "--kv-memory-tier") is None


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_disk_of_baton_workers_is_a_volume_of_each_pod(role: str) -> None:
    """A folder below the mount: the root of a file system may have others, such as lost+found."""
    cluster = settled(with_tiers(BATON, MEMORY, {**DISK, "volume": {"emptyDir": {}}}))
    container = main(cluster, role)
    assert flag(container, "--kv-disk-tier") == "/kv-tier/blocks"
    assert flag(container, "--kv-disk-tier-size") == str(500 * 2**30)
    assert named(container["volumeMounts"], "kv-tier") == {"name": "kv-tier", "mountPath": "/kv-tier"}
    assert named(pod(cluster, role)["volumes"], "kv-tier") == {"name": "kv-tier", "emptyDir": {}}
    claim = named(pod(settled(with_tiers(BATON, MEMORY, DISK)), role)["volumes"], "kv-tier")
    assert claim is not None and "ephemeral" in claim
    without = main(settled(with_tiers(BATON, MEMORY)), role)
    assert flag(without, "--kv-disk-tier") is None and named(without["volumeMounts"], "kv-tier") is None


STORE: Manifest = {"type": "SharedStore", "size": "1Ti"}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_shared_store_of_baton_workers_is_a_url_or_a_volume_of_all_pods(role: str) -> None:
    container = main(settled(with_tiers(BATON, MEMORY, {**STORE, "url": "s3://kv/a"})), role)
    assert flag(container, "--kv-shared-store") == "s3://kv/a"
    assert flag(container, "--kv-shared-store-size") == str(2**40)
    assert named(container["volumeMounts"], "kv-shared") is None
    claim: Manifest = {"persistentVolumeClaim": {"claimName": "kv"}}
    disk = {**DISK, "volume": {"emptyDir": {}}}
    cluster = settled(with_tiers(BATON, MEMORY, disk, {**STORE, "volume": claim}))
    container = main(cluster, role)
    assert flag(container, "--kv-shared-store") == "file:///kv-shared/blocks"
    assert named(container["volumeMounts"], "kv-shared") == {"name": "kv-shared", "mountPath": "/kv-shared"}
    assert named(pod(cluster, role)["volumes"], "kv-shared") == {"name": "kv-shared", **claim}
    assert flag(container, "--kv-disk-tier") == "/kv-tier/blocks"


def named(parts: list[Manifest], name: str) -> Manifest | None:
    return next((dict(one) for one in parts if one["name"] == name), None)


class TestTiersOfVllm:
    @pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
    def test_worker_of_pair_moves_blocks_and_keeps_them(self, role: str, kv_role: str) -> None:
        container = main(settled(with_tiers(VLLM, MEMORY)), role)
        assert json.loads(flag(container, "--kv-transfer-config") or "") == {
            "kv_connector": "MultiConnector",
            "kv_role": kv_role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "connectors": [
                    {
                        "kv_connector": "NixlConnector",
                        "kv_role": kv_role,
                        "kv_connector_extra_config": {"kv_lease_duration": 30},
                    },
                    {
                        "kv_connector": "OffloadingConnector",
                        "kv_role": "kv_both",
                        "kv_connector_extra_config": {
                            "spec_name": "TieringOffloadingSpec",
                            "cpu_bytes_to_use": 64 * 2**30,
                            "self_describing_kv_events": True,
                        },
                    },
                ]
            },
        }
        assert variables(container)["PYTHONHASHSEED"] == "0"
        assert events(container)["enable_kv_cache_events"] is True

    def test_worker_alone_keeps_blocks(self) -> None:
        spec = {name: value for name, value in VLLM.items() if name != "prefill"}
        container = main(settled(with_tiers(spec, MEMORY)), "both")
        config = json.loads(flag(container, "--kv-transfer-config") or "")
        assert config["kv_connector"] == "OffloadingConnector"
        assert config["kv_load_failure_policy"] == "recompute"
        assert not {*vllm.SIDE_CHANNEL_VARIABLES} & variables(container).keys()

    @pytest.mark.parametrize(
        ("disk", "locality"),
        [
            (DISK, "LOCAL"),
            (CLAIM, "REMOTE"),
            ({**DISK, "volume": {"nfs": {"server": "a", "path": "/"}}}, "REMOTE"),
            ({**DISK, "volume": {"hostPath": {"path": "/mnt"}}}, "LOCAL"),
        ],
    )
    def test_disk_is_shared_if_all_pods_have_the_same_volume(self, disk: Manifest, locality: str) -> None:
        cluster = settled(with_tiers(VLLM, MEMORY, disk))
        for role in ("prefill", "decode"):
            config = json.loads(flag(main(cluster, role), "--kv-transfer-config") or "")
            offloading = config["kv_connector_extra_config"]["connectors"][1]
            assert offloading["kv_connector_extra_config"]["secondary_tiers"] == [
                {"type": "fs", "root_dir": "/kv-tier", "enable_kv_events": True, "locality": locality}
            ]
            volume = named(pod(cluster, role)["volumes"], "kv-tier")
            claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "500Gi"}}}
            own = {"ephemeral": {"volumeClaimTemplate": {"spec": claim}}}
            assert volume == {"name": "kv-tier", **disk.get("volume", own)}
            mount = named(main(cluster, role)["volumeMounts"], "kv-tier")
            assert mount == {"name": "kv-tier", "mountPath": "/kv-tier"}

    def test_shared_memory_has_room_for_the_tier(self) -> None:
        """vLLM keeps it in a file in /dev/shm, beside what NIXL and the ranks have there."""
        for tiers, size in ([], "1Gi"), ([MEMORY], str(65 * 2**30)):
            volume = named(pod(settled(with_tiers(VLLM, *tiers)), "decode")["volumes"], "shm")
            assert volume is not None and volume["emptyDir"] == {"medium": "Memory", "sizeLimit": size}

    def test_worker_without_tiers_has_none_of_it(self) -> None:
        container = main(settled(VLLM), "decode")
        assert "PYTHONHASHSEED" not in variables(container)
        assert named(container["volumeMounts"], "kv-tier") is None


class TestTiersOfSglang:
    def test_prefill_worker_has_a_hierarchical_cache(self) -> None:
        """Each rank has its part; a decode worker of a pair has no prefix cache."""
        roles = {"prefill": {"parallelism": {"tensor": 4}}, "decode": {"parallelism": {"tensor": 4}}}
        cluster = settled(with_tiers(merged(SGLANG, roles), MEMORY, DISK))
        container = main(cluster, "prefill")
        assert "--enable-hierarchical-cache" in container["args"]
        assert flag(container, "--hicache-size") == str(64 * 2**30 // 4 // 10**9)
        assert flag(container, "--hicache-storage-backend") == "file"
        folder, size = (variables(container)[name] for name in sglang.DISK_VARIABLES)
        assert (folder, size) == ("/kv-tier", str(125 * 2**30))
        assert named(container["volumeMounts"], "kv-tier") is not None
        decode = main(cluster, "decode")
        assert not [one for one in decode["args"] if "cache" in one]
        assert named(decode["volumeMounts"], "kv-tier") is None
        assert named(pod(cluster, "decode")["volumes"], "kv-tier") is None

    def test_worker_alone_has_a_hierarchical_cache(self) -> None:
        spec = {name: value for name, value in SGLANG.items() if name != "prefill"}
        container = main(settled(with_tiers(spec, MEMORY)), "both")
        assert flag(container, "--hicache-size") == "68"
        assert flag(container, "--hicache-storage-backend") is None


@pytest.mark.parametrize(
    ("spec", "arg"), [(VLLM, "--data-parallel-size=2"), (SGLANG, "--dp-size=2")], ids=["vLLM", "SGLang"]
)
def test_data_parallel_ranks_publish_no_kv_events(spec: Manifest, arg: str) -> None:
    """The ranks of one pod would need the ports after 5557, of which 5558 is that of the replay."""
    cluster = settled(spec, decode={"args": [arg]})
    has_events = {
        role: any("--kv-events-config" in one for one in main(cluster, role)["args"])
        for role in ("prefill", "decode")
    }
    assert has_events == {"prefill": True, "decode": False}


def test_custom_engine_gets_model_port_and_name_as_variables() -> None:
    container = main(settled(CUSTOM), "both")
    assert "command" not in container
    assert container["args"] == ["-m", "$(BATON_MODEL)"]
    got = variables(container)
    expected = {"BATON_MODEL": "/models/a.gguf", "BATON_PORT": "8000", "BATON_SERVED_NAME": "chat"}
    assert {name: got[name] for name in expected} == expected


@pytest.mark.parametrize("spec", [VLLM, SGLANG, CUSTOM], ids=["vLLM", "SGLang", "Custom"])
def test_probes_ask_for_health(spec: Manifest) -> None:
    container = main(settled(spec), "decode" if "prefill" in spec else "both")
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["httpGet"] == {"path": "/health", "port": "http"}


@pytest.mark.parametrize("spec", [VLLM, SGLANG], ids=["vLLM", "SGLang"])
def test_arguments_of_the_user_come_last(spec: Manifest) -> None:
    over = {"engine": {"args": ["--max-num-seqs", "256"]}, "decode": {"args": ["--seed=1"]}}
    assert main(settled(merged(spec, over)), "decode")["args"][-3:] == ["--max-num-seqs", "256", "--seed=1"]


@pytest.mark.parametrize(
    ("spec", "engine"),
    [
        pytest.param(VLLM, EngineKind.VLLM, id="vLLM"),
        pytest.param(SGLANG, EngineKind.SGLANG, id="SGLang"),
        pytest.param(CUSTOM, EngineKind.OPENAI, id="Custom"),
        pytest.param(TRTLLM, EngineKind.TRTLLM, id="TensorRT-LLM"),
        pytest.param({"model": {"uri": "builtin://smollm2"}, "decode": {}}, None, id="Baton"),
    ],
)
def test_services_tell_routers_the_engine(spec: Manifest, engine: EngineKind | None) -> None:
    services = [one for (_, kind, _), one in settled(spec).objects.items() if kind == "Service"]
    of_workers = [one for one in services if one["metadata"]["labels"][labels.ROLE] != "router"]
    assert of_workers
    assert {one["metadata"]["labels"].get(labels.ENGINE) for one in of_workers} == {engine}


class TestTrtllm:
    @pytest.mark.parametrize("role", ["prefill", "decode"])
    def test_worker_of_pair_has_a_cache_transceiver(self, role: str) -> None:
        more = {"engine": {"dtype": "bfloat16", "maxModelLen": 4096}, "transfer": {"timeout": "7s"}}
        container = main(settled(TRTLLM, **more), role)
        options = json.loads(variables(container)[trtllm.OPTIONS])
        assert options.pop("disable_overlap_scheduler", False) is (role == "prefill")
        assert options == {
            "return_perf_metrics": True,
            "dtype": "bfloat16",
            "cache_transceiver_config": {
                "backend": "NIXL",
                "kv_transfer_timeout_ms": 7000,
                "max_tokens_in_buffer": 4096,
            },
        }
        assert flag(container, "--max_seq_len") == "4096"

    def test_worker_alone_has_no_transceiver(self) -> None:
        spec = {name: value for name, value in TRTLLM.items() if name != "prefill"}
        container = main(settled(spec), "both")
        assert json.loads(variables(container)[trtllm.OPTIONS]) == {"return_perf_metrics": True}

    def test_script_writes_the_options_and_starts_the_server(self, tmp_path: Path) -> None:
        """Of the container's command a shell makes the server's arguments, whatever characters they have."""
        sizes = {"decode": {"parallelism": {"tensor": 4, "pipeline": 2}}}
        odd = {"engine": {"args": ["--chat_template", 'a b\'$(x) "c"']}}
        container = main(settled(merged(TRTLLM, sizes), **odd), "decode")
        server = tmp_path / "trtllm-serve"
        server.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/arguments\n')
        server.chmod(0o755)
        script = [one.replace(trtllm.FILE, f"{tmp_path}/options") for one in container["command"]]
        environment = {**variables(container), "PATH": f"{tmp_path}:/usr/bin:/bin"}
        subprocess.run([*script, *container["args"]], env=environment, check=True)
        assert (tmp_path / "options").read_text() == variables(container)[trtllm.OPTIONS]
        given = (tmp_path / "arguments").read_text().splitlines()
        assert given == container["args"]
        assert given[0] == "serve" and {"--tp_size=4", "--pp_size=2"} <= set(given)
        assert given[-2:] == odd["engine"]["args"]

    def test_options_may_be_replaced(self) -> None:
        own = [{"name": trtllm.OPTIONS, "value": "{}"}]
        container = main(settled(TRTLLM, engine={"env": own}), "decode")
        assert [one["value"] for one in container["env"] if one["name"] == trtllm.OPTIONS] == ["{}"]


def test_engines_have_one_spec_each() -> None:
    assert set(ENGINES) == set(get_args(EngineType))
    assert {spec.kind for spec in ENGINES.values()} == set(EngineKind)
    assert len({spec.container for spec in ENGINES.values()}) == len(ENGINES)


@pytest.mark.parametrize("spec", ENGINES.values(), ids=list(ENGINES))
def test_law_flags_of_specs_are_as_arguments_are_read(spec: EngineSpec) -> None:
    """A flag in another form would never be found in `args`."""
    flags = [*spec.owned_flags, *spec.layout_flags, *([spec.slots.flag] if spec.slots else [])]
    assert [flag_name(flag) for flag in flags] == flags


class TestModelFiles:
    def test_router_image_fetches_the_model(self) -> None:
        model = {"uri": "hf://org/name", "cache": {"type": "PVC", "size": "20Gi"}}
        cluster = settled({**VLLM, "model": model})
        (job,) = [one for (_, kind, _), one in cluster.objects.items() if kind == "Job"]
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert container["image"] == IMAGES.router
        assert main(cluster, "prefill")["args"][0] == container["args"][2]

    def test_pods_without_cache_fetch_it_by_the_same_image(self) -> None:
        cluster = settled({**SGLANG, "model": {"uri": "hf://org/name"}})
        (fetch,) = pod(cluster, "prefill")["initContainers"]
        assert fetch["image"] == IMAGES.router
        assert flag(main(cluster, "prefill"), "--model-path") == fetch["args"][2]


@pytest.mark.parametrize(
    ("change", "rolls"),
    [
        pytest.param({"engine": {"image": "vllm/vllm-openai:v0.33.0"}}, True, id="image"),
        pytest.param({"engine": {"args": ["--seed=1"]}}, True, id="args"),
        pytest.param({"engine": {"kvCacheTiers": [MEMORY]}}, True, id="tiers"),
        pytest.param({"engine": {"kvCacheTiers": []}}, False, id="no tiers"),
        pytest.param({"engine": {"env": [{"name": "A", "value": "b"}]}}, True, id="env"),
        pytest.param({"decode": {"parallelism": {"tensor": 2}}}, True, id="parallelism"),
        pytest.param({"decode": {"replicas": 3}}, False, id="replicas"),
    ],
)
def test_revision_changes_with_the_engine(change: Manifest, rolls: bool) -> None:
    cluster = settled(VLLM)
    before = cluster.service["status"]["currentRevision"]
    cluster.change(merged(VLLM, change))
    cluster.settle()
    assert (cluster.service["status"]["currentRevision"] != before) is rolls


def test_change_of_engine_rolls_out_pairs_and_rolls_back() -> None:
    """A revision of Baton workers, then one of vLLM that fails: the first one serves again."""
    own = {"model": {"uri": "pvc://models/qwen"}, "prefill": {}, "decode": {}}
    cluster = settled(own)
    first = cluster.service["status"]["currentRevision"]
    cluster.change({**own, "engine": VLLM["engine"]})
    cluster.reconcile()
    second = cluster.service["status"]["updateRevision"]
    assert second != first
    cluster.broken.add(second)
    cluster.settle()
    assert cluster.service["status"]["currentRevision"] == first
    assert cluster.condition("Degraded") == ("True", "RolledBack")


FOUR: Manifest = {"limits": {"nvidia.com/gpu": 4}}
GPUS: Manifest = {"resources": {"limits": {"nvidia.com/gpu": 6}}, "parallelism": {"tensor": 4}}
ENV = [{"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": "1"}]
OFFLOADING = ["spec.engine.args", "--kv-offloading-", "no pairs", "spec.engine.kvCacheTiers"]
REFUSED = [
    pytest.param(VLLM, {"engine": {"args": ["--port=9000"]}}, ["spec.engine.args", "--port"], id="port"),
    pytest.param(
        VLLM, {"engine": {"args": ["--served-model-name", "x"]}}, ["--served-model-name", "spec.model.name"],
        id="name",
    ),
    pytest.param(
        VLLM, {"decode": {"args": ["--kv_transfer_config.kv_role=kv_both"]}},
        ["spec.decode.args", "--kv-transfer-config"], id="underscores and dots",
    ),
    pytest.param(
        SGLANG, {"engine": {"args": ["--disaggregation-boot", "1"]}},
        ["--disaggregation-boot", "--disaggregation-bootstrap-port"], id="the beginning of a flag",
    ),
    pytest.param(SGLANG, {"engine": {"args": ["--tp", "8"]}}, ["--tp", "parallelism.tensor"], id="--tp"),
    pytest.param(
        VLLM, {"engine": {"args": ["--max-lora-rank", "64"]}},
        ["--max-lora-rank", "spec.engine.lora"], id="lora",
    ),
    pytest.param(VLLM, {"engine": {"args": ["-tp=8"]}}, ["-tp", "parallelism.tensor"], id="-tp"),
    pytest.param(VLLM, {"engine": {"env": ENV}}, ["spec.engine.env", ENV[0]["name"]], id="side channel"),
    pytest.param(VLLM, {"transfer": {"env": ENV}}, ["spec.transfer.env", ENV[0]["name"]], id="transfer.env"),
    pytest.param(VLLM, {"decode": GPUS}, ["(4 x 1) uses 4", "resources.limits has 6"], id="accelerators"),
    pytest.param(
        VLLM, {"decode": {"parallelism": {"tensor": 6, "nodes": 4}}}, ["is 6", "4 nodes"], id="nodes"
    ),
    pytest.param(
        VLLM,
        {"decode": {"resources": FOUR, "parallelism": {"tensor": 16, "nodes": 2}}},
        ["16 accelerators on 2 nodes, 8 on each", "resources.limits has 4"], id="accelerators of each node",
    ),
    pytest.param(
        VLLM, {"prefill": {"parallelism": {"tensor": 4}}, "decode": {"parallelism": {"tensor": 6}}},
        ["spec.prefill.parallelism.tensor is 4", "spec.decode.parallelism.tensor is 6"], id="tensor sizes",
    ),
    pytest.param(
        VLLM, {"prefill": {"args": ["--block-size", "16"]}, "decode": {"args": ["--block_size=32"]}},
        ["Prefill workers", "--block-size 16", "decode workers", "--block-size 32", "spec.engine.args"],
        id="block sizes",
    ),
    pytest.param(
        VLLM, {"engine": {"args": ["--kv-cache-dtype=fp8"]}, "decode": {"args": ["--kv-cache-dtype=auto"]}},
        ["--kv-cache-dtype fp8", "--kv-cache-dtype auto"], id="data types, one of the engine",
    ),
    pytest.param(
        SGLANG, {"prefill": {"args": ["--kv-cache-dtype", "fp8_e5m2"]}},
        ["--kv-cache-dtype fp8_e5m2", "--kv-cache-dtype auto"], id="data type of one role",
    ),
    pytest.param(
        SGLANG, {"prefill": {"args": ["--page-size=1"]}, "decode": {"args": ["--page-size=64"]}},
        ["--page-size 1", "--page-size 64"], id="page sizes",
    ),
    pytest.param(VLLM, {"engine": {"args": ["--kv-offloading-size", "64"]}}, OFFLOADING, id="offloading"),
    pytest.param(
        VLLM, {"decode": {"args": ["--kv_offloading_backend=native"]}},
        ["spec.decode.args", *OFFLOADING[1:]], id="offloading in one role",
    ),
    pytest.param(
        VLLM, {"prefill": None, "engine": {"kvCacheTiers": [MEMORY], "args": ["--kv-offloading-size=64"]}},
        OFFLOADING, id="offloading beside tiers",
    ),
    pytest.param(
        VLLM, {"engine": {"kvCacheTiers": [MEMORY]}, "decode": {"resources": {"limits": {"memory": "65Gi"}}}},
        ["spec.decode.resources.limits.memory is 65Gi", "kvCacheTiers", "sharedMemorySize", "65.0Gi"],
        id="a limit of memory without room for the tier",
    ),
    pytest.param(
        VLLM, {"engine": {"kvCacheTiers": [MEMORY]}, "decode": {"env": [{"name": "PYTHONHASHSEED"}]}},
        ["spec.decode.env", "PYTHONHASHSEED", "spec.engine.env"], id="hash seed of one role",
    ),
    pytest.param(
        VLLM, {"engine": {"kvCacheTiers": [{"type": "Memory", "size": "0"}]}},
        ["kvCacheTiers", "size 0", "64Gi"], id="tier of size 0",
    ),
    pytest.param(
        with_tiers(SGLANG, {"type": "Memory", "size": "40G"}),
        {"prefill": {"parallelism": {"tensor": 64}}, "decode": {"parallelism": {"tensor": 64}}},
        ["40000000000 bytes", "64 ranks of spec.prefill", "64G"], id="less than a GB for each rank",
    ),
    pytest.param(
        SGLANG, {"engine": {"kvCacheTiers": [MEMORY], "args": ["--hicache-ratio", "2"]}},
        ["spec.engine.args", "--hicache-ratio", "spec.engine.kvCacheTiers"], id="tier by a flag, too",
    ),
    pytest.param(
        with_tiers(BATON, MEMORY), {"decode": {"resources": {"limits": {"memory": "64Gi"}}}},
        ["spec.decode.resources.limits.memory is 64Gi", "kvCacheTiers"], id="no room for a tier of Baton",
    ),
    pytest.param(
        with_tiers(BATON, MEMORY), {"prefill": {"parallelism": {"tensor": 2}}},
        ["spec.prefill.parallelism.tensor is 2", "kvCacheTiers"], id="a tier of Baton with ranks",
    ),
    pytest.param(
        BATON, {"engine": {"kvCacheTiers": [MEMORY, CLAIM]}},
        ["spec.engine.kvCacheTiers", "pods share", "emptyDir"], id="one disk of all Baton workers",
    ),
    pytest.param(
        BATON, {"engine": {"kvCacheTiers": [MEMORY, {**STORE, "volume": {"emptyDir": {}}}]}},
        ["SharedStore", "volume that pods do not share", "ReadWriteMany", "url"],
        id="shared store of one pod",
    ),
    pytest.param(
        BATON,
        {"engine": {"kvCacheTiers": [
            MEMORY, {**STORE, "volume": {"persistentVolumeClaim": {"claimName": "kv", "readOnly": True}}},
        ]}},
        ["SharedStore", "readOnly", "workers write"], id="shared store that is read only",
    ),
    pytest.param(
        BATON, {"engine": {"kvCacheTiers": [MEMORY, {**DISK, "volume": {"hostPath": {"path": "/mnt"}}}]}},
        ["spec.engine.kvCacheTiers", "pods share", "emptyDir"], id="one disk of the Baton workers of a node",
    ),
    pytest.param(VLLM, {"engine": {"image": None}}, ["spec.engine.image", "--vllm-image"], id="image"),
    pytest.param(CUSTOM, {"engine": {"image": None}}, ["Custom", "spec.engine.image"], id="custom image"),
    pytest.param(
        TRTLLM, {"engine": {"args": ["--extra_llm_api_options", "/x"]}},
        ["spec.engine.args", "--extra-llm-api-options", trtllm.OPTIONS], id="options of TensorRT-LLM",
    ),
    pytest.param(
        TRTLLM, {"decode": {"args": ["--tp_size=2"]}},
        ["spec.decode.args", "--tp-size", "parallelism.tensor"], id="size of TensorRT-LLM",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "change", "words"), REFUSED)
def test_contradiction_is_refused_and_names_both(spec: Manifest, change: Manifest, words: list[str]) -> None:
    cluster = settled(spec)
    wanted = InferenceServiceSpec.model_validate(merged(spec, change))
    with pytest.raises(ValueError) as refused:
        checks.check("chat", wanted, "")
    assert all(word in str(refused.value) for word in words), str(refused.value)
    cluster.change(merged(spec, change))
    with pytest.raises(ValueError, match="spec"):
        cluster.plan()


@pytest.mark.parametrize(
    ("spec", "change"),
    [
        pytest.param(VLLM, {"engine": {"args": ["--max-num-seqs", "256", "-O3"]}}, id="own flags"),
        pytest.param(VLLM, {"engine": {"args": ["--max-model-len=4096"]}}, id="a flag that only args have"),
        pytest.param(SGLANG, {"engine": {"args": ["--enable-lora"]}}, id="own flags of SGLang"),
        pytest.param(
            SGLANG, {"engine": {"args": ["--enable-hierarchical-cache"]}}, id="tier by a flag alone"
        ),
        pytest.param(
            VLLM, {"prefill": None, "engine": {"args": ["--kv-offloading-size=64"]}}, id="offloading alone"
        ),
        pytest.param(
            VLLM,
            {"engine": {"kvCacheTiers": [MEMORY]}, "decode": {"resources": {"limits": {"memory": "96Gi"}}}},
            id="a limit of memory with room for the tier",
        ),
        pytest.param(
            SGLANG,
            {"engine": {"kvCacheTiers": [MEMORY]}, "decode": {"resources": {"limits": {"memory": "8Gi"}}}},
            id="a decode worker of SGLang has no tier",
        ),
        pytest.param(
            VLLM,
            {"engine": {"kvCacheTiers": [MEMORY], "env": [{"name": "PYTHONHASHSEED", "value": "7"}]}},
            id="one hash seed of the user",
        ),
        pytest.param(CUSTOM, {"engine": {"args": ["--port", "8000"]}}, id="any flag of a custom engine"),
        pytest.param(VLLM, {"engine": {"args": ["--block-size", "32"]}}, id="one block size for both roles"),
        pytest.param(
            VLLM, {"decode": {"args": ["--block-size=16"]}}, id="perhaps the default of the other role"
        ),
        pytest.param(
            VLLM,
            {
                "engine": {"args": ["--block-size=32"]},
                "decode": {"args": ["--block-size=16", "--block-size=32"]},
            },
            id="the last block size wins",
        ),
        pytest.param(
            VLLM,
            {"prefill": {"parallelism": {"tensor": 2}}, "decode": {"parallelism": {"tensor": 8}}},
            id="tensor sizes of which one divides the other",
        ),
        pytest.param(
            VLLM,
            {"decode": {"resources": {"limits": {"nvidia.com/gpu": 8}}, "parallelism": {"tensor": 4}}},
            id="data parallel",
        ),
    ],
)
def test_check_without_contradiction_passes(spec: Manifest, change: Manifest) -> None:
    checks.check("chat", InferenceServiceSpec.model_validate(merged(spec, change)), "")


def test_image_flag_of_every_engine_reaches_its_workers() -> None:
    flags = {engine: spec.image_flag for engine, spec in ENGINES.items() if spec.image_flag}
    assert {"vLLM", "SGLang"} <= flags.keys()
    options = {option.flag: option.field for option in options_of(OperatorSettings)}
    settings = OperatorSettings.model_validate({options[flag]: f"mirror{flag}:1" for flag in flags.values()})
    assert engine_images(settings) == {engine: f"mirror{flag}:1" for engine, flag in flags.items()}


def test_default_image_of_the_operator_is_used_and_kept() -> None:
    cluster = FakeCluster(merged(VLLM, {"engine": {"image": None}}))
    cluster.images = type(IMAGES)(IMAGES.worker, IMAGES.router, engines={"vLLM": "mirror/vllm:1"})
    cluster.settle()
    assert main(cluster, "decode")["image"] == "mirror/vllm:1"
    before = cluster.service["status"]["currentRevision"]
    cluster.images = type(IMAGES)(IMAGES.worker, IMAGES.router, engines={"vLLM": "mirror/vllm:2"})
    cluster.settle()
    assert main(cluster, "decode")["image"] == "mirror/vllm:1"
    assert cluster.service["status"]["currentRevision"] == before


@pytest.mark.parametrize(
    ("uri", "role", "seconds"),
    [
        pytest.param("hf://meta-llama/Llama-3.1-8B-Instruct", {}, 1800, id="small: the default"),
        pytest.param("hf://meta-llama/Llama-3.1-405B-Instruct", {}, 600 + 8 * 405, id="by its name"),
        pytest.param("hf://mistralai/Mixtral-8x22B-v0.1", {}, 600 + 8 * 176, id="experts"),
        pytest.param("hf://Qwen/Qwen3-235B-A22B", {}, 600 + 8 * 235, id="active parameters are fewer"),
        pytest.param(
            "hf://deepseek-ai/DeepSeek-V3",
            {"parallelism": {"tensor": 16}},
            600 + 8 * 640,
            id="by accelerators",
        ),
        pytest.param("hf://a/Llama-405B", {"startupTimeout": "20m"}, 1200, id="as the spec says"),
    ],
)
def test_startup_time_grows_with_the_model(uri: str, role: Manifest, seconds: int) -> None:
    spec = InferenceServiceSpec.model_validate({**VLLM, "model": {"uri": uri}, "decode": role})
    assert startup_s(spec.model, spec.decode) == seconds
