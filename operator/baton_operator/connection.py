"""How the API server is reached, and by which account: the pod's own, or a kubeconfig file's."""

from __future__ import annotations

import kopf
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
    """For the operator's own requests. Raises SetupError."""
    return ApiClient(configuration=await configuration(kubeconfig))


async def for_kopf(kubeconfig: str) -> kopf.ConnectionInfo:
    """The same for kopf's watches. Raises SetupError."""
    made = await configuration(kubeconfig)
    header = await made.get_api_key_with_prefix("BearerToken", alias="authorization")
    return kopf.ConnectionInfo(
        server=made.host,
        ca_path=made.ssl_ca_cert,
        insecure=not made.verify_ssl,
        token=header.removeprefix("Bearer ").removeprefix("bearer ") if header else None,
        certificate_path=made.cert_file,
        private_key_path=made.key_file,
    )
