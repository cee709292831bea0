"""The operator's process: kopf runs the handlers of `baton_operator.handlers`."""

from __future__ import annotations

import asyncio
import logging

import kopf

from baton_api.errors import SetupError
from baton_operator import handlers  # noqa: F401 - registers them
from baton_operator.cluster import api_server
from baton_operator.operator import Listening, Operator
from baton_operator.settings import OperatorSettings


def run(settings: OperatorSettings, listening: Listening) -> None:
    """Run until SIGINT or SIGTERM; `listening` receives the URL of the server. Raises SetupError."""
    for name in ("worker_image", "router_image"):
        if not getattr(settings, name):
            flag = "--" + name.replace("_", "-")
            raise SetupError(f"No default {name.replace('_', ' ')} is set. Set {flag}.")
    asyncio.run(_run(settings, listening))


async def _run(settings: OperatorSettings, listening: Listening) -> None:
    logging.getLogger("kopf").setLevel(logging.WARNING)  # it logs each event
    client = await api_server.connect(settings.kubeconfig)
    if name := client.configuration.tls_server_name:
        await client.close()
        raise SetupError(
            f"{settings.kubeconfig} sets tls-server-name {name}, which kopf.ConnectionInfo does not have. "
            "Remove it, and set `server` to a name in the certificate of the API server."
        )
    operator = Operator(settings, client, listening)
    try:
        await kopf.operator(
            settings=kopf_settings(settings),
            memo=operator,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            standalone=True,  # the Lease leads: peering is advisory
        )
    except Exception:
        if operator.failure is not None:
            raise operator.failure from None
        raise


def kopf_settings(settings: OperatorSettings) -> kopf.OperatorSettings:
    """Return the settings of kopf."""
    wanted = kopf.OperatorSettings()
    wanted.posting.enabled = False  # `baton_operator.cluster.events` posts transitions of conditions
    wanted.scanning.disabled = True  # no rights on CRDs and namespaces; the handlers name what they watch
    wanted.watching.inactivity_timeout = settings.watch_silence_s
    wanted.watching.chunk_size = api_server.PAGE
    # Without a limit each object has a task and a queue of its own: four times the memory.
    wanted.queueing.worker_limit = 64
    wanted.queueing.idle_timeout = 0.05
    return wanted
