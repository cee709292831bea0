"""Work of each pod, and the status of an adapter: tables, then a law by chance."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from baton_operator.adapters.decision import (
    Adapter,
    AdapterPod,
    FilesNotReachable,
    Mount,
    PodWork,
    WorkerTemplate,
    decide,
)
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.lora_adapter import LoraAdapterSpec
from baton_operator.reconcilers import lora_adapters as reports
from baton_operator.reconcilers.lora_adapters import AdapterReport, report

SPEC: dict[str, Any] = {
    "model": {"uri": "pvc://models/tiny"},
    "engine": {"type": "vLLM", "image": "vllm:1", "lora": {"maxAdapters": 2, "maxRank": 16}},
    "prefill": {},
    "decode": {},
}
TEMPLATE = WorkerTemplate(max_rank=16, mounts=(Mount("models", "/models"),))
PATH = "/models/pirate"
NOW = 1_000_000.0


def spec_of(**changes: Any) -> InferenceServiceSpec:
    return InferenceServiceSpec.model_validate({**SPEC, **changes})


def adapter(
    name: str = "pirate",
    uri: str = "pvc://models/pirate",
    more: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Adapter:
    spec = LoraAdapterSpec.model_validate({"serviceName": "chat", "uri": uri, **(more or {})})
    return Adapter(name, spec, **fields)


def pod(
    name: str = "decode-0",
    models: Mapping[str, str] | None = None,
    template: WorkerTemplate = TEMPLATE,
    **fields: Any,
) -> AdapterPod:
    values = {"role": name.partition("-")[0], "ready": True, "key": name, "models": models or {}, **fields}
    return AdapterPod(name, template=template, **values)


def work_of(
    adapters: Sequence[Adapter], pods: Sequence[AdapterPod], spec: InferenceServiceSpec | None = None
) -> Mapping[str, PodWork]:
    return decide("chat", spec or spec_of(), adapters, pods).work


OURS: dict[str, Any] = {"names": ("pirate",)}
HAS = {"pirate": PATH}


@pytest.mark.parametrize(
    ("adapters", "listed", "work"),
    [
        pytest.param([adapter()], {}, PodWork((), (("pirate", PATH),)), id="missing: load"),
        pytest.param([adapter(**OURS)], {"pirate": PATH}, None, id="present: nothing"),
        pytest.param(
            [adapter(uri="file:///new", **OURS)],
            {"pirate": PATH},
            PodWork(("pirate",), (("pirate", "/new"),)),
            id="uri changed: unload, load",
        ),
        pytest.param(
            [adapter(more={"name": "captain"}, **OURS)],
            {"pirate": PATH},
            PodWork(("pirate",), (("captain", PATH),)),
            id="name changed: unload the old one",
        ),
        pytest.param([adapter(deleted=NOW, **OURS)], HAS, PodWork(("pirate",)), id="deleted: unload"),
        pytest.param([adapter(deleted=NOW, **OURS)], {}, None, id="deleted and gone: nothing"),
        pytest.param([adapter()], {"static": "/x"}, PodWork((), (("pirate", PATH),)), id="foreign stays"),
        pytest.param([adapter()], {"pirate": "/x"}, None, id="foreign of this name stays"),
        pytest.param(
            [adapter(deleted=NOW, **OURS), adapter("next", "file:///n", {"name": "pirate"}, created=1.0)],
            {"pirate": PATH},
            PodWork(("pirate",), (("pirate", "/n"),)),
            id="another object takes over the name",
        ),
        pytest.param(
            [adapter("b", created=2.0), adapter("a", "file:///a", {"name": "b"}, created=1.0)],
            {},
            PodWork((), (("b", "/a"),)),
            id="one name: the older object",
        ),
        pytest.param(
            [adapter(), adapter("poet", "pvc://models/poet")],
            {"poet": "/models/poet"},
            PodWork((), (("pirate", PATH),)),
            id="two adapters",
        ),
    ],
)  # fmt: skip
def test_pod_work_from_desired_and_listed_adapters(
    adapters: list[Adapter], listed: dict[str, str], work: PodWork | None
) -> None:
    assert work_of(adapters, [pod(models=listed)]) == ({"decode-0": work} if work else {})


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(pod(ready=False), id="not ready"),
        pytest.param(replace(pod(), models=None, error="refused"), id="cannot be read"),
        pytest.param(pod(busy=True), id="busy"),
        pytest.param(pod(template=replace(TEMPLATE, adapters=False)), id="started without lora"),
        pytest.param(pod(template=replace(TEMPLATE, mounts=())), id="claim is not mounted"),
    ],
)
def test_pod_that_cannot_load_does_not_hold_up_others(one: AdapterPod) -> None:
    other = pod("prefill-0")
    assert work_of([adapter()], [one, other]) == {"prefill-0": PodWork((), (("pirate", PATH),))}


def status_of(
    one: Adapter,
    pods: Sequence[AdapterPod],
    spec: InferenceServiceSpec | None = None,
    errors: reports.Errors | None = None,
    others: Sequence[Adapter] = (),
    now: float = NOW,
) -> AdapterReport:
    plan = decide("chat", spec, [one, *others], pods)
    taken = frozenset(other.name for other in others if plan.placements[other.object].paths)
    return report(one, plan.placements[one.object], pods, errors or {}, taken, now)


def test_deleted_adapter_waits_for_a_load_that_runs() -> None:
    gone = adapter(deleted=NOW, **OURS)
    assert not status_of(gone, [pod(busy=True)]).released
    assert status_of(gone, [pod()]).released


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ([], False),
        ([pod()], False),
        ([pod(models={"pirate": PATH})], True),
        ([pod(), pod("decode-1", models={"pirate": PATH}, ready=False)], True),
        ([pod(busy=True)], None),
        ([replace(pod(), models=None)], None),
        ([replace(pod(), models=None, ready=False)], False),
        ([pod(busy=True, template=replace(TEMPLATE, adapters=False))], False),
    ],
)
def test_held_is_known_only_from_pods_that_were_read(pods: list[AdapterPod], expected: bool | None) -> None:
    assert reports.held(adapter(**OURS), pods) is expected


PAIR = [pod("prefill-0", HAS), pod("decode-0", HAS)]
VLLM = spec_of()
BATON = spec_of(engine={"lora": {"maxAdapters": 2}})
SECURED = spec_of(engine={"lora": {}}, security={"mutualTls": {"secretName": "certificates"}})


@pytest.mark.parametrize(
    ("one", "pods", "spec", "errors", "expected", "words"),
    [
        (adapter(), PAIR, VLLM, {}, "True LoadedOnAllPods", "All 2 ready pods"),
        (adapter(), [*PAIR, pod("decode-1", ready=False)], VLLM, {}, "True LoadedOnAllPods", "All 2"),
        (adapter(), [*PAIR, pod("decode-1")], VLLM, {}, "True PartlyLoaded", "2 of 3"),
        (adapter(), [PAIR[0], pod()], VLLM, {}, "False PartlyLoaded", "No decode worker has it."),
        (
            adapter(), [*PAIR, pod("decode-1")], VLLM, {("decode-1", "pirate"): "500: rank"},
            "True PartlyLoaded", "decode-1: 500: rank",
        ),
        (adapter(), [pod()], VLLM, {}, "False Loading", "1 pods are loading"),
        (adapter(), [pod(busy=True)], VLLM, {("decode-0", "pirate"): "old"}, "False Loading", ""),
        (adapter(), [pod()], VLLM, {("decode-0", "pirate"): "500: rank"}, "False LoadFailed", "500: rank"),
        (
            adapter(), [replace(pod(), models=None, error="No answer")], VLLM, {},
            "False LoadFailed", "decode-0: No answer",
        ),
        (adapter(), [], VLLM, {}, "False NoReadyPods", ""),
        (adapter(), [pod(ready=False)], VLLM, {}, "False NoReadyPods", ""),
        (adapter(), PAIR, None, {}, "False ServiceNotFound", "chat does not exist"),
        (
            adapter(), [], spec_of(engine={"type": "SGLang", "image": "s:1"}), {},
            "False EngineNotSupported", "type SGLang",
        ),
        (
            adapter(), [pod(template=replace(TEMPLATE, adapters=False))],
            spec_of(engine={"type": "vLLM"}), {}, "False AdaptersNotEnabled", "spec.engine.lora",
        ),
        (
            adapter(), [pod(template=replace(TEMPLATE, adapters=False))], VLLM, {},
            "False LoadFailed", "The rollout replaces it",
        ),
        (adapter("chat"), PAIR, VLLM, {}, "False NameConflict", "a name of the model"),
        (adapter(), [pod(models={"pirate": "/x"})], VLLM, {}, "False LoadFailed", "already, from /x"),
        (adapter(more={"rank": 32}), [pod()], VLLM, {}, "False LoadFailed", "Rank 32 (spec.rank)"),
        (adapter(uri="pvc://other/a"), [pod()], VLLM, {}, "False FilesNotReachable", "they mount models"),
        (adapter(deleted=NOW, **OURS), PAIR, VLLM, {}, "False Unloading", ""),
        (adapter(), PAIR, BATON, {}, "True LoadedOnAllPods", "All 2 ready pods"),
        (adapter(), PAIR, SECURED, {}, "False EngineNotSupported", "--lora-modules"),
    ],
    ids=[
        "all", "a pod starts", "a new pod", "one side of a pair", "one fails", "loading", "busy", "fails",
        "cannot be read", "no pods", "none ready", "no service", "engine", "not enabled", "old revision",
        "base model", "foreign", "rank", "claim", "deleted", "Baton", "certificates",
    ],
)  # fmt: skip
def test_condition_says_what_is_true(
    one: Adapter,
    pods: list[AdapterPod],
    spec: InferenceServiceSpec | None,
    errors: reports.Errors,
    expected: str,
    words: str,
) -> None:
    reported = status_of(one, pods, spec, errors)
    assert f"{reported.fact.status} {reported.fact.reason}" == expected
    assert words in reported.fact.message


def test_condition_name_conflict_names_the_older_object() -> None:
    older = adapter("first", more={"name": "pirate"}, created=1.0)
    reported = status_of(adapter(created=2.0), PAIR, VLLM, others=[older])
    assert reported.fact.reason == "NameConflict" and "LoraAdapter first" in reported.fact.message
    assert status_of(older, PAIR, VLLM, others=[adapter(created=2.0)]).fact.true


def test_status_lists_troubled_pods_first_and_counts_ready_ones() -> None:
    pods = [*PAIR, pod("decode-1"), pod("decode-2", ready=False)]
    reported = status_of(adapter(), pods, VLLM, {("decode-1", "pirate"): "500: rank"})
    assert [(one.name, one.state) for one in reported.pods] == [
        ("decode-1", "Failed"), ("decode-2", "Loading"), ("decode-0", "Loaded"), ("prefill-0", "Loaded"),
    ]  # fmt: skip
    assert (reported.loaded_pods, reported.ready_pods) == (2, 3)


@pytest.mark.parametrize(
    ("pods", "spec", "now", "released"),
    [
        ([pod(models=HAS)], VLLM, NOW + 1, False),
        ([pod()], VLLM, NOW + 1, True),
        ([replace(pod(), models=None)], VLLM, NOW + 1, False),
        ([replace(pod(), models=None)], VLLM, NOW + reports.UNLOAD_LIMIT_S, True),
        ([replace(pod(ready=False), models=None)], VLLM, NOW + 1, True),
        ([replace(pod(template=replace(TEMPLATE, adapters=False)), models=None)], VLLM, NOW + 1, True),
        ([], None, NOW + 1, True),
    ],
    ids=["loaded", "unloaded", "hangs", "hangs for long", "starts", "cannot have it", "no service"],
)
def test_deleted_object_disappears_once_pods_are_clean(
    pods: list[AdapterPod], spec: InferenceServiceSpec | None, now: float, released: bool
) -> None:
    assert status_of(adapter(deleted=NOW, **OURS), pods, spec, now=now).released is released


@pytest.mark.parametrize(
    ("uri", "template", "path"),
    [
        ("file:///opt/a", TEMPLATE, "/opt/a"),
        ("hf://org/name", TEMPLATE, "org/name"),
        ("pvc://models", TEMPLATE, "/models"),
        ("pvc://models/a/b/", TEMPLATE, "/models/a/b"),
        ("pvc://c/team/a", WorkerTemplate(mounts=(Mount("c", "/loras/", "team"),)), "/loras/a"),
        ("pvc://c/teams/a", WorkerTemplate(mounts=(Mount("c", "/loras", "team"),)), "do not mount teams/a"),
        ("pvc://other/a", TEMPLATE, "they mount models"),
        ("pvc://other/a", WorkerTemplate(), "they mount no claim"),
        ("hf://org", TEMPLATE, "hf://ORGANIZATION/NAME"),
        ("hf://org/name", WorkerTemplate(downloads=False), "allows no downloads"),
    ],
)
def test_path_of_files_in_a_pod(uri: str, template: WorkerTemplate, path: str) -> None:
    try:
        assert template.lora_path(adapter(uri=uri).spec) == path
    except FilesNotReachable as error:
        assert path in str(error)


def test_work_brings_every_pod_to_the_desired_adapters() -> None:
    """By chance: objects come, change and go, pods restart. After the work, a second plan is empty."""
    rng = random.Random(14)
    for _ in range(300):
        adapters = [
            adapter(
                f"o{number}",
                f"file:///{rng.randrange(3)}",
                {"name": rng.choice("ab")} if rng.random() < 0.5 else None,
                created=float(rng.randrange(3)),
                deleted=NOW if rng.random() < 0.3 else None,
                names=tuple(rng.sample(["a", "b", "o0", "o1"], rng.randrange(3))),
            )
            for number in range(rng.randrange(4))
        ]
        names = ["a", "b", "o0", "o1", "static"]
        listed = {name: f"/{rng.randrange(3)}" for name in names if rng.random() < 0.4}
        plan = decide("chat", VLLM, adapters, [pod(models=listed)])
        after = dict(listed)
        todo = plan.work.get("decode-0", PodWork())
        for name in todo.unload:
            del after[name]
        for name, path in todo.load:
            assert name not in after, "vLLM would refuse it"
            after[name] = path
        owned = {name for one in adapters for name in one.names}
        kept = {name: path for name, path in listed.items() if name not in owned}
        assert kept.items() <= after.items(), "adapters of others stay"
        assert not decide("chat", VLLM, adapters, [pod(models=after)]).work
