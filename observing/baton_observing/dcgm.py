"""
Metrics of NVIDIA's DCGM exporter, which the GPU operator runs: what panels about GPUs are made of.

Its series have the labels `namespace` and `pod` of whoever uses a GPU if its ServiceMonitor has
`honorLabels: true`. A worker's name is its pod's, so that a dashboard's choice of workers is one of GPUs.
"""

from __future__ import annotations

CHOSEN = 'cluster=~"$cluster", namespace=~"$namespace", pod=~"$worker"'

USED = "DCGM_FI_DEV_GPU_UTIL"
"""Percent of the time in which some kernel ran."""

TENSOR_ACTIVE = "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"
"""Share of the time in which tensor cores were at work; not on all GPUs, nor with MIG."""

MEMORY_USED, MEMORY_FREE = "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE"
"""MiB of the frame buffer."""

XID = "DCGM_FI_DEV_XID_ERRORS"
"""Code of the last error; 0 if there was none."""

METRICS = frozenset({USED, TENSOR_ACTIVE, MEMORY_USED, MEMORY_FREE, XID})


def by_pod(metric: str, how: str = "avg") -> str:
    """Of the chosen workers' GPUs, one value for each worker."""
    return f"{how} by (pod) ({metric}{{{CHOSEN}}})"
