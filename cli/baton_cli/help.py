"""
The help of all commands: at most 80 columns wide, and grouped.

`--help` shows the flags that most people use, each with the first sentence of its description.
`--help-all` shows every flag with its whole description. Commands that `FREQUENT` does not list have few
flags: both show all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

NAMES = ("--help", "--help-all")
COLUMN = 24
"""Columns of a flag with its value; a longer one has a line of its own."""

WORKER = (
    *("served-model-name", "reasoning-parser", "tool-call-parser", "enable-lora", "lora-modules"),
    *("host", "port", "api-key", "api-key-file", "device", "dtype", "quantize", "tensor-parallel-size"),
    *("max-model-len", "kv-cache-memory", "memory-share", "max-running", "speculation", "log-requests"),
)
PAIRED = ("advertise-host", "ticket-secret")
"""Flags of workers whose peers run on other machines."""

FREQUENT: Mapping[str, frozenset[str]] = {
    "serve": frozenset(WORKER),
    "prefill": frozenset({*WORKER, *PAIRED, "control-host", "control-port"}),
    "decode": frozenset({*WORKER, *PAIRED, "local-prefill-tokens"}),
    "up": frozenset({*WORKER, "prefill", "decode", "dashboard", "verbose"}),
    "demo": frozenset({"verbose", "device", "dtype", "quantize", "threads"}),
    "router": frozenset(
        {
            *("host", "port", "dashboard", "decode", "prefill", "worker", "decode-dns", "prefill-dns"),
            *("kubernetes-selector", "worker-api-key", "ticket-secret", "policy", "queue-requests"),
            *("retries", "api-key", "api-key-file", "tenants-file", "state", "log-requests"),
            "tracing-endpoint",
        }
    ),
    "operator": frozenset(
        {
            *("worker-image", "router-image", "vllm-image", "sglang-image", "prometheus-url"),
            *("namespaces", "kubeconfig", "port", "log-format"),
        }
    ),
    "bench": frozenset(
        {
            *("url", "model", "api-key", "concurrency", "rate", "requests", "prompt-tokens"),
            *("output-tokens", "shared-tokens", "ttft-ms", "save", "output"),
        }
    ),
}
"""By command: the flags that `--help` shows."""


class Command(TyperCommand):
    """A command with short and whole help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[NAMES[1]] = NAMES[1] in args
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = plain_words(error.message)
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        whole = bool(ctx.meta.get(NAMES[1]))
        frequent = FREQUENT.get(ctx.info_name or "")
        groups: dict[str, list[tuple[str, str]]] = {}
        left_out = 0
        parameters: Iterable[Any] = self.params
        for parameter in parameters:
            if parameter.hidden:
                continue
            is_flag = parameter.param_type_name == "option"
            name = parameter.opts[0].removeprefix("--")
            if is_flag and frequent is not None and not whole and name not in frequent:
                left_out += 1
                continue
            title = parameter.rich_help_panel or ("Flags" if is_flag else "Arguments")
            text = described(parameter)
            row = usage(parameter), text if whole or frequent is None else summary(text)
            groups.setdefault(title, []).append(row)
        _write(formatter, groups)
        if left_out:
            formatter.write_paragraph()
            formatter.write_text(f"{left_out} more flags: {ctx.command_path} {NAMES[1]}")


class Group(TyperGroup):
    """Several commands, listed in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            title = getattr(command, "rich_help_panel", None) or "Commands"
            groups.setdefault(title, []).append((name, summary(command.help or "")))
        _write(formatter, groups)
        if FREQUENT.keys() & self.commands.keys():
            formatter.write_paragraph()
            formatter.write_text(
                f"`{ctx.command_path} COMMAND --help` shows the flags that most people use, and "
                f"`--help-all` all flags."
            )


def _write(formatter: Any, groups: Mapping[str, list[tuple[str, str]]]) -> None:
    for title, rows in groups.items():
        with formatter.section(title):
            formatter.write_dl(rows, col_max=COLUMN)


def usage(parameter: Any) -> str:
    """Return a flag with its value, such as `--port N`; a switch as `--[no-]dashboard`."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    names: Iterable[str] = sorted(parameter.opts, key=len)
    if parameter.secondary_opts:
        names = [f"--[no-]{parameter.opts[0].removeprefix('--')}"]
    return ", ".join(names) + ("" if parameter.is_flag else f" {parameter.metavar or 'TEXT'}")


def described(parameter: Any) -> str:
    """Return the description of a parameter, with what its declaration knows: default, range, variable."""
    facts = []
    if getattr(parameter, "show_envvar", False) and parameter.envvar:
        facts.append(f"environment: {parameter.envvar}")
    if (
        parameter.show_default
        and not getattr(parameter, "is_flag", False)
        and parameter.default not in (None, "")
    ):
        facts.append(f"default: {parameter.default}")
    low, high = getattr(parameter, "min", None), getattr(parameter, "max", None)
    if low is not None:
        facts.append(f"range: >= {low}" if high is None else f"range: {low}-{high}")
    return (parameter.help or "") + (f" [{', '.join(facts)}]" if facts else "")


MUST_BE = "must be "
PLAIN_WORDS = {
    "Input should be ": MUST_BE,
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
}
"""Pydantic's words for a value that does not fit, and ours."""


def plain_words(message: str) -> str:
    """
    >>> plain_words("Input should be a valid integer, unable to parse string as an integer")
    'must be a whole number'
    >>> plain_words("Input should be greater than or equal to 1")
    'must be at least 1'
    """
    for theirs, ours in PLAIN_WORDS.items():
        message = message.replace(theirs, ours)
    return re.sub(r", unable to (parse|interpret) .*$", "", message)


def summary(text: str) -> str:
    """
    Return the first sentence, and the default unless it means "off" or "chosen by Baton".

    >>> summary("Number of pots. Empty: as many as cooks. [default: 2, range: >= 1]")
    'Number of pots. [default: 2]'
    >>> summary("Address of a service, such as 127.0.0.1. [default: 0]")
    'Address of a service, such as 127.0.0.1.'
    """
    described, _, facts = text.partition(" [default: ")
    first, *_ = re.split(r"(?<=\.)\s", " ".join(described.split()), maxsplit=1)
    default = facts.removesuffix("]").partition(", range: ")[0]
    return first if default in ("", "0", "off") else f"{first} [default: {default}]"
