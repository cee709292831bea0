"""
The properties of a worker that decide whether it forms pairs, as text.

`Load.compatibility` of another engine's worker is such a text. Workers with equal texts form pairs; the
differences of others say why not.
"""

from __future__ import annotations

from baton_api.engines import EngineKind

_SEPARATOR = "; "


def layout_text(engine: EngineKind, properties: dict[str, str]) -> str:
    """
    Return the engine and the properties as one text.

    >>> layout_text(EngineKind.VLLM, {"version": "0.32.0", "block size": "16"})
    'engine: vllm; version: 0.32.0; block size: 16'
    """
    return _SEPARATOR.join(f"{name}: {value}" for name, value in {"engine": engine, **properties}.items())


def layout_differences(one: str, other: str) -> list[tuple[str, str, str]]:
    """
    Return name and both values of each property that differs.

    >>> layout_differences("engine: vllm; block size: 16", "engine: vllm; block size: 32")
    [('block size', '16', '32')]
    """
    ours, theirs = _properties(one), _properties(other)
    names = dict.fromkeys((*ours, *theirs))
    return [
        (name, ours.get(name, "unknown"), theirs.get(name, "unknown"))
        for name in names
        if ours.get(name) != theirs.get(name)
    ]


def _properties(layout: str) -> dict[str, str]:
    """The properties of a layout; a digest, as Baton's workers report it, is one property."""
    if ": " not in layout:
        return {"KV layout": layout}
    pairs = (one.partition(": ") for one in layout.split(_SEPARATOR))
    return {name: value for name, _, value in pairs}
