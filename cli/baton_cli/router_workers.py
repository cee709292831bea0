"""Read the workers of a service from its router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from baton_api.errors import SetupError
from baton_api.workers import EngineKind

ANSWER_S = 3.0
"""Timeout of a router and of a worker."""


Row = Mapping[str, Any]
"""A worker in `GET /workers`."""


def read(url: str, api_key: str) -> list[Row]:
    """Return the rows of `GET /workers`. Raises SetupError if a Baton router does not answer with them."""
    solution = "Set the address of a Baton router with --url."
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{base(url)}/workers", headers=headers, trust_env=False, timeout=ANSWER_S)
    except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        reason = str(error) or type(error).__name__
        raise SetupError(f"{url} does not answer: {reason}. {solution}") from error
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise SetupError(f"{url} requires an API key with permission: set --api-key or BATON_API_KEY.")
    try:
        rows: list[Row] = answer.raise_for_status().json()["data"]
    except (httpx.HTTPStatusError, ValueError, KeyError, TypeError) as error:
        raise SetupError(
            f"{url} returned no list of workers (status {answer.status_code}). {solution}"
        ) from error
    return rows


def base(url: str) -> str:
    """Return the address of a service without the path of its API."""
    return url.rstrip("/").removesuffix("/v1")


def samples(client: httpx.Client, url: str) -> list[Sample]:
    """Return the samples of a worker's metrics. Empty: it cannot be reached, or exposes none."""
    try:
        text = client.get(f"{url}/metrics").raise_for_status().text
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return []


def reported_load(row: Row) -> Mapping[str, Any] | None:
    """Return the load of a worker. None if it is unknown: then its numbers mean nothing."""
    load: Mapping[str, Any] | None = row["load"]
    if load and load.get("engine", EngineKind.BATON) != EngineKind.BATON and not load.get("total_blocks"):
        return None  # the worker exposes no metrics
    return load
