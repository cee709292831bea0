"""What there is to say of a service, wherever it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """Something that the service is made of, or a statement about it."""

    kind: str
    """Such as `decode worker`, `generation`, `condition`."""
    name: str
    state: str
    well: bool | None
    """None: neither good nor bad."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that is wrong."""

    what: str
    way_out: str


@dataclass(frozen=True, slots=True)
class Standing:
    """One service."""

    name: str
    serving: bool
    """Whether requests are answered."""
    summary: str
    """How it is, in a sentence."""
    url: str = ""
    parts: tuple[Part, ...] = ()
    troubles: tuple[Trouble, ...] = ()

    @property
    def well(self) -> bool:
        """Whether requests are answered and nothing is wrong."""
        return self.serving and not self.troubles
