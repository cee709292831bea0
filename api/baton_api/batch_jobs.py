"""
What the router, the operator, runners and the command line agree on about batches: names, and the window.

A Job has the name of its BatchJob, and its pods have names that start with it. Kubernetes signs the pod's
name into the pod's token, so the token identifies the BatchJob.

`completion_window` has one value in OpenAI's API, and its clients expect that others are rejected. So a
batch with another window has it in a field of Baton's.
"""

from __future__ import annotations

import re

LABEL = "baton.dev/batch-job"
"""Label of a Job and its pods: the name of their BatchJob."""

METADATA = "baton.dev/batch-job"
"""Metadata key of a batch that a BatchJob created: `name/uid` of the BatchJob."""

ROLE = "batch"
"""Role label of runners."""

NAME_LIMIT = 50
"""Maximum characters of a BatchJob's name. The name of a pod has up to 13 more."""

ROUTER = "baton-router"
"""Value of the managed-by label of a BatchJob that a router created. It is deleted some time after its
end."""

_POD = re.compile(r"(?P<job>.+)-[0-9]+-[a-z0-9]{5}")


def account(service: str) -> str:
    """Return the ServiceAccount of a service's runners, which has no permissions."""
    return f"{service}-batches"


def audience(namespace: str, service: str) -> str:
    """Return the audience of the tokens of a service's runners: its routers, not the API server."""
    return f"baton-batches:{namespace}:{service}"


def name_of(batch: str) -> str:
    """
    Return the name of the BatchJob that routers create for a batch.

    >>> name_of("batch_0a1b")
    'batch-0a1b'
    """
    return batch.replace("_", "-").lower()


def job_of(pod: str) -> str:
    """
    Return the BatchJob of a runner's pod, or "" for other pods.

    >>> job_of("batch-0a1b-0-x7k2p"), job_of("chat-router-7d9f")
    ('batch-0a1b', '')
    """
    match = _POD.fullmatch(pod)
    return match["job"] if match else ""


DAY = "24h"
"""The only value of `completion_window`."""

OWN = "baton_completion_window"
"""Field of a new batch with another window, from 60s to 30d."""


def window_fields(window: str) -> dict[str, str]:
    """
    Return the fields of a new batch that ask for `window`.

    >>> window_fields("90m")
    {'completion_window': '24h', 'baton_completion_window': '90m'}
    """
    return {"completion_window": DAY} | ({} if window == DAY else {OWN: window})
