"""`baton status`: read the status of services, and print it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import httpx
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton_api import installing, labels
from baton_api.errors import SetupError
from baton_cli import router_workers
from baton_cli.doctor.cluster import account
from baton_cli.status import report
from baton_cli.status.report import ServiceStatus

WRONG = 1
"""Exit status if a service has problems."""

WIDE = 200
CLUSTER_S = 60.0


def of_url(url: str, api_key: str, as_json: bool) -> None:
    """Print the status of the service behind a router. Raises SetupError if it does not answer."""
    router, workers = router_workers.base(url), router_workers.read(url, api_key)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(
            f"{router}/server_info", headers=headers, trust_env=False, timeout=router_workers.ANSWER_S
        )
        info = answer.raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        raise SetupError(f"{url} returned no status: {error}.") from error
    _end([report.status_of_router(router, info, workers)], as_json)


def of_services(name: str, kubeconfig: str, namespace: str, as_json: bool) -> None:
    """Print the status of InferenceServices. Raises SetupError if the named one does not exist."""
    _end(asyncio.run(services(name, account(kubeconfig, os.environ), namespace)), as_json)


async def services(name: str, kubeconfig: str, namespace: str) -> list[ServiceStatus]:
    try:
        from aiohttp import ClientError
        from kubernetes.aio.client import CoreV1Api, CustomObjectsApi
        from kubernetes.aio.client.exceptions import ApiException

        from baton_operator.cluster import api_server
        from baton_operator.crd import GROUP, VERSION
    except ModuleNotFoundError as error:
        raise SetupError(
            f"The package {error.name} is missing. Install it: {installing.command('operator')}."
        ) from error
    try:
        async with asyncio.timeout(CLUSTER_S), await api_server.connect(kubeconfig) as client:
            custom = CustomObjectsApi(client)
            listed = await custom.list_namespaced_custom_object(
                GROUP, VERSION, namespace, "inferenceservices"
            )
            chosen = [service for service in listed["items"] if name in ("", service["metadata"]["name"])]
            if name and not chosen:
                raise SetupError(
                    f"The InferenceService {name} does not exist in {namespace}. Set another --namespace, "
                    "or list all: kubectl get bsvc -A."
                )
            statuses = []
            for service in chosen:
                selector = f"{labels.SERVICE}={service['metadata']['name']}"
                pods = await CoreV1Api(client).list_namespaced_pod(namespace, label_selector=selector)
                plain: list[Any] = client.sanitize_for_serialization(pods.items)
                statuses.append(report.status_of_service(service, plain))
            return statuses
    except ApiException as error:
        raise SetupError(
            f"The cluster rejected the request ({error.status} {error.reason}). `baton doctor --cluster` "
            "shows missing permissions."
        ) from error
    except (ClientError, OSError) as error:  # a timeout is one
        raise SetupError(f"The cluster does not answer: {str(error) or 'no answer in time'}.") from error


def _end(standings: Sequence[ServiceStatus], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps([dataclasses.asdict(status) for status in standings], indent=1) + "\n")
    else:
        console = Console()
        if not console.is_terminal:
            console.width = WIDE
        for status in standings:
            show(console, status)
        if not standings:
            console.print("No services found.")
    if not all(status.well for status in standings):
        raise typer.Exit(WRONG)


def show(console: Console, status: ServiceStatus) -> None:
    """Print a summary, one line per part, and the problems with their solutions."""
    sign, colour = ("✓", "green") if status.well else ("!", "yellow") if status.serving else ("✗", "bold red")
    console.print(
        Text.assemble((f"{sign} ", colour), (status.name, "bold"), f"  {status.url}\n  {status.summary}\n")
    )
    table = Table.grid(padding=(0, 2))
    for wraps in (False, False, False, True):
        table.add_column(no_wrap=not wraps, overflow="fold")
    for part in status.parts:
        shade = {True: "green", False: "bold red", None: ""}[part.well]
        table.add_row(
            Text(f"  {part.kind}", style="dim"),
            Text(part.name),
            Text(part.state, style=shade),
            Text(part.detail, style="dim"),
        )
    console.print(table)
    for problem in status.problems:
        console.print(
            Text.assemble(("\n✗ ", "bold red"), problem.message, (f"\n→ {problem.remedy}", "default")),
            soft_wrap=True,
        )
    console.print()
