"""
Completion in bash, zsh and fish, by Typer's own means.

A shell that completes starts `baton` with the words so far in its environment. Which command they name has to
be known before the commands are made, as only that one's options are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from typer._completion_classes import completion_init
from typer._completion_shared import get_completion_script

from baton_api.errors import SetupError

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_BATON_COMPLETE"


def script(shell: str) -> str:
    """To be sourced by the shell. Raises SetupError for another one."""
    if shell not in SHELLS:
        raise SetupError(f"{shell!r} is none of {', '.join(SHELLS)}.")
    return get_completion_script(prog_name="baton", complete_var=VARIABLE, shell=shell)


def words(environment: Mapping[str, str] = os.environ) -> list[str]:
    """What was typed after `baton`, if a shell wants to know how it may go on."""
    if VARIABLE not in environment:
        return []
    completion_init()  # Typer does it by itself only where it adds options of its own
    typed = environment.get("_TYPER_COMPLETE_ARGS") or environment.get("COMP_WORDS", "")
    return typed.split()[1:]
