"""
`baton up`: a router, prefill workers and decode workers on one machine.

The model is fetched once. Workers start in parallel on free ports. The router starts while they load the
model, as soon as their ports are known. The service is up when it has answered a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from baton_api import exposure
from baton_api.announcements import Loading
from baton_api.errors import SetupError
from baton_api.workers import Role
from baton_cli.display import Bar, Display, LogFiles
from baton_cli.options import read_settings
from baton_cli.supervisor import Command, Interrupted, Member, Supervisor, Watcher, supervise, threads_each
from baton_engine import lending, machine
from baton_engine.settings import WorkerSettings
from baton_router.settings import RouterSettings

if TYPE_CHECKING:
    import httpx

FIRST_ANSWER_S = 60.0
"""Timeout of the first request, after all processes are ready."""

RETRY_S = 0.1
BLOCK_TOKENS = 16


BY_ENVIRONMENT = {
    *("port", "api_key", "api_key_file", "worker_api_key", "ticket_secret"),
    *("state", "database", "batch_secret", "response_store"),
}
"""Router settings that are passed by environment: secrets, and the port, which may change."""


FOR_ALL = ("log_format", "tracing_endpoint")
"""Worker settings that the router shares."""


class LocalRouterSettings(RouterSettings):
    """Settings of a router on one machine. The dashboard is enabled by default."""

    dashboard: bool = True
    """Serve a dashboard at `/`: workers, timelines of recent requests, and a chat. Its data require an API
    key where keys are required."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The processes to start."""

    model: str
    """Path of the fetched model."""
    names: tuple[str, ...]
    """Model names that requests may use. Responses contain the first one."""
    prefill: int = 1
    decode: int = 1
    prefill_share: float | None = None
    """Share of the cores that prefill workers get while all workers compute. None: by their number."""
    router: RouterSettings = field(default_factory=LocalRouterSettings)
    worker: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `WorkerSettings` from the command line."""
    secret: str = field(default_factory=lambda: secrets.token_hex(32))
    """Signs tickets, so that workers accept only requests of this router."""
    own_key: str = field(default_factory=lambda: secrets.token_hex(32))
    """The key between router and workers, and of the first request, if clients need a key."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def roles(self) -> list[Role]:
        return [Role.PREFILL] * self.prefill + [Role.DECODE] * self.decode

    @property
    def key(self) -> str:
        """The key of this command's own requests. Empty if the service requires no key."""
        return self.own_key if self.router.requires_keys else ""

    def worker_commands(self, cores: int, seats: Sequence[str] = ()) -> list[Command]:
        """Return one command per worker. Each gets an equal share of the cores, and its seat to lend them."""
        flags = {"threads": threads_each(cores, len(self.roles)), **self.worker}
        counts = dict.fromkeys(Role, 0)
        commands: list[Command] = []
        for role in self.roles:
            name = f"{role}-{counts[role]}"
            counts[role] += 1
            shared = {"shared_cores": seats[len(commands)], **self._compute_share(role)} if any(seats) else {}
            named = {**shared, **flags, "name": name, "served_model_name": self.names, "host": "127.0.0.1"}
            if disk := named.get("kv_disk_tier"):
                named["kv_disk_tier"] = str(Path(disk) / name)  # one worker uses a folder
            commands.append(
                Command(
                    name=name,
                    role=role,
                    arguments=(role, self.model, *_flags(named)),
                    environment={
                        "BATON_TICKET_SECRET": self.secret,
                        "BATON_API_KEY": self.key,
                        "BATON_API_KEY_FILE": "",
                    },
                )
            )
        return commands

    def _compute_share(self, role: Role) -> dict[str, float]:
        """Return the workers' setting about the time in which they compute, if they rest in a part of it."""
        if self.prefill_share is None:
            return {}
        prefill = role == Role.PREFILL
        share = self.prefill_share if prefill else 1 - self.prefill_share
        count = self.prefill if prefill else self.decode
        computing = lending.compute_share(share, count, len(self.roles))
        return {"compute_share": round(computing, 4)} if computing < 1 else {}

    def router_command(self, prefill: list[str], decode: list[str], state: str) -> Command:
        given = self.router.model_dump(exclude_unset=True, exclude=BY_ENVIRONMENT)
        given |= {name: self.worker[name] for name in FOR_ALL if name in self.worker}
        keys = [*(key.text for key in self.router.api_key), *([self.key] if self.key else [])]
        return Command(
            name="router",
            role="router",
            arguments=(
                "router",
                *_flags({**given, "dashboard": self.router.dashboard, "prefill": prefill, "decode": decode}),
            ),
            port=self.router.port,
            environment={
                "BATON_ROUTER_TICKET_SECRET": self.secret,
                "BATON_ROUTER_API_KEY": ",".join(keys),
                "BATON_ROUTER_API_KEY_FILE": self.router.api_key_file,
                "BATON_ROUTER_WORKER_API_KEY": self.key,
                "BATON_ROUTER_STATE": state,
                "BATON_ROUTER_DATABASE": self.router.database.get_secret_value(),
                "BATON_ROUTER_BATCH_SECRET": self.router.batch_secret.get_secret_value(),
                "BATON_ROUTER_RESPONSE_STORE": self.router.response_store.get_secret_value(),
            },
        )


