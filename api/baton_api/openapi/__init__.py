"""The OpenAPI description of what workers and routers serve: paths, requests, answers and errors."""

from __future__ import annotations

from baton_api.openapi.document import document

__all__ = ["document"]
