"""
Write the reference pages from the code: settings, HTTP API, errors, metrics, custom resources and others.

    python -m docs.generators.reference           writes docs/reference/ and the tables of supported models
    python -m docs.generators.reference --check   fails if a page differs from what would be written
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic_settings import BaseSettings

from baton_api import generated_files, limits, metrics
from baton_api.errors import (
    CODES,
    MESSAGE_LIMIT,
    RETRY_LIMIT_S,
    RETRY_SPREAD_S,
    BatonError,
    ClientError,
    InvalidRequest,
)
from baton_api.metrics import Label, Metric
from baton_cli import peers
from baton_cli.options import Option, options_of
from baton_engine.settings import WorkerSettings
from baton_operator.settings import OperatorSettings
from baton_router.settings import RouterSettings
from docs.generators import model_tables
from docs.generators.engine_reference import engines_section
from docs.generators.schema_reference import custom_resources_page, http_api_page

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
        "http-api.md": http_api_page(),
        "custom-resources.md": custom_resources_page(ROOT / "crds"),
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
    """Yield the flags of other servers: aliases, then what replaces others."""
    yield ALIASES
    yield "| their flag | Baton's flag | notes |"
    yield "|---|---|---|"
    yield f"| `--model-path`, `--model` | `MODEL` | {peers.NOTES['model']} |"
    for table in (peers.WORKER_ALIASES, peers.ROUTER_ALIASES):
        for field, others in table.items():
            names = ", ".join(f"`{other}`" for other in others)
            yield f"| {names} | `--{field.replace('_', '-')}` | {peers.NOTES.get(field, '')} |"
    yield "\nBaton rejects other flags. For the frequent ones the error says what to do:\n"
    yield "| their flag | instead |"
    yield "|---|---|"
    for flag, instead in peers.INSTEAD.items():
        yield f"| `{flag}` | {instead} |"
    yield ""


ERRORS = f"""\
# Errors

Generated from `baton_api.errors` by `make fix`. Do not edit.

Every error is JSON in OpenAI's format: the body of a response, or an event of a stream that has begun.

```json
{{"error": {{"message": "...", "type": "invalid_request_error", "param": "n", "code": "invalid_type"}}}}
```

All four fields exist; `param` and `code` may be null. A message has at most {MESSAGE_LIMIT:,} characters.
`Retry-After` is a whole number of seconds up to {RETRY_LIMIT_S}. It is spread randomly over {RETRY_SPREAD_S}
seconds, so that clients rejected together do not retry together.
"""

LIMITS = """\
# Limits of a request

Generated from `baton_api.limits` by `make fix`. Do not edit.

A request beyond a limit is rejected before any computation, with the status and code of the row and the
field as `param`. The size of the body limits all other fields. Numbers must be finite and within double
precision; strings must be valid Unicode without lone surrogates. Of duplicate members the last one counts.
"""


def errors_page() -> str:
    return "\n".join([ERRORS, *_classes(), *_codes()])


def limits_page() -> str:
    rows = ["| what | where | from | to | beyond |", "|---|---|---|---|---|"]
    rows += ["| " + " | ".join(row) + " |" for row in limits.rows()]
    return "\n".join([LIMITS, *rows, ""])


def _classes() -> Iterator[str]:
    yield "| class | status | type | code | param | meaning | what to do |"
    yield "|---|---|---|---|---|---|---|"
    for error in descendants(BatonError):
        meaning, advice = explained(error)
        code = "see below" if error is InvalidRequest else _shown(error, "code")
        param = "the field" if issubclass(error, InvalidRequest) else _shown(error, "param")
        cells = (error.__name__, str(error.status), f"`{error.type}`", code, param, meaning, advice)
        yield f"| {' | '.join(cells)} |"
    yield ""


def _codes() -> Iterator[str]:
    yield "## Codes of InvalidRequest\n"
    yield "Errors without a code: fields contradict each other, or the body is not a JSON object.\n"
    yield "| code | meaning |"
    yield "|---|---|"
    for code, meaning in CODES.items():
        yield f"| `{code}` | {meaning} |"
    yield ""


def descendants(root: type[BatonError]) -> Iterator[type[BatonError]]:
    """Yield the subclasses of an error that are raised, depth first."""
    for child in root.__subclasses__():
        if child.__module__.startswith("baton_api.errors"):
            if child is not ClientError:
                yield child
            yield from descendants(child)


def explained(error: type[BatonError]) -> tuple[str, str]:
    """Return the meaning of an error and the advice, from its docstring."""
    meaning, _, advice = inspect.cleandoc(error.__doc__ or "").partition("\n\n")
    return " ".join(meaning.split()), " ".join(advice.split())


def _shown(error: type[BatonError], name: str) -> str:
    value = getattr(error, name)
    return "" if value is None else f"`{value}`"


METRICS = """\
# Metrics

Generated from `baton_api.metrics` by `make fix`. Do not edit.

Processes expose metrics at `GET /metrics`: workers on their API port without a key, routers on
`--metrics-port` without a key or on their API port to admins, the operator on its health port. Times are in
seconds. A router with several processes adds the label `process`.
[Observability](../guides/observability.md) names the metrics to start with.
"""

PARTS = {
    "Every process": "baton_build_",
    "Workers": "baton_worker_",
    "Routers": "baton_router_",
    "Batches": "baton_batch",
    "Operator": "baton_operator_",
    "Autoscaler": "baton_autoscaler_",
}
"""Sections, and the prefix of their metrics."""


def metrics_page() -> str:
    parts = (line for title, begins in PARTS.items() for line in _part(title, begins))
    return "\n".join([METRICS, *parts, *engines_section()])


def _part(title: str, begins: str) -> Iterator[str]:
    yield f"## {title}\n"
    for metric in metrics.CONTRACT:
        if metric.name.startswith(begins):
            yield from _entry(metric)


def _entry(metric: Metric) -> Iterator[str]:
    yield f"### `{metric.name}`\n"
    yield f"{metric.help}\n"
    unit = "0 or 1" if metric.unit == "yes or no" else metric.unit
    yield f"Type: {metric.kind}. Unit: {unit}.\n"
    for label in metric.by:
        yield f"- `{label.name}`: {_values(label)}."
    if metric.by:
        yield ""
    if metric.buckets:
        yield f"Buckets: {', '.join(f'{bound:.10g}' for bound in metric.buckets)}.\n"


def _values(label: Label) -> str:
    return ", ".join(f"`{value}`" for value in label.values) or label.bound


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Write the pages and tables below `root`. With `--check`, only name those that differ."""
    folder = root / "docs" / "reference"
    texts = {folder / name: text for name, text in pages().items()} | model_tables.documents(root)
    return generated_files.settle(texts, folder.glob("*.md"), check="--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
