"""A real Postgres in a folder of its own, started and ended by the tests that need one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from glob import glob
from pathlib import Path

import psutil
import psycopg
import pytest

from tests.ports import steady_port

START_S = 300.0


class Postgres:
    """One server on 127.0.0.1. Its folder is its owner's alone; as root, that is the user postgres."""

    def __init__(self) -> None:
        """Skips the test, naming what is missing."""
        folders = [*sorted(glob("/usr/lib/postgresql/*/bin"), reverse=True), os.environ.get("PATH", "")]
        search = os.pathsep.join(folders)
        programs = [shutil.which(name, path=search) for name in ("initdb", "postgres")]
        if None in programs:
            pytest.skip("postgresql is not installed")
        self._initdb, self._postgres = (str(program) for program in programs)
        self._user = "postgres" if os.getuid() == 0 else None
        # Not below pytest's folder, into which no other user may look.
        self._folder = Path(tempfile.mkdtemp(prefix="baton-postgres-"))
        if self._user:
            shutil.chown(self._folder, self._user)
        self._data = self._folder / "data"
        self._created = 0
        self.port = steady_port()
        self._run(
            self._initdb, "-D", str(self._data), "-U", "baton", "-A", "trust", "-E", "UTF8", "--no-sync"
        )
        self.start()

    def start(self) -> None:
        """Listen again; returns once questions are answered."""
        self._process = subprocess.Popen(
            [
                *(self._postgres, "-D", str(self._data), "-p", str(self.port), "-k", str(self._folder)),
                *(
                    "-c",
                    "listen_addresses=127.0.0.1",
                    "-c",
                    "shared_buffers=16MB",
                    "-c",
                    "max_connections=60",
                ),
            ],
            user=self._user,
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_S
        while True:
            try:
                psycopg.connect(f"{self.server}/postgres", connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                assert time.monotonic() < deadline and self._process.poll() is None, "postgres does not start"
                time.sleep(0.05)

    def stop(self) -> None:
        """As for a restart: connections are cut, what was committed stays."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(START_S)

    def kill(self) -> None:
        """As by a loss of power: a server does not start while processes of the last one exist."""
        self._process.send_signal(signal.SIGSTOP)  # it starts no more of them
        others = psutil.Process(self._process.pid).children(recursive=True)
        for one in (*others, self._process):
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self._process.wait(START_S)
        deadline = time.monotonic() + START_S
        while any(map(_runs, others)):
            assert time.monotonic() < deadline, "a process of the server does not end"
            time.sleep(0.01)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)  # immediately: its data are not needed any more
            self._process.wait(START_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def server(self) -> str:
        return f"postgresql://baton@127.0.0.1:{self.port}"

    def new_database(self) -> str:
        """The URL of an empty one."""
        self._created += 1
        with psycopg.connect(f"{self.server}/postgres", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE test{self._created} TEMPLATE template0".encode())
        return f"{self.server}/test{self._created}"

    def _run(self, *command: str) -> None:
        ended = subprocess.run(command, user=self._user, cwd=self._folder, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