@dataclass(frozen=True, slots=True)
class Service:
    """A running service."""

    supervisor: Supervisor
    router: Member
    workers: tuple[Member, ...]
    api_key: str
    """Key that router and workers accept. Empty if they require no key."""

    @property
    def url(self) -> str:
        return self.router.url

    def of(self, role: Role) -> list[Member]:
        return [member for member in self.workers if member.command.role == role]


@contextlib.asynccontextmanager
async def open_service(plan: Plan, watcher: Watcher) -> AsyncIterator[Service]:
    """
    Start a service that has answered a request. Drain and stop it at the end.

    Raises SetupError if a process cannot start.
    """
    drain_s = WorkerSettings(**plan.worker).drain_s
    async with contextlib.AsyncExitStack() as stack:
        state = plan.router.state
        if not state and plan.router.port == 0:  # a restarted router must find its state
            state = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        seats = stack.enter_context(lending.seats(len(plan.roles)))
        supervisor = await stack.enter_async_context(supervise(watcher, drain_s))
        commands = plan.worker_commands(machine.usable_cores(), seats)
        workers = [supervisor.add(command) for command in commands]
        for member in workers:
            await supervisor.unless_failed(member.listening())
        router = supervisor.add(
            plan.router_command(
                [member.url for member in workers if member.command.role == Role.PREFILL],
                [member.url for member in workers if member.command.role == Role.DECODE],
                state,
            )
        )
        await supervisor.unless_failed(router.listening())
        for member in (*workers, router):
            await supervisor.unless_failed(member.ready())
        service = Service(supervisor, router, tuple(workers), plan.key)
        await supervisor.unless_failed(answered(service, plan))
        yield service


async def answered(service: Service, plan: Plan) -> None:
    """Wait until the router has found all workers ready and a request succeeds. Raises SetupError if not."""
    import httpx  # here, because the processes are to start first

    # Long enough for a prefill worker, so that the decode worker connects to it.
    length = WorkerSettings(**plan.worker).local_prefill_tokens + 2 * BLOCK_TOKENS
    body = {"model": plan.name, "prompt": [0] * length, "max_tokens": 1}
    key = plan.key
    outcome = "no response"
    async with httpx.AsyncClient(
        headers={"authorization": f"Bearer {key}"} if key else {}, trust_env=False, timeout=FIRST_ANSWER_S
    ) as client:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_ANSWER_S):
                while True:
                    try:
                        outcome = await _unready(client, service.url)
                        if not outcome:
                            answer = await client.post(f"{service.url}/v1/completions", json=body)
                            if answer.is_success:
                                return
                            outcome = f"{answer.status_code} {answer.text[:500]}"
                            if answer.status_code == httpx.codes.BAD_REQUEST:
                                body["prompt"] = [0]  # the model's context is shorter than that
                    except httpx.TransportError as error:
                        outcome = str(error) or type(error).__name__
                    await asyncio.sleep(RETRY_S)
    raise SetupError(f"All processes are ready, but the first request failed: {outcome}.")


async def _unready(client: httpx.AsyncClient, url: str) -> str:
    """
    Return the workers that the router has not found ready yet, as a clause; empty if it has found all.

    Without this, a request could succeed at the decode worker before the router knows the prefill worker.
    """
    answer = await client.get(f"{url}/workers")
    rows = answer.json()["data"] if answer.is_success else []
    return ", ".join(f"{row['worker']} is {row['state']}" for row in rows if row["state"] != "ready")


def _flags(values: Mapping[str, Any]) -> list[str]:
    """
    Return settings as flags.

    >>> _flags({"max_running": 8, "decode": ["http://a", "http://b"], "cache_report": False})
    ['--max-running=8', '--decode=http://a', '--decode=http://b', '--no-cache-report']
    """
    flags = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
            continue
        for item in value if isinstance(value, (list, tuple)) else (value,):
            flags.append(f"--{flag}={item}")
    return flags


Use = Callable[[Service], Awaitable[None]]

KV_EVENTS = "tcp://127.0.0.1:0"
"""Every worker publishes KV events on a free port."""


