"""What is installed: kernels, packages, and variables that nobody reads."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from baton_cli.doctor.findings import Finding, Level, good, note
from baton_cli.doctor.machine import Machine


def kernels(machine: Machine) -> Iterator[Finding]:
    if not machine.kernels.installed:
        yield note("kernels", "not installed", "This machine can route and operate, but not be a worker.")
    elif not machine.kernels.trouble:
        yield good("kernels", machine.kernels.means)
    else:
        yield Finding(
            "kernels",
            Level.WARNING,
            machine.kernels.trouble,
            "a C compiler whose library passes its own test",
            "On a CPU, torch serves instead, at about half the speed. On an accelerator it does not matter.",
            "apt install gcc, or pip install 'baton[kernels]'; CC and BATON_KERNELS may say otherwise.",
        )


def versions(machine: Machine) -> Iterator[Finding]:
    wrong = [one for one in machine.packages if not one.fits]
    if not wrong:
        yield good("packages", f"{len(machine.packages)} that fit")
    for one in wrong:
        yield Finding(
            "packages",
            Level.ERROR,
            f"{one.name} {one.version or 'is not installed'}",
            f"{one.name}{one.wanted}",
            "Baton was not made for this version.",
            f"pip install '{one.name}{one.wanted}'",
        )


def variables(machine: Machine) -> Iterator[Finding]:
    """A variable that nobody reads is a setting that somebody believes in."""
    ours = [name for name in machine.environment if name.startswith("BATON_")]
    unread = sorted(name for name in ours if name not in machine.known)
    if not unread:
        yield good("variables", f"{len(ours)} of Baton's are set")
    for name in unread:
        close = difflib.get_close_matches(name, machine.known, n=1)
        yield Finding(
            "variables",
            Level.WARNING,
            f"{name} is set",
            "a variable that Baton reads",
            "Nobody reads it, so that what it says does not count.",
            f"Did you mean {close[0]}?" if close else "Unset it; docs/reference/settings.md lists them all.",
        )
