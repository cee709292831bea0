"""Run all checks, and print the findings as text or JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton_api import __version__
from baton_cli.doctor import cluster as clusters
from baton_cli.doctor import engines, environment, gpu, probes, selftests
from baton_cli.doctor.machine import Finding, Level, Machine

ERROR_STATUS = 1
"""Exit status if a finding is an error."""

SIGNS = {Level.GOOD: "✓", Level.NOTE: "·", Level.WARNING: "!", Level.ERROR: "✗"}
COLORS = {Level.GOOD: "green", Level.NOTE: "dim", Level.WARNING: "yellow", Level.ERROR: "bold red"}

WIDE = 200
"""Columns of output to a file or a pipe."""


def doctor(
    urls: Sequence[str],
    api_key: str,
    kubeconfig: str | None,
    namespace: str,
    as_json: bool,
) -> None:
    """Check the machine, and the cluster if `kubeconfig` is set. Exit with `ERROR_STATUS` on an error."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDE
    cluster = None
    if kubeconfig is not None:
        cluster = clusters.inspect(clusters.account(kubeconfig, os.environ), namespace)
    with Console(stderr=True).status("Testing kernels and NIXL"):
        machine = probes.gather(selftests.run(), urls, api_key, cluster)
    findings = examine(machine)
    if as_json:
        sys.stdout.write(json.dumps(as_data(machine, findings), indent=1) + "\n")
    else:
        show(console, machine.name, findings)
    if any(finding.level is Level.ERROR for finding in findings):
        raise typer.Exit(ERROR_STATUS)


def as_data(machine: Machine, findings: Sequence[Finding]) -> dict[str, object]:
    return {
        "machine": machine.name,
        "version": __version__,
        "errors": sum(finding.level is Level.ERROR for finding in findings),
        "warnings": sum(finding.level is Level.WARNING for finding in findings),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }


def show(console: Console, machine: str, findings: Sequence[Finding]) -> None:
    """Print one line per good finding, and the solution of every other one."""
    console.print(Text.assemble(("Baton ", "bold"), f"on {machine}\n"))
    table = Table.grid(padding=(0, 2))
    table.add_column(width=1)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(
            Text(SIGNS[finding.level], style=COLORS[finding.level]), Text(finding.check), described(finding)
        )
    console.print(table)
    console.print(Text(f"\n{summary(findings)}", style="bold"))


def described(finding: Finding) -> Text:
    """Return the measured value, the requirement, the consequence and the solution."""
    text = Text(finding.measured, style=COLORS[finding.level] if finding.remedy else "")
    if finding.limit:
        text.append(f"; required: {finding.limit}", style="default not bold")
    if finding.why:
        text.append(f"\n{finding.why}" if finding.remedy else f". {finding.why}", style="dim not bold")
    if finding.remedy:
        text.append(f"\n→ {finding.remedy}", style="default not bold")
    return text


def summary(findings: Sequence[Finding]) -> str:
    errors = sum(finding.level is Level.ERROR for finding in findings)
    warnings = sum(finding.level is Level.WARNING for finding in findings)
    if not errors and not warnings:
        return "No problems found."
    return f"{_count(errors, 'error')}, {_count(warnings, 'warning')}."


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


CHECKS: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    environment.shared_memory,
    environment.open_files,
    environment.rdma,
    environment.locked_memory,
    environment.copies,
    gpu.devices,
    gpu.direct,
    gpu.peers,
    environment.nixl,
    environment.network,
    environment.kernels,
    environment.variables,
    environment.clock,
    environment.tickets,
    environment.cluster,
    engines.workers,
)


def examine(machine: Machine) -> list[Finding]:
    """Return the findings of all checks."""
    return [finding for check in CHECKS for finding in check(machine)]
