"""
The options of `baton cache`: look at the folder of a worker's disk tier or at a shared store, check it and
empty it.

A folder that a worker uses can be read. It can be cleared after the worker has ended; a shared store can be
cleared at any time. The implementation is imported when a command runs, so that `--help` is fast.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton_api.errors import BatonError, SetupError
from baton_cli import help

if TYPE_CHECKING:
    from baton_engine.tiers.objects import BlockObjects

Place = Annotated[
    str,
    typer.Argument(
        help="Folder of --kv-disk-tier, or URL of --kv-shared-store.", metavar="DIR|URL", show_default=False
    ),
]
Output = Annotated[str, typer.Option(help="Output format.", metavar="text|json")]


def status(place: Place, output: Output = "text") -> None:
    """Show how many KV blocks there are, of how many models, and whether a worker uses the folder."""
    as_json = _as_json(output)
    if "://" in place:
        _shared_status(place, as_json)
        return
    from baton_api.setting_types import show_size
    from baton_engine.tiers import slab

    folder = Path(place)
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
    models = _models(found["models"])
    typer.echo(
        f"{folder}: {found['blocks']} of {found['slots']} slots have KV blocks of {models}, "
        f"{show_size(found['block_bytes'])} each; {show_size(found['bytes'])} in all."
    )
    typer.echo("A worker uses it." if found["in_use"] else "No worker uses it.")


def verify(place: Place, output: Output = "text") -> None:
    """Read all KV blocks and compare their checksums. Exit status 1: some are corrupt."""
    as_json = _as_json(output)
    from baton_engine.tiers import slab

    try:
        if "://" in place:
            objects = _objects(place)
            checked = slab.Checked()
            for entry in objects.list():
                one = objects.check(entry)
                checked = slab.Checked(
                    checked.good + one.good, checked.corrupt + one.corrupt, checked.changed + one.changed
                )
        else:
            with slab.Slab.reading(Path(place)) as folder:
                checked = folder.verify()
    except OSError as error:
        raise _unreadable(place, error) from error
    if as_json:
        found = {"good": checked.good, "corrupt": checked.corrupt, "changed": checked.changed}
        typer.echo(json.dumps(found))
    else:
        changed = f", {checked.changed} changed meanwhile" if checked.changed else ""
        typer.echo(f"{place}: {checked.good} KV blocks are right, {checked.corrupt} are corrupt{changed}.")
    if checked.corrupt:
        if not as_json:
            typer.echo("A worker computes corrupt blocks, and writes them again. Check the storage.")
        raise typer.Exit(1)


def clear(place: Place, output: Output = "text") -> None:
    """Delete all KV blocks. Refused for a folder of --kv-disk-tier while a worker uses it."""
    as_json = _as_json(output)
    from baton_api.setting_types import show_size
    from baton_engine.tiers import slab

    try:
        if "://" in place:
            objects = _objects(place)
            entries = objects.list()
            objects.delete(entries)
            freed = sum(entry.size for entry in entries)
        else:
            freed = slab.delete(Path(place))
    except OSError as error:
        raise BatonError(f"Cannot clear {place}: {error}.") from error
    typer.echo(json.dumps({"freed_bytes": freed}) if as_json else f"{place}: {show_size(freed)} are free.")


def add_to(app: typer.Typer) -> None:
    """Add the commands to `baton`."""
    commands = typer.Typer(
        no_args_is_help=True,
        cls=help.Group,
        help="Look at the folder of a worker's disk tier or at a shared store, or empty it.",
    )
    for command in (status, verify, clear):
        commands.command(command.__name__, cls=help.Command)(command)
    app.add_typer(commands, name="cache", rich_help_panel="Look at a service or a machine")


def _shared_status(url: str, as_json: bool) -> None:
    from baton_api.setting_types import show_size

    try:
        entries = _objects(url).list()
    except OSError as error:
        raise _unreadable(url, error) from error
    found = {
        "objects": len(entries),
        "bytes": sum(entry.size for entry in entries),
        "models": len({entry.namespace for entry in entries}),
        "oldest_s": round(time.time() - min(entry.written_at for entry in entries)) if entries else 0,
    }
    if as_json:
        typer.echo(json.dumps(found))
        return
    models, hours = _models(found["models"]), found["oldest_s"] / 3600
    typer.echo(
        f"{url}: {found['objects']} objects with KV blocks of {models}, "
        f"{show_size(found['bytes'])} in all; the oldest was written {hours:.1f} hours ago."
    )


def _objects(url: str) -> BlockObjects:
    """Return the objects of all models. Raises SetupError, and OSError if the folder does not exist."""
    from baton_engine.tiers.objects import BlockObjects, opened

    store = opened(url)
    if isinstance(store, Path) and not store.is_dir():
        raise NotADirectoryError(f"{store} is no folder")
    return BlockObjects(store, bytes(16), 1)


def _models(count: int) -> str:
    return "1 model" if count == 1 else f"{count} models"


def _as_json(output: str) -> bool:
    if output not in ("text", "json"):
        raise SetupError(f"Invalid --output {output!r}. Expected text or json.")
    return output == "json"


def _unreadable(place: object, error: OSError) -> BatonError:
    return BatonError(f"Cannot read {place}: {error}.")
