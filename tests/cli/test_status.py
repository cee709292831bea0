"""How services stand, by what a router or an API server says of them."""

from __future__ import annotations

from typing import Any

import pytest

from baton_api.workers import EngineKind
from baton_cli import status as report
from baton_cli.router_workers import reported_load
from baton_operator.manifests import objects

LOAD = {"running": 2, "queued": 0}
INFO = {"version": "1", "status": "ready", "models": [{"id": "tiny"}]}


def worker(role: str, state: str = "ready", reason: str | None = None) -> dict[str, Any]:
    named = {"worker": f"{role}:1", "role": role, "revision": None, "model": "tiny"}
    return {**named, "state": state, "reason": reason, "load": LOAD if state == "ready" else None}


def test_status_of_answering_router_is_well() -> None:
    status = report.status_of_router("http://r", INFO, [worker("prefill"), worker("decode")])
    assert status.well and status.name == "tiny" and status.url == "http://r/v1"
    assert [part.state for part in status.parts] == ["ready", "ready"]


@pytest.mark.parametrize(
    ("info", "workers", "serving", "words"),
    [
        (
            "ready",
            [worker("prefill", "down", "no answer"), worker("decode")],
            True,
            ["no answer", "No prefill"],
        ),
        ("ready", [worker("decode"), worker("decode", "ejected")], True, ["is ejected"]),
        ("No worker is ready.", [worker("decode", "down")], False, ["No worker is ready.", "is down"]),
        ("The router has no workers.", [], False, ["no workers"]),
    ],
)
def test_status_worker_trouble_has_a_remedy(
    info: str, workers: list[dict[str, Any]], serving: bool, words: list[str]
) -> None:
    status = report.status_of_router("http://r", {**INFO, "status": info}, workers)
    assert status.serving == serving and not status.well
    assert len(status.problems) == len(words)
    for problem in status.problems:
        assert any(one in problem.message for one in words), problem
        assert problem.remedy


def test_status_worker_without_a_pair_is_a_problem() -> None:
    decode = worker("decode") | {"warnings": ["it is part of no pair: block size 8"]}
    status = report.status_of_router("http://r", INFO, [worker("prefill"), decode])
    assert status.serving and not status.well
    (problem,) = status.problems
    assert problem.message == "The decode worker decode:1: it is part of no pair: block size 8."
    assert "block size 8" in status.parts[1].detail


def test_worker_is_called_as_in_its_log() -> None:
    rows = [worker("decode", "ready"), {**worker("prefill", "down", "no answer"), "name": "prefill-0"}]
    status = report.status_of_router("http://r", INFO, rows)
    assert [part.name for part in status.parts] == ["decode:1", "prefill-0 (prefill:1)"]
    assert any("The prefill worker prefill-0 (prefill:1) is down" in one.message for one in status.problems)


def condition(kind: str, status: str, reason: str, message: str = "") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def service(*conditions: dict[str, str], seen: int = 3, **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "chat", "namespace": "models", "generation": 3},
        "status": {"observedGeneration": seen, "conditions": list(conditions), **status},
    }


SERVING = condition("Ready", "True", "Serving", "Requests are answered.")
REVISIONS = [
    {"name": "1a2b3c4d", "phase": "Serving", "weight": 100, "prefillReady": 1, "decodeReady": 2},
    {"name": "5e6f7a8b", "phase": "Failed", "weight": 0, "failure": "no progress for 10m"},
]


def pod(reason: str, message: str = "") -> dict[str, Any]:
    waiting = {"state": {"waiting": {"reason": reason, "message": message}}}
    return {"metadata": {"name": "chat-0"}, "status": {"containerStatuses": [waiting]}}


def test_status_cluster_service_has_roles_and_revisions() -> None:
    status = report.status_of_service(
        service(
            SERVING, decode={"readyReplicas": 2, "desiredReplicas": 2}, revisions=REVISIONS, url="http://chat"
        ),
        [],
    )
    assert status.well and status.name == "models/chat"
    kinds = [(part.kind, part.state, part.well) for part in status.parts]
    assert ("role", "2 of 2 ready", True) in kinds
    assert ("revision", "Serving", True) in kinds and ("revision", "Failed", False) in kinds
    (failed,) = [part for part in status.parts if part.state == "Failed"]
    assert failed.detail.startswith("no progress for 10m; 0 % of requests")
    assert ("condition", "True", True) in kinds


