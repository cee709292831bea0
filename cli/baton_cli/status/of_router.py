"""A service as its router sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton_api.workers import Role
from baton_cli.status.standing import Part, Standing, Trouble

WELL = frozenset({"ready", "on_trial", "full"})
PASSING = frozenset({"starting", "draining"})

WAYS_OUT = {
    "down": "See that its process runs, and that the router reaches its address: curl http://{worker}/health.",
    "not_ready": "Its log says what it waits for: http://{worker}/ready.",
    "ejected": "Its log says why requests fail on it; it is tried again by itself.",
}


def standing(url: str, info: Mapping[str, Any], workers: Sequence[Mapping[str, Any]]) -> Standing:
    """`info` is what `GET /server_info` says, `workers` what `GET /workers` does."""
    refusal = "" if info["status"] == "ready" else str(info["status"])
    models = ", ".join(one["id"] for one in info["models"]) or "no model"
    parts = tuple(map(_part, workers))
    troubles = [
        Trouble(
            f"The {one['role']} worker {one['worker']} is {one['state']}"
            + (f": {one['reason']}." if one["reason"] else "."),
            WAYS_OUT[one["state"]].format(worker=one["worker"]),
        )
        for one in workers
        if one["state"] in WAYS_OUT
    ]
    asked_for = {one["role"] for one in workers}
    able = {one["role"] for one in workers if one["state"] in WELL}
    if Role.PREFILL in asked_for and Role.PREFILL not in able:
        troubles.append(
            Trouble(
                "No prefill worker takes requests, so that decode workers compute all prompts themselves.",
                "Start one, or mend those that are there; the router finds it by itself.",
            )
        )
    if refusal:
        way_out = "Start a worker, or mend those that are there." if workers else "Give the router workers."
        troubles.insert(0, Trouble(refusal, way_out))
    return Standing(
        name=models,
        serving=not refusal,
        summary=refusal or f"Requests are answered; Baton {info['version']}.",
        url=f"{url}/v1",
        parts=parts,
        troubles=tuple(troubles),
    )


def _part(row: Mapping[str, Any]) -> Part:
    load = row["load"] or {}
    said = [f"{load.get('running', 0)} running, {load.get('queued', 0)} waiting"] if load else []
    if row["revision"]:
        said.append(f"generation {row['revision']}")
    if row["reason"]:
        said.append(row["reason"])
    state = row["state"]
    well = True if state in WELL else None if state in PASSING else False
    return Part(f"{row['role']} worker", row["worker"], state, well, "; ".join(said))
