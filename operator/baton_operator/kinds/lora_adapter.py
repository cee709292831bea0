"""`LoraAdapter`: an adapter of a model, which the operator loads in the workers of a service."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton_operator.kinds.part import Conditions, Count, Label, Part, Rule, rules

PODS_LIMIT = 256
"""Maximum pods in the status of an adapter."""

AdapterState = Literal["Loaded", "Loading", "Failed"]
AdapterName = Annotated[str, Field(min_length=1, max_length=256)]


@rules(
    Rule("self.serviceName == oldSelf.serviceName", "serviceName cannot be changed", ".serviceName"),
    Rule(
        "self.uri.matches('^(hf|pvc|file)://')",
        "uri begins with hf://, pvc:// or file://: copy other files into a claim that the workers mount",
        ".uri",
    ),
)
class LoraAdapterSpec(Part):
    """Adapter, and the service whose workers load it. Needs spec.engine.lora of the service."""

    service_name: Label
    """Name of the InferenceService in the same namespace, with engine.type Baton or vLLM. Immutable."""

    uri: Annotated[str, Field(min_length=8, max_length=1024)]
    """Location of the adapter's files, which have the format of PEFT. pvc://CLAIM/PATH is a folder of a claim
    that the workers mount. file:///PATH is a folder in their container. With hf://ORGANIZATION/NAME, the
    worker downloads the newest commit, with HF_TOKEN from spec.engine.env of the service; a vLLM worker
    computes nothing meanwhile. Changed files need another location: workers do not notice a change."""

    name: AdapterName | None = None
    """Name of the adapter in requests, as `model`. Default: the name of this object."""

    rank: Annotated[int, Field(ge=1, le=512)] | None = None
    """Rank of the adapter. If it is set and above spec.engine.lora.maxRank of the service, the operator does
    not try to load the adapter. Default: the worker reads it from the adapter's
    configuration."""


class AdapterPodStatus(Part):
    """The adapter in one pod."""

    name: Annotated[str, Field(max_length=253)]
    """Name of the pod."""

    state: AdapterState
    """Loaded: the pod lists the adapter. Loading: the operator is loading it, or waits for the pod. Failed:
    the condition Active has the cause; the operator tries again."""


class LoraAdapterStatus(Part):
    """State of the adapter."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    """Value of metadata.generation that the operator last processed."""

    name: Annotated[str, Field(max_length=256)] = ""
    """Name of the adapter in requests."""

    names: Annotated[list[AdapterName], Field(max_length=16)] = []
    """Names under which pods may have loaded the adapter. The operator unloads earlier ones."""

    pods: Annotated[list[AdapterPodStatus], Field(max_length=PODS_LIMIT)] = []
    """Pods of the workers, those with a problem first."""

    ready_pods: Count = 0
    """Ready pods of the workers, which all should have the adapter."""

    loaded_pods: Count = 0
    """Ready pods that list the adapter."""

    conditions: Conditions = []
    """Active: workers have the adapter. Routers see it within two seconds and answer 404 until then.
    Reasons: LoadedOnAllPods, PartlyLoaded, Loading, LoadFailed, NoReadyPods, FilesNotReachable,
    ServiceNotFound, ServiceInvalid, EngineNotSupported, AdaptersNotEnabled, NameConflict, and Unloading after
    the object was deleted."""
