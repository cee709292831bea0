"""
Parse the command line: aliases of other servers' flags, unknown flags, and shell completion.

Aliases such as `--max_num_seqs` are translated before Typer parses the arguments, so help shows each setting
under one name. An unknown flag is rejected with an alternative or a similar flag.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from typer._completion_classes import completion_init
from typer._completion_shared import get_completion_script

from baton_api.errors import SetupError
from baton_cli import help, peers

HIDDEN = "--announce-fd"
"""For the supervisor of `baton up`."""


class ServerCommand(help.Command):
    """A command that starts a server."""

    aliases: ClassVar[Mapping[str, str]]
    """Flags of other servers, and Baton's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raises SetupError for an unknown flag."""
        valued = dict.fromkeys(help.NAMES, False)
        for parameter in self.params:
            for flag in (*parameter.opts, *parameter.secondary_opts):
                valued[flag] = not getattr(parameter, "is_flag", False)
        aliases = {other: ours for other, ours in self.aliases.items() if ours in valued}
        return super().parse_args(ctx, list(translate(args, valued, aliases, ctx.info_name or "")))


class WorkerCommand(ServerCommand):
    aliases = peers.flags(peers.WORKER_ALIASES)


class RouterCommand(ServerCommand):
    aliases = peers.flags(peers.ROUTER_ALIASES)


class OperatorCommand(ServerCommand):
    aliases: ClassVar[Mapping[str, str]] = {}


OF: Mapping[str, type[ServerCommand]] = {"router": RouterCommand, "operator": OperatorCommand}
"""Commands other than those of workers."""


def translate(
    args: list[str], valued: Mapping[str, bool], aliases: Mapping[str, str], command: str
) -> Iterator[str]:
    """
    Translate aliases. `valued` are Baton's flags and whether each takes a value.

    >>> list(translate(["m", "--Num_seqs", "-8"], {"--max": True}, {"--Num-seqs": "--max"}, "serve"))
    ['m', '--max', '-8']
    """
    rest = iter(args)
    for argument in rest:
        flag, equals, value = argument.partition("=")
        if not flag.startswith("-") or flag in ("-", "--"):
            yield argument
            if flag == "--":
                break  # the rest are arguments
            continue
        name = flag.replace("_", "-")
        name = aliases.get(name, name)
        if name not in valued:
            flags = [known for known in (*valued, *aliases) if known.startswith("--") and known != HIDDEN]
            raise SetupError(peers.refusal(flag, flags, command))
        yield name + equals + value
        if valued[name] and not equals:
            yield from itertools.islice(rest, 1)
    yield from rest


SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_BATON_COMPLETE"


def script(shell: str) -> str:
    """Return the completion script of a shell. Raises SetupError for an unsupported shell."""
    if shell not in SHELLS:
        raise SetupError(f"Unsupported shell {shell!r}. Expected one of {', '.join(SHELLS)}.")
    return get_completion_script(prog_name="baton", complete_var=VARIABLE, shell=shell)


def words(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the words after `baton` while a shell requests completions."""
    if VARIABLE not in environment:
        return []
    completion_init()  # Typer calls it only if it adds its own completion options
    typed = environment.get("_TYPER_COMPLETE_ARGS") or environment.get("COMP_WORDS", "")
    return typed.split()[1:]
