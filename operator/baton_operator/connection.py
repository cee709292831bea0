"""How the API server is reached, and by which account: the pod's own, or a kubeconfig file's."""

from __future__ import annotations

from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from baton_api.errors import SetupError


async def configuration(kubeconfig: str) -> Configuration:
    """Read anew each time: tokens are exchanged while the operator runs. Raises SetupError."""
    made = Configuration()
    try:
        if kubeconfig:
            await config.load_kube_config(config_file=kubeconfig, client_configuration=made)
        else:
            config.load_incluster_config(client_configuration=made)
    except (config.ConfigException, OSError) as error:
        raise SetupError(
            f"No account for the Kubernetes API ({error}): run in a pod with a ServiceAccount, "
            "or name a kubeconfig file with --kubeconfig."
        ) from error
    return made


async def client(kubeconfig: str) -> ApiClient:
    """For all of the operator's requests. Raises SetupError."""
    made = await configuration(kubeconfig)
    made.connection_pool_maxsize = 0  # no limit: each watch holds a connection
    return ApiClient(configuration=made)
