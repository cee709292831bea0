"""
Runners in pods: Kubernetes itself says who they are.

A pod of a Job holds a token of its ServiceAccount that is meant for this service's routers alone, ends
within the hour, and names the pod. It is judged by the keys that the API server shows to every account, so
that no right is needed for it, and no Secret. What it opens is one thing, the lease of the batch that is for
the pod's BatchJob; from then on the runner has the router's own token, for one batch and one epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from baton_api import batch_jobs
from baton_api.errors import SetupError, Unauthorized
from baton_batches.cluster import Cluster

if TYPE_CHECKING:
    from baton_http.jwks import IssuersKeys

ALGORITHMS = frozenset({"RS256", "RS384", "RS512", "ES256", "ES384", "ES512"})

LEEWAY_S = 10.0
"""By which clocks may differ."""


class PodTokens:
    """Whose tokens are believed here: those of one service's runners. Belongs to the event loop."""

    def __init__(self, keys: IssuersKeys, cluster: Cluster, service: str) -> None:
        self._keys = keys
        self._cluster = cluster
        self._service = service

    async def job(self, token: str) -> str:
        """
        The BatchJob whose pod has this token.

        Raises Unauthorized, and NotReady if the API server's keys cannot be had.
        """
        import jwt

        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, ValueError) as error:
            raise Unauthorized(token="is not well formed") from error
        self._keys.refresh()
        key = await self._keys.find(str(header.get("kid", "")))
        if key is None or header.get("alg") != key.algorithm_name:
            raise Unauthorized(token="is signed with a key that is not the API server's")
        try:
            namespace = self._cluster.namespace()
            claims = jwt.decode(
                token,
                key,
                algorithms=sorted(ALGORITHMS),
                audience=batch_jobs.audience(namespace, self._service),
                leeway=LEEWAY_S,
                options={"require": ["exp", "aud", "sub"], "verify_iat": False},
            )
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, OSError) as error:
            raise Unauthorized(token=f"is not for runners of {self._service} now: {error}") from error
        account = f"system:serviceaccount:{namespace}:{batch_jobs.account(self._service)}"
        job = batch_jobs.job_of(_pod(claims))
        if claims["sub"] != account or not job:
            raise Unauthorized(token=f"is of no pod of a BatchJob of {self._service}")
        return job

    async def close(self) -> None:
        await self._keys.close()


def pod_tokens(cluster: Cluster, service: str, clock: Callable[[], float] = time.monotonic) -> PodTokens:
    """Raises SetupError if what it needs is not installed."""
    try:
        from baton_http.jwks import IssuersKeys
    except ModuleNotFoundError as error:
        raise SetupError("--batch-jobs needs one package more: pip install 'baton[jwt]'.") from error
    return PodTokens(IssuersKeys(cluster.keys, ALGORITHMS, clock), cluster, service)


def _pod(claims: Mapping[str, Any]) -> str:
    """The pod that a token is bound to; empty if it is bound to none."""
    bound = claims.get("kubernetes.io")
    pod = bound.get("pod") if isinstance(bound, dict) else None
    name = pod.get("name") if isinstance(pod, dict) else None
    return name if isinstance(name, str) else ""
