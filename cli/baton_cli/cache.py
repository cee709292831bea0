"""
The options of `baton cache`: look at the folder of a worker's disk tier, check it and empty it.

A folder that a worker uses can be read. It can be cleared after the worker has ended. The implementation is
imported when a command runs, so that `--help` is fast.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from baton_api.errors import BatonError, SetupError
from baton_cli import help

Folder = Annotated[Path, typer.Argument(help="Folder of --kv-disk-tier.", metavar="DIR", show_default=False)]
Output = Annotated[str, typer.Option(help="Output format.", metavar="text|json")]


def status(folder: Folder, output: Output = "text") -> None:
    """Show how many KV blocks DIR has, of how many models, and whether a worker uses it."""
    as_json = _as_json(output)
    from baton_api.setting_types import show_size
    from baton_engine.tiers import slab

    try:
        with slab.Slab.reading(folder) as one:
            headers = one.headers().values()
            found: dict[str, Any] = {
                "in_use": slab.in_use(folder),
                "blocks": len(headers),
                "slots": one.slots,
                "block_bytes": one.block_bytes,
                "bytes": one.bytes,
                "models": len({header.namespace for header in headers}),
            }
    except OSError as error:
        raise _unreadable(folder, error) from error
    if as_json:
        typer.echo(json.dumps(found))
        return
    models = "1 model" if found["models"] == 1 else f"{found['models']} models"
    typer.echo(
        f"{folder}: {found['blocks']} of {found['slots']} slots have KV blocks of {models}, "
        f"{show_size(found['block_bytes'])} each; {show_size(found['bytes'])} in all."
    )
    typer.echo("A worker uses it." if found["in_use"] else "No worker uses it.")


def verify(folder: Folder, output: Output = "text") -> None:
    """Read all KV blocks of DIR and compare their checksums. Exit status 1: some are corrupt."""
    as_json = _as_json(output)
    from baton_engine.tiers import slab

    try:
        with slab.Slab.reading(folder) as one:
            checked = one.verify()
    except OSError as error:
        raise _unreadable(folder, error) from error
    if as_json:
        found = {"good": checked.good, "corrupt": checked.corrupt, "changed": checked.changed}
        typer.echo(json.dumps(found))
    else:
        changed = f", {checked.changed} changed meanwhile" if checked.changed else ""
        typer.echo(f"{folder}: {checked.good} KV blocks are right, {checked.corrupt} are corrupt{changed}.")
    if checked.corrupt:
        if not as_json:
            typer.echo("A worker computes corrupt blocks, and writes them again. Check the disk.")
        raise typer.Exit(1)


def clear(folder: Folder, output: Output = "text") -> None:
    """Delete all KV blocks of DIR. Refused while a worker uses it."""
    as_json = _as_json(output)
    from baton_api.setting_types import show_size
    from baton_engine.tiers import slab

    try:
        freed = slab.delete(folder)
    except OSError as error:
        raise BatonError(f"Cannot clear {folder}: {error}.") from error
    typer.echo(json.dumps({"freed_bytes": freed}) if as_json else f"{folder}: {show_size(freed)} are free.")


def add_to(app: typer.Typer) -> None:
    """Add the commands to `baton`."""
    commands = typer.Typer(
        no_args_is_help=True, cls=help.Group, help="Look at the folder of a worker's disk tier, or empty it."
    )
    for command in (status, verify, clear):
        commands.command(command.__name__, cls=help.Command)(command)
    app.add_typer(commands, name="cache", rich_help_panel="Look at a service or a machine")


def _as_json(output: str) -> bool:
    if output not in ("text", "json"):
        raise SetupError(f"Invalid --output {output!r}. Expected text or json.")
    return output == "json"


def _unreadable(folder: Path, error: OSError) -> BatonError:
    return BatonError(f"Cannot read {folder}: {error}.")
