"""The status of an adapter: a pure function of the plan, of what the pods list, and of the last errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton_operator.adapters.decision import Adapter, AdapterPlacement, AdapterPod
from baton_operator.kinds.lora_adapter import PODS_LIMIT, AdapterPodStatus, AdapterState
from baton_operator.manifests.conditions import Fact

UNLOAD_LIMIT_S = 120.0
"""Seconds after which a deleted LoraAdapter disappears even if a pod still has the adapter."""

NAMES_LIMIT = 16

_ORDER = {"Failed": 0, "Loading": 1, "Loaded": 2}

Errors = Mapping[tuple[str, str], str]
"""Last error by pod key and name of the adapter."""


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """Content of the status of one adapter."""

    fact: Fact
    names: tuple[str, ...]
    """Names under which pods may still have it."""
    pods: tuple[AdapterPodStatus, ...] = ()
    ready_pods: int = 0
    loaded_pods: int = 0
    released: bool = False
    """Whether a deleted object may disappear."""


def report(
    adapter: Adapter,
    placement: AdapterPlacement,
    pods: Sequence[AdapterPod],
    errors: Errors,
    taken: frozenset[str],
    now: float,
) -> AdapterReport:
    """Return the report. `taken`: names that other adapters of the service have. `now`: Unix seconds."""
    names = remaining_names(adapter, placement, pods, taken)
    if placement.problem is not None:
        late = adapter.deleted is not None and now - adapter.deleted >= UNLOAD_LIMIT_S
        released = adapter.deleted is not None and (late or not names)
        return AdapterReport(placement.problem, names, released=released)
    states = [(pod, *_state(adapter, placement, pod, errors)) for pod in pods]
    ready = [one for one in states if one[0].ready]
    loaded = sum(state == "Loaded" for _, state, _ in ready)
    ordered = sorted(states, key=lambda one: (_ORDER[one[1]], one[0].name))
    shown = tuple(AdapterPodStatus(name=pod.name, state=state) for pod, state, _ in ordered[:PODS_LIMIT])
    return AdapterReport(_fact(placement, ready, loaded), names, shown, len(ready), loaded)


def remaining_names(
    adapter: Adapter, placement: AdapterPlacement, pods: Sequence[AdapterPod], taken: frozenset[str]
) -> tuple[str, ...]:
    """Return the names under which a pod may have the adapter, now or after the work of the plan."""
    ours = [adapter.name] if placement.paths else []
    for name in adapter.names:
        if name in taken or name in ours:
            continue
        if any(_may_have(pod, name) for pod in pods):
            ours.append(name)
    return tuple(ours[:NAMES_LIMIT])


def held(adapter: Adapter, pods: Sequence[AdapterPod]) -> bool | None:
    """Return whether a pod has the adapter under one of its names; None if that is not known yet."""
    if any(name in (pod.models or ()) for pod in pods for name in adapter.names):
        return True
    return None if any(_may_have(pod, name) for pod in pods for name in adapter.names) else False


def _may_have(pod: AdapterPod, name: str) -> bool:
    """Whether the pod may have an adapter, or get it from a load that runs. One that is not ready and cannot
    be read is about to restart.
    """
    if not pod.template.adapters:
        return False
    return pod.busy or (name in pod.models if pod.models is not None else pod.ready)


def _state(
    adapter: Adapter, placement: AdapterPlacement, pod: AdapterPod, errors: Errors
) -> tuple[AdapterState, str]:
    """Return the state of the adapter in a pod, and why it failed."""
    if fault := placement.faults.get(pod.key):
        return "Failed", fault
    if not pod.ready:
        return "Loading", ""
    if pod.models is not None and pod.models.get(adapter.name) == placement.paths.get(pod.key):
        return "Loaded", ""
    error = errors.get((pod.key, adapter.name)) or pod.error
    return ("Failed", error) if error and not pod.busy else ("Loading", "")


def _fact(
    placement: AdapterPlacement, ready: Sequence[tuple[AdapterPod, AdapterState, str]], loaded: int
) -> Fact:
    if placement.unreachable:
        return Fact("Active", False, "FilesNotReachable", placement.unreachable)
    if not ready:
        return Fact("Active", False, "NoReadyPods", "The service has no ready worker.")
    if loaded == len(ready):
        return Fact("Active", True, "LoadedOnAllPods", f"All {loaded} ready pods have the adapter.")
    failed: dict[str, list[str]] = {}
    for pod, state, why in ready:
        if state == "Failed":
            failed.setdefault(why, []).append(pod.name)
    trouble = "".join(f" {', '.join(sorted(pods))}: {why}" for why, pods in failed.items())
    roles = {pod.role for pod, _, _ in ready}
    served = {pod.role for pod, state, _ in ready if state == "Loaded"}
    if loaded:
        # A pair needs the adapter on both sides.
        lacking = "".join(f" No {role} worker has it." for role in sorted(roles - served))
        message = f"{loaded} of {len(ready)} ready pods have the adapter.{lacking}{trouble}"
        return Fact("Active", roles == served, "PartlyLoaded", message)
    if failed:
        return Fact("Active", False, "LoadFailed", trouble.strip())
    return Fact("Active", False, "Loading", f"{len(ready)} pods are loading the adapter.")
