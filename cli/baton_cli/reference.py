"""
The reference page of all settings, written from the settings objects themselves.

    python -m baton_cli.reference           writes docs/reference/settings.md
    python -m baton_cli.reference --check   fails if the page is not what would be written
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic_settings import BaseSettings

from baton_cli.options import Option, options_of
from baton_engine.settings import WorkerSettings
from baton_router.settings import RouterSettings

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"

OPENING = """\
# Settings

Written by `python -m baton_cli.reference` from the settings objects; change the docstrings there.

Each setting is a flag and an environment variable; the flag wins. Sizes may be written as `512MiB` or `4GB`.
`baton up` takes the workers' settings too and gives them to all of its workers.
"""


def page() -> str:
    """The whole page."""
    workers = section("Workers: `baton serve`, `baton prefill`, `baton decode`", WorkerSettings)
    routers = section("Routers: `baton router`", RouterSettings)
    return "\n".join([OPENING, *workers, *routers])


def section(title: str, settings: type[BaseSettings]) -> Iterator[str]:
    yield f"## {title}\n"
    for option in options_of(settings):
        yield from entry(option)


def entry(option: Option) -> Iterator[str]:
    default = f"`{option.default}`" if option.default else "empty"
    yield f"### `{option.flag}` {option.metavar}\n"
    yield f"{option.help}\n"
    yield f"Default: {default}. Environment: `{option.environment}`.\n"


def main(arguments: list[str]) -> int:
    """Write the page, or say whether it is current."""
    text = page()
    if "--check" not in arguments:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(text)
        return 0
    if PAGE.is_file() and PAGE.read_text() == text:
        return 0
    print(f"{PAGE.name} is not current: run `make fix`.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
