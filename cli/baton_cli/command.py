"""
Commands of Typer's that know the flags of other servers.

Before the arguments are read, `--max_num_seqs` becomes `--max-running`, and a flag that the command does
not have is refused in one sentence: with what to use instead, or with what it resembles. So help shows
each setting by one name.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from typer._completion_classes import completion_init
from typer._completion_shared import get_completion_script
from typer.core import TyperCommand

from baton_api.errors import SetupError
from baton_cli import peers

HIDDEN = "--announce-fd"
"""Not for people."""


class ServerCommand(TyperCommand):
    """Starts a server, whose users may come from another one."""

    aliases: ClassVar[Mapping[str, str]]
    """Others' flags and ours."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises SetupError for a flag that is none."""
        valued = {"--help": False}
        for parameter in self.params:
            for flag in (*parameter.opts, *parameter.secondary_opts):
                valued[flag] = not getattr(parameter, "is_flag", False)
        renamed = {**self.aliases, **peers.DEPRECATED}
        aliases = {other: ours for other, ours in renamed.items() if ours in valued}
        return super().parse_args(ctx, list(translate(args, valued, aliases, ctx.info_name or "")))


class WorkerCommand(ServerCommand):
    aliases = peers.flags(peers.WORKER_ALIASES)


class RouterCommand(ServerCommand):
    aliases = peers.flags(peers.ROUTER_ALIASES)


class OperatorCommand(ServerCommand):
    aliases: ClassVar[Mapping[str, str]] = {}


OF: Mapping[str, type[ServerCommand]] = {"router": RouterCommand, "operator": OperatorCommand}
"""Those that start no worker."""


def translate(
    args: list[str], valued: Mapping[str, bool], aliases: Mapping[str, str], command: str
) -> Iterator[str]:
    """
    `args` in our own words. `valued` are our flags and whether each takes a value.

    >>> list(translate(["m", "--Num_seqs", "-8"], {"--max": True}, {"--Num-seqs": "--max"}, "serve"))
    ['m', '--max', '-8']
    """
    rest = iter(args)
    for argument in rest:
        flag, equals, value = argument.partition("=")
        if not flag.startswith("-") or flag in ("-", "--"):
            yield argument
            if flag == "--":
                break  # what follows are no flags
            continue
        name = flag.replace("_", "-")
        name = aliases.get(name, name)
        if name not in valued:
            known = [one for one in (*valued, *aliases) if one.startswith("--") and one != HIDDEN]
            raise SetupError(peers.refusal(flag, known, command))
        yield name + equals + value
        if valued[name] and not equals:
            yield from itertools.islice(rest, 1)
    yield from rest


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
