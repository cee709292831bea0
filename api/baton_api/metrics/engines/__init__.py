"""
The metrics of other engines, mapped to the metrics contract.

Recording rules and the reference are generated from these mappings. A metric without an entry
stays absent for that engine: absent means unknown, never zero.
"""

from __future__ import annotations

from baton_api.metrics.engines import sglang, vllm
from baton_api.metrics.engines.mapping import EngineMapping

MAPPINGS: tuple[EngineMapping, ...] = (vllm.MAPPING, sglang.MAPPING)
"""Every mapped engine."""
