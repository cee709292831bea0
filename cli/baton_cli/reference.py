"""
The reference pages, written from the code itself: settings, modules, errors, limits and metrics.

    python -m baton_cli.reference           writes docs/reference/
    python -m baton_cli.reference --check   fails if a page is not what would be written
"""

from __future__ import annotations

import ast
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
"""Of the repository: the pages are made from its sources, not from an installed wheel."""

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
"""From what all know to what knows all."""

SETTINGS = """\
# Settings

Written by `make fix` from the settings objects; change the docstrings there.

Each setting is a flag and an environment variable; the flag wins. Sizes may be written as `512MiB` or `4GB`.
`baton up` takes the workers' settings too and gives them to all of its workers.
"""

FLAGS_OF_OTHERS = """\
## Flags of SGLang, vLLM and their routers

These are taken under the names that they have there, with `-` or `_` between words. Flags that are the same
in both are not listed.
"""

MODULES = """\
# Modules

Written by `make fix` from the first sentence of each module's docstring; a package knows only those above it.
"""


def pages() -> dict[str, str]:
    """File names under docs/reference and their text."""
    workers = section("Workers: `baton serve`, `baton prefill`, `baton decode`", WorkerSettings)
    routers = section("Routers: `baton router`", RouterSettings)
    operators = section("The operator: `baton operator`", OperatorSettings)
    modules = (line for package in PACKAGES for line in module_lines(ROOT / package))
    return {
        "settings.md": "\n".join([SETTINGS, *workers, *routers, *operators, *flags_of_others()]),
        "modules.md": "\n".join([MODULES, *modules]),
        "errors.md": errors_page(),
        "limits.md": limits_page(),
        "metrics.md": metrics_page(),
    }


def module_lines(package: Path) -> Iterator[str]:
    """The package's own sentence, and one line for each module in it."""
    yield f"## {package.name}\n\n{sentence(package / '__init__.py')}\n"
    for file in sorted(package.rglob("*.py")):
        name = str(file.relative_to(package))
        if name != "__init__.py":
            yield f"- `{name}`: {sentence(file)}"
    yield ""


def sentence(file: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def section(title: str, settings: type[BaseSettings]) -> Iterator[str]:
    yield f"## {title}\n"
    for option in options_of(settings):
        yield from entry(option)


def entry(option: Option) -> Iterator[str]:
    default = f"`{option.default}`" if option.default else "empty"
    yield f"### `{option.flag}` {option.metavar}\n"
    yield f"{option.help}\n"
    also = f" Also: {', '.join(f'`{alias}`' for alias in option.aliases)}." if option.aliases else ""
    yield f"Default: {default}. Environment: `{option.environment}`.{also}\n"


def flags_of_others() -> Iterator[str]:
    """What users of other servers look for first."""
    yield FLAGS_OF_OTHERS
    yield "| there | here | |"
    yield "|---|---|---|"
    yield f"| `--model-path`, `--model` | `MODEL` | {peers.NOTES['model']} |"
    for table in (peers.WORKER_ALIASES, peers.ROUTER_ALIASES):
        for field, others in table.items():
            names = ", ".join(f"`{other}`" for other in others)
            yield f"| {names} | `--{field.replace('_', '-')}` | {peers.NOTES.get(field, '')} |"
    yield "\nThese are refused, each with its reason:\n"
    yield "| there | why not here |"
    yield "|---|---|"
    for refusal in REFUSALS:
        names = ", ".join(f"`{flag}`" for flag in refusal.flags.split())
        yield f"| {names} | {refusal.reason} |"
    yield ""


def main(arguments: list[str], folder: Path = ROOT / "docs" / "reference") -> int:
    """Write the pages, or say which are not current."""
    texts = {folder / name: text for name, text in pages().items()}
    return generated_files.settle(texts, folder.glob("*.md"), check="--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
