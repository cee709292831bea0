"""
LeaderWorkerSet: the API of groups of pods, of which each is one worker on several nodes.

The first pod of a group is its leader. https://lws.sigs.k8s.io
"""

from __future__ import annotations

GROUP_API, GROUP_KIND = "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"

INSTALLATION = "https://lws.sigs.k8s.io/docs/installation"

WORKER_INDEX, LEADER = "leaderworkerset.sigs.k8s.io/worker-index", "0"
"""Label of the pods of a group, and its value on the leader."""