def up(
    prefill: int,
    decode: int,
    prefill_share: float | None,
    verbose: bool | None,
    router: Mapping[str, Any],
    given: Mapping[str, Any],
) -> None:
    """Run a service until a signal stops it. `verbose` shows the logs; None: unless in a terminal."""
    console = Console(stderr=True)
    shown = not console.is_terminal if verbose is None else verbose
    files = None if shown else _log_files(read_settings(LocalRouterSettings, router).port)
    display = Display(console, logs=shown, files=files)
    plan = make_plan(display, prefill, decode, router, given, prefill_share)

    async def use(service: Service) -> None:
        folder = files.folder if files is not None else None
        text = ready_text(plan, service.url, [one.name for one in service.workers], folder)
        console.print(Text(text), soft_wrap=True)
        warning = exposure.without_a_key(plan.router.host, plan.router.port, bool(plan.key))
        if warning:
            console.print(Text(warning, style="bold red"), soft_wrap=True)
        await asyncio.Event().wait()

    run(display, plan, use)


def _log_files(port: int) -> LogFiles:
    """Return the files of a service on this port; without one of its own, or a home, in a new folder."""
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    with contextlib.suppress(OSError, RuntimeError):
        if port:
            return LogFiles(Path(home).expanduser() / "baton" / f"logs-{port}")
    return LogFiles(Path(tempfile.mkdtemp(prefix="baton-logs-")))


def ready_text(plan: Plan, url: str, workers: Sequence[str], logs: Path | None) -> str:
    """Return what `up` says when the service is up: at most ten lines."""
    lines = [
        f"Ready: {plan.name} on {url}/v1. Ctrl-C stops it.",
        f"  workers    {', '.join(workers)}",
        *([f"  dashboard  {url}/"] if plan.router.dashboard else []),
        *([f"  logs       {logs}/"] if logs else []),
        f"  try        baton chat --url {url}",
        f"  curl {url}/v1/chat/completions \\",
        *(['    -H "authorization: Bearer $BATON_API_KEY" \\'] if plan.key else []),
        "    -H 'content-type: application/json' \\",
        f'    -d \'{{"model": "{plan.name}", "max_tokens": 100, "messages":',
        '    [{"role": "user", "content": "Why is the sky blue?"}]}\'',
    ]
    return "\n".join(lines)


def make_plan(
    display: Display,
    prefill: int,
    decode: int,
    router: Mapping[str, Any],
    given: Mapping[str, Any],
    prefill_share: float | None = None,
) -> Plan:
    """Fetch the model and return the plan. Raises SetupError."""
    from baton_engine.model.resolve import resolve, served_names

    router_settings = read_settings(LocalRouterSettings, router)
    worker = read_settings(WorkerSettings, given)
    if worker.transfer == "loopback" and prefill:
        raise SetupError(
            "--transfer loopback works within one process only, and `baton up` starts several. Use nixl, or "
            "`baton serve`."
        )
    if prefill_share is not None and not prefill:
        raise SetupError(
            "--prefill-share needs prefill workers, and --prefill 0 starts none. Leave one of them out."
        )
    # Each worker measures the free memory at its start. They start together, so they share it.
    share: dict[str, Any] = {}
    if worker.memory_share:
        share["memory_share"] = worker.memory_share / (prefill + decode)
    if worker.kv_disk_tier:  # also from the environment: each worker gets its own folder in it
        share["kv_disk_tier"] = worker.kv_disk_tier
    # The router needs no token ids, and other local users must not read them.
    kv_events = {} if "kv_events" in worker.model_fields_set else {"kv_events": KV_EVENTS, "kv_tokens": False}
    # The processes write to pipes, so the format depends on where this process shows their lines.
    plain = "text" if display.for_people else "json"
    logged = {"log_format": plain if worker.log_format == "auto" else worker.log_format}
    with display.bars():
        checkpoint = resolve(worker.model, Bar(display, "model"))
    return Plan(
        model=str(checkpoint.path),
        names=served_names(worker.served_model_name, checkpoint, worker.model),
        prefill=prefill,
        decode=decode,
        prefill_share=prefill_share,
        router=router_settings,
        worker={name: value for name, value in given.items() if name != "model"} | share | kv_events | logged,
    )


def run(display: Display, plan: Plan, use: Use) -> None:
    """Run a service while `use` runs. A signal ends it cleanly."""
    logging.basicConfig(level=logging.WARNING)

    async def hold() -> None:
        async with contextlib.AsyncExitStack() as stack:
            with display.bars():
                display.loading("baton", Loading(label="starting the processes", done=0, total=0))
                service = await stack.enter_async_context(open_service(plan, display))
            await use(service)

    with contextlib.suppress(Interrupted):
        asyncio.run(hold())
