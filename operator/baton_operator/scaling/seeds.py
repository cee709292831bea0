"""
What one worker is taken to do before any was seen to: by a profile that `baton bench --find` has written.

The profile is a key of a ConfigMap that the service names. It holds lines through measurements, so that what
follows from them is reckoned for the objectives of the service and not for those of the measurement.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from baton_api import profiles
from baton_api.errors import SetupError
from baton_operator.api_server import ApiServer
from baton_operator.kinds.part import duration_s
from baton_operator.kinds.service_policies import Objectives, ProfileSource
from baton_operator.rollout import RoleName

Seeds = Mapping[RoleName, float]
"""Tokens a second of one worker; a role that cannot keep the objectives at all is not among them."""


async def read(api: ApiServer, namespace: str, source: ProfileSource, wanted: Objectives) -> Seeds:
    """Of the profile in the cluster. Raises SetupError, and ApiException."""
    where = f"metadata.name={source.config_map_name}"
    found = await api.list("v1", "ConfigMap", namespace, field=where)
    if not found:
        raise SetupError(
            f"There is no ConfigMap {source.config_map_name}; `kubectl create configmap "
            f"{source.config_map_name} --from-file={source.key}` makes one of a profile."
        )
    text = found[0].get("data", {}).get(source.key)
    if text is None:
        raise SetupError(f"The ConfigMap {source.config_map_name} has no key {source.key}.")
    return seeds(profiles.parse(text), wanted)


def seeds(profile: profiles.Profile, wanted: Objectives) -> Seeds:
    """What follows from a profile for these objectives, and requests like those it was made for."""
    objectives = msgspec.structs.replace(
        profile.objectives, ttft_s=duration_s(wanted.ttft), itl_s=duration_s(wanted.itl)
    )
    capacity = profile.for_objectives(objectives)
    made: dict[RoleName, float] = {
        "prefill": capacity.prefill_tokens_per_s,
        "decode": capacity.decode_tokens_per_s,
    }
    return {role: value for role, value in made.items() if value > 0}
