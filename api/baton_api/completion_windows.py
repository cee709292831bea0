"""
The completion window of a batch: OpenAI's one value, and Baton's own field for others.

Clients of OpenAI's API expect that `completion_window` other than 24h is rejected.
"""

from __future__ import annotations

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
