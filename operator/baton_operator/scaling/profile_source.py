"""The profile of a service: a key of a ConfigMap, written by `baton bench --find`, that the service names."""

from __future__ import annotations

from baton_api import profiles
from baton_api.errors import SetupError
from baton_operator.api_server import ApiServer
from baton_operator.kinds.service_policies import ProfileSource

REREAD_S = 300.0
"""After which a changed profile is noticed."""


async def read(api: ApiServer, namespace: str, source: ProfileSource) -> profiles.Profile:
    """Raises SetupError, and ApiException."""
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
    return profiles.parse(text)
