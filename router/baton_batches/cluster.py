"""The Kubernetes API as far as batches need it: make one object, write one status, read the public keys."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import msgspec

from baton_api.errors import BatonError
from baton_http.kubernetes import KubernetesAccess, Unanswered

ASK_S = 15.0

ANSWER_LIMIT = 1024 * 1024

JOBS = "/apis/baton.dev/v1alpha1/namespaces/{}/batchjobs"
KEYS = "/openid/v1/jwks"
"""What the API server signs accounts' tokens with; every account may read it."""


class Cluster:
    """One API server. Each call raises OSError if there is no answer."""

    def __init__(self, access: KubernetesAccess) -> None:
        self._access = access

    def namespace(self) -> str:
        """The router's own. Raises OSError."""
        try:
            return self._access.where()
        except Unanswered as error:
            raise OSError(str(error)) from error

    async def make(self, manifest: object) -> int:
        """Make a BatchJob; gives the status of the answer."""
        status, _ = await self._ask("POST", self._jobs(), "application/json", manifest)
        return status

    async def tell(self, name: str, status: object) -> int:
        """Merge into the status of a BatchJob; gives the status of the answer."""
        where = f"{self._jobs()}/{quote(name, safe='')}/status"
        answered, _ = await self._ask("PATCH", where, "application/merge-patch+json", {"status": status})
        return answered

    async def keys(self) -> bytes:
        """The keys (JWKS) that tokens of accounts are signed with."""
        status, body = await self._ask("GET", KEYS)
        if status != 200:
            raise OSError(f"The API server answers with status {status} when asked for its keys.")
        return body

    def _jobs(self) -> str:
        return JOBS.format(quote(self.namespace(), safe=""))

    async def _ask(self, method: str, where: str, kind: str = "", body: object = None) -> tuple[int, bytes]:
        content = msgspec.json.encode(body) if kind else b""
        try:
            connected = self._access.open()
            try:
                async with asyncio.timeout(ASK_S):
                    lines = [f"{method} {where} HTTP/1.1", f"host: {connected.upstream.name}"]
                    lines += ["user-agent: baton-router", "accept: */*"]
                    lines += [f"content-type: {kind}"] if kind else []
                    lines += [f"content-length: {len(content)}"] if kind else []
                    lines += [f"authorization: Bearer {connected.token}"] if connected.token else []
                    head = "\r\n".join(lines) + "\r\n\r\n"
                    exchange = await connected.upstream.request(head.encode(), content)
                    answer = bytearray()
                    while piece := await exchange.read():
                        answer += piece
                        if len(answer) > ANSWER_LIMIT:
                            raise Unanswered(f"its answer has more than {ANSWER_LIMIT} bytes")
                    return exchange.status, bytes(answer)
            finally:
                connected.upstream.close()
        except (Unanswered, BatonError) as error:  # TimeoutError is an OSError
            raise OSError(f"The API server was not asked: {error}") from error
