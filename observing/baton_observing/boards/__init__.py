"""The dashboards, from what clients see to what stands behind it."""

from __future__ import annotations

from baton_observing.boards import batches, operator, relay, router, scaling, service

BOARDS = (service.BOARD, relay.BOARD, router.BOARD, scaling.BOARD, batches.BOARD, operator.BOARD)