TROUBLES: list[tuple[str, dict[str, Any], list[Any], list[str]]] = [
    ("nobody looked", service(seen=0), [], ["has reconciled generation 0 of 3"]),
    ("an older one was seen", service(SERVING, seen=2), [], ["has reconciled generation 2 of 3"]),
    (
        "no worker",
        service(condition("Ready", "False", "NoDecode"), condition("DecodeReady", "False", "NoneReady")),
        [],
        ["DecodeReady is False (NoneReady)"],
    ),
    (
        "rolled back",
        service(SERVING, condition("Degraded", "True", "RolledBack", "x.")),
        [],
        ["Degraded is True"],
    ),
    (
        "no room",
        service(SERVING, condition("ScalingLimited", "True", "Budget")),
        [],
        ["ScalingLimited is True"],
    ),
    ("no image", service(SERVING), [pod("ImagePullBackOff", "not found")], ["(ImagePullBackOff): not found"]),
    (
        "killed",
        service(SERVING),
        [
            {
                "metadata": {"name": "p"},
                "status": {
                    "containerStatuses": [
                        {"lastState": {"terminated": {"reason": "OOMKilled"}}, "restartCount": 4, "state": {}}
                    ]
                },
            }
        ],
        ["(OOMKilled): killed 4 times"],
    ),
    (
        "killed for the first time",
        service(SERVING),
        [
            {
                "metadata": {"name": "p"},
                "status": {
                    "containerStatuses": [
                        {"state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}, "restartCount": 0}
                    ]
                },
            }
        ],
        ["(OOMKilled): killed 1 times"],
    ),
    (
        "another image than the one that crashed",
        service(SERVING),
        [
            {
                "metadata": {"name": "p"},
                "status": {
                    "containerStatuses": [
                        {
                            "lastState": {"terminated": {"exitCode": 1, "message": "old"}},
                            "state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}},
                        }
                    ]
                },
            }
        ],
        ["(ImagePullBackOff): not found"],
    ),
    (
        "a long log",
        service(SERVING),
        [
            {
                "metadata": {"name": "p"},
                "status": {
                    "containerStatuses": [
                        {
                            "lastState": {"terminated": {"message": f"{'at ' * 200}ValueError: the cause"}},
                            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                        }
                    ]
                },
            }
        ],
        ["ValueError: the cause."],
    ),
    (
        "no node",
        service(SERVING),
        [
            {
                "metadata": {"name": "p"},
                "status": {
                    "conditions": [{"reason": "Unschedulable", "message": "0/1 nodes: no nvidia.com/gpu."}]
                },
            }
        ],
        ["(Unschedulable): 0/1 nodes"],
    ),
]


FETCHING: dict[str, Any] = {
    "name": "fetch",
    "lastState": {"terminated": {"exitCode": 2, "reason": "Error", "message": "The hub did not answer.\n"}},
    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting"}},
}
BETWEEN_STARTS: dict[str, Any] = {"name": "fetch", "state": FETCHING["lastState"]}


def initial(container: dict[str, Any], phase: str = "Pending", **metadata: str) -> dict[str, Any]:
    return {
        "metadata": {"name": "chat-0", **metadata},
        "status": {"phase": phase, "initContainerStatuses": [container]},
    }


@pytest.mark.parametrize(
    ("container", "reason", "flags"),
    [(FETCHING, "CrashLoopBackOff", " --previous"), (BETWEEN_STARTS, "Error", "")],
    ids=["waits", "has ended"],
)
def test_container_that_fails_is_named_with_its_last_words(
    container: dict[str, Any], reason: str, flags: str
) -> None:
    (problem,) = report.status_of_service(service(SERVING), [initial(container)]).problems
    assert problem.message == f"The pod chat-0 has a problem ({reason}): The hub did not answer."
    assert problem.remedy.endswith(f"kubectl -n models logs chat-0 -c fetch{flags}.")


def test_pods_that_others_replace_are_no_trouble() -> None:
    pods = [initial(FETCHING, deletionTimestamp="now"), initial(BETWEEN_STARTS, phase="Failed")]
    assert report.status_of_service(service(SERVING), pods).well


@pytest.mark.parametrize(
    "remedy", [report.LOOK, *report.CONDITION_REMEDIES.values(), *report.POD_REMEDIES.values()]
)
def test_command_of_a_remedy_has_the_namespace(remedy: str) -> None:
    """It is pasted where the namespace is another one."""
    assert remedy.count("kubectl ") == remedy.count("kubectl -n {namespace} ")


@pytest.mark.parametrize(
    ("given", "pods", "words"), [case[1:] for case in TROUBLES], ids=[c[0] for c in TROUBLES]
)
def test_status_cluster_trouble_has_a_remedy(
    given: dict[str, Any], pods: list[Any], words: list[str]
) -> None:
    status = report.status_of_service(given, pods)
    assert len(status.problems) == len(words), status.problems
    for problem, expected in zip(status.problems, words, strict=True):
        assert expected in problem.message and problem.remedy


@pytest.mark.parametrize("reason", ["Suspended", "ScaledToZero"])
def test_status_intended_state_is_no_trouble(reason: str) -> None:
    status = report.status_of_service(service(condition("Ready", "False", reason)), [])
    assert not status.problems and not status.serving
    assert report.status_of_service(service(condition("Ready", "True", "RollingOut")), []).well


def test_conditions_of_a_service_are_those_of_the_operator() -> None:
    """A condition that the operator adds is shown as good or bad, and not passed over."""
    of_other_kinds = {"UpToDate", "Active"}  # of a batch run and of an adapter
    assert objects.GOOD - of_other_kinds <= report.GOOD
    assert objects.BAD <= report.BAD


def of_engine(role: str, engine: EngineKind, **load: Any) -> dict[str, Any]:
    return {**worker(role), "load": {"engine": engine, **load}}


def test_load_of_worker_without_metrics_is_unknown() -> None:
    """The router reports such a load as zeros."""
    zeros = {"running": 0, "queued": 0, "total_blocks": 0, "free_blocks": 0}
    assert reported_load(of_engine("decode", EngineKind.OPENAI, **zeros)) is None
    assert reported_load(of_engine("decode", EngineKind.BATON, **zeros)) is not None


def test_status_names_engine_and_unknown_load() -> None:
    workers = [
        of_engine("decode", EngineKind.VLLM, version="0.32.0", total_blocks=10, running=2, queued=1),
        of_engine("both", EngineKind.OPENAI),
    ]
    status = report.status_of_router("http://router", INFO, workers)
    assert [part.detail for part in status.parts] == [
        "2 running, 1 queued; vllm 0.32.0",
        "load unknown; openai of unknown version",
    ]
