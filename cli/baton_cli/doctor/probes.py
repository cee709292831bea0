"""
Read the properties of this machine: limits, devices, clock.

Probes do not fail on an unusual machine; they omit the values that the system does not report.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx

from baton_cli.doctor.engines import engine_workers
from baton_cli.doctor.gpu import gpus
from baton_cli.doctor.machine import Cluster, EngineWorker, Machine, RdmaDevice, Space
from baton_cli.doctor.selftests import SelfTests

SHM = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")
VERBS = Path("/dev/infiniband")
INTERFACES = Path("/sys/class/net")

READ = ("BATON_", "UCX_", "NIXL_")
"""Prefixes of variables that Baton and its libraries read."""

BESIDES = frozenset({"BATON_BUNDLED", "BATON_CACHE", "BATON_KERNELS", "BATON_PRODUCTS", "BATON_BATCH_TOKEN"})
"""Variables that do not belong to a settings class."""

STA_UNSYNC = 0x40
TIMEX_BYTES = 256
STATUS_AT = 40 if sys.maxsize > 2**32 else 20
"""Offset of the status in struct timex, after an unsigned int and four longs."""

ANSWER_S = 5.0


def gather(tests: SelfTests, urls: Sequence[str], api_key: str, cluster: Cluster | None) -> Machine:
    """Run all probes. Some take seconds."""
    apart, unreachable, workers = ask_servers(urls, api_key)
    return Machine(
        name=socket.gethostname(),
        environment={name: value for name, value in os.environ.items() if name.startswith(READ)},
        known_variables=known_variables(),
        shm=space(SHM),
        open_files=_limit(resource.RLIMIT_NOFILE, hard=True),
        locked=_limit(resource.RLIMIT_MEMLOCK, hard=False),
        rdma=tuple(rdma_devices()),
        verbs=verbs_trouble(),
        gpus=gpus(),
        interfaces=frozenset(os.listdir(INTERFACES)) if INTERFACES.is_dir() else frozenset(),
        copies=tests.copies,
        kernels=tests.kernels,
        nixl=tests.nixl,
        clock_synchronised=clock_synchronised(),
        clock_apart=apart,
        unreachable=unreachable,
        workers=workers,
        cluster=cluster,
    )


def space(path: Path) -> Space | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return Space(usage.total, usage.free)


def rdma_devices() -> Iterator[RdmaDevice]:
    if not INFINIBAND.is_dir():
        return
    for device in sorted(INFINIBAND.iterdir()):
        ports = {
            int(port.name): _read(port / "state").rpartition(" ")[2]  # such as `4: ACTIVE`
            for port in sorted((device / "ports").glob("[0-9]*"))
        }
        yield RdmaDevice(device.name, ports)


def verbs_trouble() -> str:
    devices = sorted(VERBS.glob("uverbs*"))
    if not devices:
        return f"no {VERBS}/uverbs*"
    closed = [str(device) for device in devices if not os.access(device, os.R_OK | os.W_OK)]
    return f"this user may not open {closed[0]}" if len(closed) == len(devices) else ""


def clock_synchronised() -> bool | None:
    """Return whether the kernel's clock is synchronized. None if the kernel does not report it."""
    state = ctypes.create_string_buffer(TIMEX_BYTES)
    try:
        done = ctypes.CDLL(None, use_errno=True).adjtimex(state)
    except (OSError, AttributeError):
        return None
    if done < 0:
        return None
    status = int.from_bytes(state.raw[STATUS_AT : STATUS_AT + 4], sys.byteorder)
    return not status & STA_UNSYNC


def ask_servers(
    urls: Sequence[str], api_key: str
) -> tuple[dict[str, float], dict[str, str], tuple[EngineWorker, ...]]:
    """
    Return how far the clocks of servers are ahead in seconds, the servers that did not answer, and the
    workers of other engines.
    """
    apart: dict[str, float] = {}
    silent: dict[str, str] = {}
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(trust_env=False, timeout=ANSWER_S, headers=headers) as client:
        listed = list(_with_workers(client, urls))
        for url, _ in listed:
            try:
                started = time.time()
                date = client.get(f"{url}/health").headers.get("date", "")
                now = (started + time.time()) / 2
            except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
                silent[url] = str(error) or type(error).__name__
                continue
            if date:
                ahead = parsedate_to_datetime(date).timestamp() + 0.5 - now
                apart[url] = round(ahead, 1)
        answering = [(url, role) for url, role in listed if url not in silent]
        return apart, silent, tuple(engine_workers(client, answering))


def _with_workers(client: httpx.Client, urls: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each URL with an empty role, followed by the workers and their roles if it is a router."""
    for url in map(_plain, urls):
        yield url, ""
        try:
            listed = client.get(f"{url}/workers").json()["data"]
            yield from ((f"http://{row['worker']}", row.get("role", "")) for row in listed)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
            continue  # not a router, or no answer, which the caller notices


def _plain(url: str) -> str:
    return re.sub(r"(/v1)?/*$", "", url)


def known_variables() -> frozenset[str]:
    """Return the variables of all settings classes."""
    from pydantic_settings import BaseSettings

    from baton_engine.settings import WorkerSettings
    from baton_router.settings import RouterSettings

    kinds: list[type[BaseSettings]] = [WorkerSettings, RouterSettings]
    try:
        from baton_operator.settings import OperatorSettings

        kinds.append(OperatorSettings)
    except ModuleNotFoundError:  # not installed here
        pass
    names = {
        f"{kind.model_config.get('env_prefix') or ''}{field}".upper()
        for kind in kinds
        for field in kind.model_fields
    }
    return BESIDES | names


def _limit(kind: int, *, hard: bool) -> int | None:
    value = resource.getrlimit(kind)[hard]
    return None if value == resource.RLIM_INFINITY else value


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
