"""
Read the properties of this machine: limits, devices, ports, folders, clock.

Probes do not fail on an unusual machine; they omit the values that the system does not report.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.metadata
import os
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
from packaging.requirements import Requirement

from baton_api.installing import DISTRIBUTION
from baton_cli.doctor.engine_probes import EngineWorker, engine_workers
from baton_cli.doctor.gpu_probes import gpus
from baton_cli.doctor.machine import Cluster, DataFolder, Installed, Machine, Port, RdmaDevice, Space
from baton_cli.doctor.selftests import SelfTests
from baton_engine import machine as usable
from baton_engine.machine import cache_folder

SHM = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")
VERBS = Path("/dev/infiniband")
INTERFACES = Path("/sys/class/net")
PIDS = (Path("/sys/fs/cgroup/pids.max"), Path("/sys/fs/cgroup/pids/pids.max"))

READ = ("BATON_", "UCX_", "NIXL_")
"""Prefixes of variables that Baton and its libraries read."""

BESIDES = frozenset({"BATON_BUNDLED", "BATON_CACHE", "BATON_KERNELS", "BATON_BATCH_TOKEN"})
"""Variables that do not belong to a settings class."""

LISTENING = "0A"
STA_UNSYNC = 0x40
TIMEX_BYTES = 256
STATUS_AT = 40 if sys.maxsize > 2**32 else 20
"""Offset of the status in struct timex, after an unsigned int and four longs."""

ANSWER_S = 5.0


def gather(
    tests: SelfTests, ports: Sequence[Port], urls: Sequence[str], api_key: str, cluster: Cluster | None
) -> Machine:
    """Run all probes. Some take seconds."""
    apart, unreachable, workers = ask_servers(urls, api_key)
    return Machine(
        name=socket.gethostname(),
        environment={name: value for name, value in os.environ.items() if name.startswith(READ)},
        known_variables=known_variables(),
        shm=space(SHM),
        memory=usable.free_memory(),
        open_files=_limit(resource.RLIMIT_NOFILE, hard=True),
        processes=processes(),
        locked=_limit(resource.RLIMIT_MEMLOCK, hard=False),
        rdma=tuple(rdma_devices()),
        verbs=verbs_trouble(),
        gpus=gpus(),
        interfaces=frozenset(os.listdir(INTERFACES)) if INTERFACES.is_dir() else frozenset(),
        copies=tests.copies,
        kernels=tests.kernels,
        nixl=tests.nixl,
        packages=tuple(packages()),
        ports=tuple(map(held, ports)),
        data_folders=tuple(data_folders(os.environ)),
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


def processes() -> int | None:
    """Return the limit of processes of this user or container."""
    limits = [_limit(resource.RLIMIT_NPROC, hard=False)] if os.geteuid() else []  # root has no limit
    for path in PIDS:
        text = _read(path)
        limits.append(int(text) if text.isdecimal() else None)
    return min((one for one in limits if one is not None), default=None)


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
    closed = [str(one) for one in devices if not os.access(one, os.R_OK | os.W_OK)]
    return f"this user may not open {closed[0]}" if len(closed) == len(devices) else ""


def packages() -> Iterator[Installed]:
    """Yield the packages that Baton's metadata requires. Optional packages may be missing."""
    for text in importlib.metadata.requires(DISTRIBUTION) or ():
        wanted = Requirement(text)
        needed = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        if (version or needed) and wanted.name != DISTRIBUTION:
            fits = bool(version) and wanted.specifier.contains(version, prereleases=True)
            yield Installed(wanted.name, version, str(wanted.specifier), fits)


def held(port: Port) -> Port:
    """Return the port with the process that uses it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port.number))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return Port(port.number, port.what, listener(port.number) or "another program")
            return Port(port.number, port.what, error.strerror or str(error))
    return port


def listener(number: int) -> str:
    """Return the command that listens on a port, if this user may see it."""
    wanted = set()
    for table in ("tcp", "tcp6"):
        for line in _read(Path("/proc/net") / table).splitlines()[1:]:
            columns = line.split()
            if columns[3] == LISTENING and int(columns[1].rpartition(":")[2], 16) == number:
                wanted.add(f"socket:[{columns[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(one) in wanted for one in (process / "fd").iterdir()):
                return (process / "cmdline").read_text().replace("\0", " ").strip()[:120]
        except OSError:  # it ended meanwhile, or belongs to another user
            continue
    return ""


def data_folders(environment: Mapping[str, str]) -> Iterator[DataFolder]:
    """Yield the folders of Baton and of the Hugging Face Hub client."""
    home = Path(environment.get("HOME", "/"))
    hub = environment.get("HF_HOME") or str(
        Path(environment.get("XDG_CACHE_HOME") or home / ".cache") / "huggingface"
    )
    for what, path, setting in (
        ("cache", cache_folder(environment), "BATON_CACHE"),
        ("Hugging Face models", Path(hub).expanduser(), "HF_HOME"),
        ("temporary files", Path(tempfile.gettempdir()), "TMPDIR"),
    ):
        existing = path
        while not existing.exists():  # the folder is created at first use
            existing = existing.parent
        size = space(existing)
        trouble = "" if os.access(existing, os.W_OK | os.X_OK) else f"this user may not write to {existing}"
        yield DataFolder(what, str(path), size.free if size else 0, trouble or _refuses(existing), setting)


def _refuses(folder: Path) -> str:
    """Return why a folder is not writable. `access` allows root everything, even read-only file systems."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)


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
        answering = [one for one in listed if one[0] not in silent]
        return apart, silent, tuple(engine_workers(client, answering))


def _with_workers(client: httpx.Client, urls: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each URL with an empty role, followed by the workers and their roles if it is a router."""
    for url in map(_plain, urls):
        yield url, ""
        try:
            listed = client.get(f"{url}/workers").json()["data"]
            yield from ((f"http://{one['worker']}", one.get("role", "")) for one in listed)
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
