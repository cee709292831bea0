"""
Which keys are to be looked at when an object has changed: a pure function of the change.

A key only says whose turn it is. What is to be done is found out from what is there when the turn comes.
"""

from __future__ import annotations

from baton_operator import batches
from baton_operator.cache import Change
from baton_operator.work_queue import Key

SCALING = "Scaling"
"""The kind of keys that the autoscaler looks at. They wait in a queue of their own: to query metrics may take
long."""

GATHER_S = 0.5
"""Seconds for which changes are gathered: they come in showers."""


def woken(change: Change) -> list[tuple[Key, float]]:
    """Keys, each with the seconds after which it is to be looked at."""
    namespace, name = change.namespace, change.name
    service: Key = ("InferenceService", namespace, change.service)
    match change.resource.kind:
        case "InferenceService":
            if change.respecified:
                return [(service, 0.0), ((SCALING, namespace, name), 0.0)]
            return [(service, GATHER_S)]
        case "BatchJob":
            news = change.manifest is None or batches.is_news(change.manifest)
            return [(("BatchJob", namespace, name), GATHER_S if news else batches.COUNTING_S)]
        case "LoraAdapter":
            return [(("LoraAdapter", namespace, name), GATHER_S)]
        case "Gateway":
            # Controllers count routes in its status, which changes no URL.
            return [(("InferenceService", *one), GATHER_S) for one in change.routes if change.respecified]
    if change.batch_job:
        return [(("BatchJob", namespace, change.batch_job), GATHER_S)]
    return [(service, GATHER_S)] if change.service else []
