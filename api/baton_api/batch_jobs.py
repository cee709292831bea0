"""
What router, operator and runners agree on about batches that are run by Jobs of Kubernetes.

A Job is called like its BatchJob, and its pods like their Job: Kubernetes signs a pod's name into the token
that it gives the pod, and from the name follows for which BatchJob the pod works.
"""

from __future__ import annotations

import re

LABEL = "baton.dev/batch-job"
"""On a Job and its pods: the name of their BatchJob."""

METADATA = "baton.dev/batch-job"
"""In the metadata of a batch that was made by a BatchJob: the BatchJob's name and uid, as `name/uid`."""

ROLE = "batch"
"""The role of runners, in labels."""

NAME_LIMIT = 50
"""Characters of a BatchJob's name: a pod's has up to 13 more."""

ROUTER = "baton-router"
"""Who manages a BatchJob that a router has made, in labels: it is deleted some time after its end."""

_POD = re.compile(r"(?P<job>.+)-[0-9]+-[a-z0-9]{5}")


def account(service: str) -> str:
    """The ServiceAccount of all runners of a service, which has no rights."""
    return f"{service}-batches"


def audience(namespace: str, service: str) -> str:
    """For whom tokens of a service's runners are: its routers, and no API server."""
    return f"baton-batches:{namespace}:{service}"


def name_of(batch: str) -> str:
    """
    The BatchJob that routers make for a batch.

    >>> name_of("batch_0a1b")
    'batch-0a1b'
    """
    return batch.replace("_", "-").lower()


def job_of(pod: str) -> str:
    """
    The BatchJob for which a pod works; empty for a pod that is of no Indexed Job.

    >>> job_of("batch-0a1b-0-x7k2p"), job_of("chat-router-7d9f")
    ('batch-0a1b', '')
    """
    found = _POD.fullmatch(pod)
    return found["job"] if found else ""
