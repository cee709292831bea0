"""Values of labels that others choose: only so many of them become series of their own."""

from __future__ import annotations

OTHER = "other"


class Names:
    """The first so many different names; all that come later are one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def label(self, name: str) -> str:
        known = self._known
        if name in known:
            return name
        if len(known) >= self._limit:
            return OTHER
        known.add(name)
        return name

    def known(self, name: str) -> str:
        """The same for a name that nobody vouches for: it becomes none of them."""
        return name if name in self._known else OTHER
