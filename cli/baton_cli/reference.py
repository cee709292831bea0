"""
Write the reference pages from the code: settings, modules, errors, limits and metrics.

    python -m baton_cli.reference           writes docs/reference/
    python -m baton_cli.reference --check   fails if a page differs from what would be written
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic_settings import BaseSettings

from baton_api import generated_files
from baton_cli import peers
from baton_cli.api_reference import errors_page, limits_page
from baton_cli.metrics_reference import metrics_page
from baton_cli.options import Option, options_of
from baton_cli.refusals import REFUSALS
from baton_engine.settings import WorkerSettings
from baton_operator.settings import OperatorSettings
from baton_router.settings import RouterSettings

ROOT = Path(__file__).parents[2]
"""The repository. The pages are made from its sources, not from an installed wheel."""

PACKAGES = (
    "api/baton_api",
    "runtime/engine/baton_engine",
    "runtime/prefill/baton_prefill",
    "runtime/decode/baton_decode",
    "router/baton_http",
    "router/baton_batches",
    "router/baton_router",
    "operator/baton_operator",
    "observing/baton_observing",
    "cli/baton_cli",
)
"""Each package imports only packages above it."""

SETTINGS = """\
# Settings

Generated from the settings classes by `make fix`. Do not edit.

Every setting is a flag and an environment variable; the flag takes precedence. Booleans are switches:
`--flag` or `--no-flag`, and `true` or `false` in the environment. Sizes accept units: `512MiB`, `4GB`.
Durations are in seconds. `baton up` and `baton demo` accept the settings of workers and pass
them to all workers.
"""

ALIASES = """\
## Flags of SGLang, vLLM and their routers

Baton accepts these flags as aliases, with `-` or `_` between words. Flags with the same name and meaning are
not listed.
"""

MODULES = """\
# Modules

Generated from the first sentence of each module's docstring by `make fix`. Do not edit. A package imports
only packages above it.
"""


def pages() -> dict[str, str]:
    """Return the pages: file name under docs/reference, and text."""
    workers = section("Workers", "`baton serve`, `baton prefill`, `baton decode`", WorkerSettings)
    routers = section("Router", "`baton router`", RouterSettings)
    operators = section("Operator", "`baton operator`", OperatorSettings)
    modules = (line for package in PACKAGES for line in module_lines(ROOT / package))
    return {
        "settings.md": "\n".join([SETTINGS, *workers, *routers, *operators, *peer_flags()]),
        "modules.md": "\n".join([MODULES, *modules]),
        "errors.md": errors_page(),
        "limits.md": limits_page(),
        "metrics.md": metrics_page(),
    }


def module_lines(package: Path) -> Iterator[str]:
    """Yield the summary of a package and of each of its modules."""
    yield f"## {package.name}\n\n{sentence(package / '__init__.py')}\n"
    for file in sorted(package.rglob("*.py")):
        name = str(file.relative_to(package))
        if name != "__init__.py":
            yield f"- `{name}`: {sentence(file)}"
    yield ""


def sentence(file: Path) -> str:
    """Return the first paragraph of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def section(title: str, commands: str, settings: type[BaseSettings]) -> Iterator[str]:
    """Yield the settings of a class by group."""
    options = list(options_of(settings))
    yield f"## {title}\n\nCommands: {commands}.\n"
    yield "| group | settings |\n|---|---|"
    for group, members in itertools.groupby(options, lambda option: option.group):
        yield f"| {group} | {', '.join(f'`{option.flag}`' for option in members)} |"
    for group, members in itertools.groupby(options, lambda option: option.group):
        yield f"\n### {title}: {group}\n"
        for option in members:
            yield from entry(option)


def entry(option: Option) -> Iterator[str]:
    """Yield a setting: flag, help, default, range, variable and aliases."""
    metavar = "" if option.switch else f" {option.metavar}"
    yield f"#### `{option.usage}`{metavar}\n"
    yield f"{option.help}\n"
    facts = [f"Default: `{option.default}`" if option.default else "Default: empty"]
    facts += [f"Range: {option.range}"] if option.range else []
    facts += [f"Environment: `{option.environment}`"]
    facts += [f"Aliases: {', '.join(f'`{alias}`' for alias in option.aliases)}"] if option.aliases else []
    yield f"{'. '.join(facts)}.\n"


def peer_flags() -> Iterator[str]:
    """Yield the flags of other servers: aliases, then rejected flags with the reason."""
    yield ALIASES
    yield "| their flag | Baton's flag | notes |"
    yield "|---|---|---|"
    yield f"| `--model-path`, `--model` | `MODEL` | {peers.NOTES['model']} |"
    for table in (peers.WORKER_ALIASES, peers.ROUTER_ALIASES):
        for field, others in table.items():
            names = ", ".join(f"`{other}`" for other in others)
            yield f"| {names} | `--{field.replace('_', '-')}` | {peers.NOTES.get(field, '')} |"
    yield "\nBaton rejects these flags, with an alternative or a reason:\n"
    yield "| their flags | reason |"
    yield "|---|---|"
    for refusal in REFUSALS:
        names = ", ".join(f"`{flag}`" for flag in refusal.flags.split())
        yield f"| {names} | {refusal.reason} |"
    yield ""


def main(arguments: list[str], folder: Path = ROOT / "docs" / "reference") -> int:
    """Write the pages. With `--check`, only name those that differ."""
    texts = {folder / name: text for name, text in pages().items()}
    return generated_files.settle(texts, folder.glob("*.md"), check="--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
