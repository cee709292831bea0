"""A real API server with its etcd, for tests: no nodes, no controllers, three users with tokens."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import pytest

from tests.ports import steady_port
from tests.router.fake_kubernetes import certificate

STARTED_S = 300.0
TIMEOUT_S = 120.0


def program(name: str) -> str:
    """Return its path, or skip the test. `KUBEBUILDER_ASSETS` may name the folder."""
    executable = shutil.which(name, path=os.environ.get("KUBEBUILDER_ASSETS")) or shutil.which(name)
    if executable is None:
        pytest.skip(f"{name} is not installed: e2e/cluster/cluster api FOLDER, KUBEBUILDER_ASSETS=FOLDER")
    return executable


class RealKubernetes:
    """`admin` is a client with all rights; `account` is the folder of a user without rights."""

    def __init__(
        self,
        url: str,
        tls: ssl.SSLContext,
        admin: httpx.AsyncClient,
        account: Path,
        server: Server,
        audit: Path,
    ) -> None:
        self.url = url
        self.tls = tls
        self.admin = admin
        self.account = account
        self.server = server
        self.audit = audit
        """Each request that was answered: one JSON object a line."""

    async def post(self, path: str, body: Any) -> None:
        (await self.admin.post(path, json=body)).raise_for_status()

    async def patch(self, path: str, body: Any) -> None:
        headers = {"content-type": "application/merge-patch+json"}
        (await self.admin.patch(path, json=body, headers=headers)).raise_for_status()

    async def delete(self, path: str) -> None:
        (await self.admin.delete(path)).raise_for_status()


class Server:
    """The API server's process, which can be stopped and started again."""

    def __init__(self, command: list[str], log: BinaryIO) -> None:
        self._command = command
        self._log = log
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *self._command, stdout=self._log, stderr=self._log
        )

    async def stop(self) -> None:
        if self.process is not None and self.process.returncode is None:
            # It would wait a minute for watches to end.
            self.process.kill()
            await self.process.wait()

    async def restart(self, client: httpx.AsyncClient, path: str = "/readyz") -> None:
        """Back as it was, and ready."""
        await self.start()
        assert self.process is not None
        await _ready(client, path, [self.process])

    def another(self, port: int) -> Server:
        """Return a second API server of the same cluster, at another port and without a log of requests."""
        own = ("--secure-port=", "--audit-")
        return Server(
            [*(one for one in self._command if not one.startswith(own)), f"--secure-port={port}"], self._log
        )


AUDIT = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - level: None
    users: ["system:apiserver", admin]
  - level: Metadata
"""


@asynccontextmanager
async def real_kubernetes(folder: Path) -> AsyncIterator[RealKubernetes]:
    etcd, server = program("etcd"), program("kube-apiserver")
    store, peers, port = steady_port(), steady_port(), steady_port()
    account = folder / "account"
    account.mkdir()
    pem = certificate(account)
    (account / "token").write_text("token-of-the-router")
    (account / "namespace").write_text("models")
    tokens = folder / "tokens.csv"
    tokens.write_text('token-of-the-admin,admin,1,"system:masters"\ntoken-of-the-router,router,2\n')
    with tokens.open("a") as more:
        more.write("token-of-the-operator,operator,3\n")
    policy, audit = folder / "audit.yaml", folder / "audit.log"
    policy.write_text(AUDIT)
    storing = f"http://127.0.0.1:{store}"
    commands = [
        [
            etcd, f"--data-dir={folder / 'etcd'}", "--unsafe-no-fsync", "--log-level=error",
            f"--listen-client-urls={storing}", f"--advertise-client-urls={storing}",
            f"--listen-peer-urls=http://127.0.0.1:{peers}",
        ],
        [
            server, f"--etcd-servers={storing}", "--bind-address=127.0.0.1", f"--secure-port={port}",
            "--advertise-address=127.0.0.1", f"--tls-cert-file={pem}", f"--tls-private-key-file={pem}",
            f"--token-auth-file={tokens}", "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.0.0.0/16",
            f"--service-account-key-file={pem}", f"--service-account-signing-key-file={pem}",
            "--service-account-issuer=https://kubernetes.default.svc", f"--cert-dir={folder}",
            "--disable-admission-plugins=ServiceAccount",
            "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
            f"--audit-policy-file={policy}", f"--audit-log-path={audit}", "--audit-log-mode=blocking",
        ],
    ]  # fmt: skip
    url = f"https://127.0.0.1:{port}"
    tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
    headers = {"authorization": "Bearer token-of-the-admin"}
    with (folder / "log").open("wb") as log:
        kept, api = (Server(command, log) for command in commands)
        try:
            async with httpx.AsyncClient(base_url=storing, trust_env=False) as etcd_client:
                await kept.restart(etcd_client, "/health")  # an API server does not wait for it for long
            async with httpx.AsyncClient(
                base_url=url, verify=tls, headers=headers, trust_env=False, timeout=TIMEOUT_S
            ) as admin:
                await api.restart(admin)
                yield RealKubernetes(url, tls, admin, account, api, audit)
        finally:
            await api.stop()
            await kept.stop()


async def _ready(client: httpx.AsyncClient, path: str, processes: list[asyncio.subprocess.Process]) -> None:
    deadline = asyncio.get_running_loop().time() + STARTED_S
    while True:
        try:
            if (await client.get(path)).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert all(process.returncode is None for process in processes), "it ended: see its log"
        assert asyncio.get_running_loop().time() < deadline, f"not ready within {STARTED_S} s"
        await asyncio.sleep(0.1)
