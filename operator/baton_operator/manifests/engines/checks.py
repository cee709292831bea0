"""
Contradictions in a spec with another engine than Baton, which the operator refuses by naming both sides.

The API server checks what fits a rule (`baton_operator.kinds`); its rules cannot put numbers into a message.
Here are numbers of accelerators, flags in lists, defaults of the operator, and names whose length is limited
by generated names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from baton_operator.kinds.engine import Engine, EngineType, Variable
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.part import amount
from baton_operator.kinds.worker_role import WorkerRole
from baton_operator.manifests.engines import ENGINES, sglang, tiers
from baton_operator.manifests.engines.container import flag_name, last_value
from baton_operator.manifests.engines.spec import DTYPE
from baton_operator.manifests.engines.vllm import HASH_SEED_VARIABLE

GROUP_NAME_LIMIT = 29
"""Maximum characters of the name of a service with several nodes per worker: Kubernetes limits the names of
the StatefulSets that LeaderWorkerSet creates to 52."""

OFFLOADING_FLAGS = ("--kv-offloading-size", "--kv-offloading-backend")
"""Flags with which vLLM replaces the connector of --kv-transfer-config."""

TIER_FLAGS = (
    *("--enable-hierarchical-cache", "--enable-hicache", "--hicache-size", "--hicache-ratio"),
    *("--hicache-host-memory-fraction", "--hicache-storage-backend"),
)
"""Flags of SGLang that spec.engine.kvCacheTiers sets."""


def check(service: str, spec: InferenceServiceSpec, default_image: str) -> None:
    """
    Raise ValueError if the operator cannot run the engine as the spec says.

    `default_image`: the operator's image of the engine; empty: none.
    """
    engine = spec.engine
    roles = {"prefill": spec.prefill, "decode": spec.decode}
    existing = {name: role for name, role in roles.items() if role is not None}
    if engine.type == "Baton":
        for name, role in existing.items() if engine.kv_cache_tiers else ():
            _check_tiers(engine, f"spec.{name}", role)
        return
    if not default_image and not engine.image:
        _need_images(engine.type, existing)
    lists = [("spec.engine", engine.args, engine.env)]
    lists += [(f"spec.{name}", role.args, role.env) for name, role in existing.items()]
    owned = dict(ENGINES[engine.type].owned_flags)
    if engine.type == "SGLang" and engine.kv_cache_tiers:
        owned |= dict.fromkeys(TIER_FLAGS, "spec.engine.kvCacheTiers")
    for path, args, env in lists:
        _refuse_flags(owned, path, args)
        _refuse_variables(engine.type, path, env)
        if engine.type == "vLLM" and (engine.kv_cache_tiers or spec.prefill is not None):
            _refuse_offloading(path, args)
    _refuse_variables(engine.type, "spec.transfer", spec.transfer.env)
    for name, role in existing.items():
        _check_accelerators(f"spec.{name}", role)
        if engine.kv_cache_tiers and not (engine.type == "SGLang" and spec.prefill and name == "decode"):
            _check_tiers(engine, f"spec.{name}", role)
    if spec.prefill is not None:
        _check_pairs(spec, spec.prefill, spec.decode)
    nodes = max(role.parallelism.nodes for role in existing.values())
    if nodes > 1 and len(service) > GROUP_NAME_LIMIT:
        raise ValueError(
            f"The name {service} has {len(service)} characters. A service with parallelism.nodes above 1 may "
            f"have at most {GROUP_NAME_LIMIT}: Kubernetes limits the names of its StatefulSets. Choose a "
            "shorter name."
        )


def _need_images(engine: EngineType, roles: Mapping[str, WorkerRole]) -> None:
    lacking = [f"spec.{name}.image" for name, role in roles.items() if not role.image]
    if not lacking:
        return
    flag = ENGINES[engine].image_flag
    default = f", or the operator's default {flag}" if flag else ""
    raise ValueError(
        f"spec.engine.type {engine} needs an image, and spec.engine.image and {lacking[0]} are empty. "
        f"Set spec.engine.image{default}."
    )


def _check_accelerators(path: str, role: WorkerRole) -> None:
    """Raise ValueError if the accelerators of a node are not a multiple of those that parallelism uses."""
    wanted = role.parallelism
    product = f"{path}.parallelism.tensor x pipeline ({wanted.tensor} x {wanted.pipeline})"
    each, rest = divmod(wanted.accelerators, wanted.nodes)
    if rest:
        raise ValueError(
            f"{product} is {wanted.accelerators}, which {wanted.nodes} nodes ({path}.parallelism.nodes) "
            "cannot share equally. Set a multiple of the nodes."
        )
    count = role.resources.accelerators
    if count % each:
        of_nodes = f" on {wanted.nodes} nodes, {each} on each" if wanted.nodes > 1 else ""
        raise ValueError(
            f"{product} uses {wanted.accelerators} accelerators{of_nodes}, but {path}.resources.limits has "
            f"{count}. Request {each} or a multiple of it."
        )


def _check_tiers(engine: Engine, path: str, role: WorkerRole) -> None:
    """Raise ValueError if tiers do not fit the pods of a role."""
    for tier in engine.kv_cache_tiers:
        if amount(tier.size) < 1:
            raise ValueError(
                f"spec.engine.kvCacheTiers has a tier of type {tier.type} with size {tier.size}. "
                "Set its bytes, such as 64Gi, or remove it."
            )
    if engine.type == "SGLang" and not sglang.host_memory(engine, role):
        ranks = sglang.ranks(role)
        raise ValueError(
            f"spec.engine.kvCacheTiers has {tiers.memory(engine)} bytes of memory for {ranks} ranks of "
            f"{path}, and SGLang takes whole GB for each. Set at least {ranks}G."
        )
    if engine.type == "vLLM" and any(variable.name == HASH_SEED_VARIABLE for variable in role.env):
        raise ValueError(
            f"{path}.env has {HASH_SEED_VARIABLE}, which must be equal in all workers with kvCacheTiers. "
            "Set it in spec.engine.env, or remove it: the operator sets 0."
        )
    if engine.type == "Baton" and role.parallelism.tensor > 1:
        raise ValueError(
            f"{path}.parallelism.tensor is {role.parallelism.tensor}, and workers of type Baton have tiers "
            "without tensor parallelism only. Remove spec.engine.kvCacheTiers, or set 1."
        )
    disk = tiers.disk(engine)
    if engine.type == "Baton" and disk is not None and not tiers.is_of_one_pod(disk):
        raise ValueError(
            "spec.engine.kvCacheTiers has a volume that pods share, and each worker of type Baton needs a "
            "disk of its own. Remove its `volume`, or use emptyDir or ephemeral."
        )
    store = tiers.shared(engine)
    if store is not None and store.volume is not None and not tiers.is_shared(store):
        raise ValueError(
            "spec.engine.kvCacheTiers has a tier of type SharedStore with a volume that pods do not share. "
            "Use persistentVolumeClaim with access mode ReadWriteMany, or nfs, or set url."
        )
    if store is not None and tiers.is_read_only(store):
        raise ValueError(
            "spec.engine.kvCacheTiers has a tier of type SharedStore with a volume that is readOnly, and "
            "workers write to it. Remove readOnly."
        )
    _check_memory(engine, path, role)


def _check_memory(engine: Engine, path: str, role: WorkerRole) -> None:
    """Raise ValueError if the limit of a pod has no room for the tier in its memory."""
    limit = role.resources.limits.get("memory")
    if limit is None:
        return
    taken = tiers.memory(engine) + int(amount(role.shared_memory_size))
    if amount(limit) <= taken:
        raise ValueError(
            f"{path}.resources.limits.memory is {limit}, but kvCacheTiers of type Memory and "
            f"{path}.sharedMemorySize together may take {taken} bytes of it ({taken / 2**30:.1f}Gi). "
            "Set a limit above that by what the engine itself needs, or a smaller tier."
        )


def _check_pairs(spec: InferenceServiceSpec, prefill: WorkerRole, decode: WorkerRole) -> None:
    """Raise ValueError if prefill and decode workers could not exchange KV blocks."""
    engine = spec.engine
    sizes = prefill.parallelism.tensor, decode.parallelism.tensor
    if engine.type == "vLLM" and max(sizes) % min(sizes):
        raise ValueError(
            f"spec.prefill.parallelism.tensor is {sizes[0]}, but spec.decode.parallelism.tensor is "
            f"{sizes[1]}. KV blocks move between their workers only if one number divides the other."
        )
    for flag, default in ENGINES[engine.type].layout_flags.items():
        ours, theirs = (
            last_value([*engine.args, *role.args], flag) or default or (engine.dtype if flag == DTYPE else "")
            for role in (prefill, decode)
        )
        if ours and theirs and ours != theirs:
            raise ValueError(
                f"Prefill workers would have {flag} {ours}, but decode workers {flag} {theirs}. Workers of "
                f"different {flag} form no pairs. Set the same value in spec.prefill.args and "
                "spec.decode.args, or set it in spec.engine.args."
            )


def _refuse_flags(owned: Mapping[str, str], path: str, args: Sequence[str]) -> None:
    for flag in map(flag_name, args):
        for name in _matches(flag, owned):
            raise ValueError(
                f"{path}.args has {flag}, but {name} is set by the operator: its value comes from "
                f"{owned[name]}. Remove {flag} from {path}.args."
            )


def _refuse_offloading(path: str, args: Sequence[str]) -> None:
    for flag in map(flag_name, args):
        if any(_matches(flag, dict.fromkeys(OFFLOADING_FLAGS, ""))):
            raise ValueError(
                f"{path}.args has {flag}, with which vLLM replaces the connector that the operator sets: "
                "prefill and decode workers would form no pairs. "
                f"Remove {flag} from {path}.args, and set spec.engine.kvCacheTiers."
            )


def _matches(flag: str, owned: Mapping[str, str]) -> Iterator[str]:
    """Yield the owned flags that this one sets, in whole or, as argparse allows, by its beginning."""
    if flag in owned:
        yield flag
    elif len(flag) > len("--x"):
        yield from (name for name in owned if name.startswith(flag))


def _refuse_variables(engine: EngineType, path: str, variables: Sequence[Variable]) -> None:
    for variable in variables:
        if variable.name in ENGINES[engine].owned_variables:
            raise ValueError(
                f"{path}.env has {variable.name}, which the operator sets to the address or port of NIXL's "
                f"side channel. Remove it from {path}.env."
            )
