"""Labels and annotations of Kubernetes objects on which operator and router agree."""

from __future__ import annotations

SERVICE = "baton.dev/service"
"""Name of the InferenceService."""

ROLE = "baton.dev/role"
"""prefill, decode, both or router."""

REVISION = "baton.dev/revision"
"""The generation of workers: only workers of one generation can be a pair."""

MANAGED_BY = "app.kubernetes.io/managed-by"
OPERATOR = "baton"
"""The value of MANAGED_BY on everything that the operator has made."""
