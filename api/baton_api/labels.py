"""Labels and annotations of Kubernetes objects on which operator and router agree."""

from __future__ import annotations

SERVICE = "baton.dev/service"
"""Name of the InferenceService."""

ROLE = "baton.dev/role"
"""prefill, decode, both or router."""

REVISION = "baton.dev/revision"
"""Revision of the workers. Only workers of the same revision form a pair."""

ENGINE = "baton.dev/engine"
"""Engine of the workers, as in `baton_api.workers`. Absent: the router asks them."""

MANAGED_BY = "app.kubernetes.io/managed-by"
OPERATOR = "baton"
"""Value of MANAGED_BY on every object that the operator created."""
