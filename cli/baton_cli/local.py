"""`baton up` and `baton demo`: what a person sees of a whole service on one machine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from baton_api import exposure
from baton_api.announcements import Loading
from baton_api.errors import SetupError
from baton_cli.display import Bar, Display
from baton_cli.front_settings import FrontSettings
from baton_cli.options import read_settings
from baton_cli.supervisor import Interrupted
from baton_cli.up import Plan, Service, open_service
from baton_engine.settings import WorkerSettings

Use = Callable[[Service], Awaitable[None]]

KV_EVENTS = "tcp://127.0.0.1:0"
"""Where workers tell the router what they hold: each at a port of its own."""


def up(prefill: int, decode: int, front: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Run until a signal says to stop."""
    display = Display(Console(stderr=True))
    plan = make_plan(display, prefill, decode, front, given)

    async def use(service: Service) -> None:
        display.console.print(
            f"\n[bold green]Ready:[/] {plan.name} on {service.url}/v1 "
            f"({prefill} prefill, {decode} decode). Ctrl-C ends it.\n"
            + (f"[bold]See it:[/] {service.url}/\n" if plan.router.page else "")
        )
        warning = exposure.without_a_key(plan.router.host, plan.router.port, bool(plan.key))
        if warning:
            display.console.print(Text(warning, style="bold red"), soft_wrap=True)
        await asyncio.Event().wait()

    run(display, plan, use)


def demo(verbose: bool, given: Mapping[str, Any]) -> None:
    """Ask two questions and show what happened; in a terminal, stay up afterwards."""
    from baton_cli import demo

    display = Display(Console(), logs=verbose)
    # The questions are short: the decode worker would be as quick alone, and there would be nothing to see.
    plan = make_plan(display, 1, 1, {"port": 0, "alone_tokens": 0}, given)

    async def use(service: Service) -> None:
        await demo.show(display.console, service, plan.name)
        if display.console.is_terminal:
            demo.invite(display.console, service, plan.name)
            await asyncio.Event().wait()

    run(display, plan, use)


def make_plan(
    display: Display, prefill: int, decode: int, front: Mapping[str, Any], given: Mapping[str, Any]
) -> Plan:
    """What is to run, the model fetched. Raises SetupError."""
    from baton_engine.model.resolve import resolve, served_names

    router = read_settings(FrontSettings, front)
    worker = read_settings(WorkerSettings, given)
    if worker.transfer == "loopback" and prefill:
        raise SetupError(
            "--transfer loopback moves blocks within one process only, and these are several. Leave it at "
            "nixl, or use `baton serve`."
        )
    # Each worker counts what is free when it starts; they start together and share it.
    share = {"memory_share": worker.memory_share / (prefill + decode)} if worker.memory_share else {}
    # The router is on this machine and wants no tokens; nobody else on it is to read them.
    told = {} if "kv_events" in worker.model_fields_set else {"kv_events": KV_EVENTS, "kv_tokens": False}
    # The processes write to pipes; what decides is where this one writes.
    plain = "text" if display.console.is_terminal else "json"
    logged = {"log_format": plain if worker.log_format == "auto" else worker.log_format}
    with display.bars():
        checkpoint = resolve(worker.model, Bar(display, "model"))
    return Plan(
        model=str(checkpoint.path),
        names=served_names(worker.served_model_name, checkpoint, worker.model),
        prefill=prefill,
        decode=decode,
        router=router,
        worker={name: value for name, value in given.items() if name != "model"} | share | told | logged,
    )


def run(display: Display, plan: Plan, use: Use) -> None:
    """Hold the service open while `use` runs. A signal is a clean end."""
    logging.basicConfig(level=logging.WARNING)

    async def hold() -> None:
        async with contextlib.AsyncExitStack() as stack:
            with display.bars():
                display.loading("baton", Loading(label="starting the processes", done=0, total=0))
                service = await stack.enter_async_context(open_service(plan, display))
            await use(service)

    with contextlib.suppress(Interrupted):
        asyncio.run(hold())
