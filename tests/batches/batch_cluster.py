"""
A fake API server with the functions that routers need for batches. It stores BatchJobs and their status,
publishes its keys, and signs tokens for pods like those that kubelets fetch.
"""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from baton_api import batch_jobs
from tests.router.issuer import Issuer

NAMESPACE, SERVICE = "models", "chat"
JOBS = f"/apis/baton.dev/v1alpha1/namespaces/{NAMESPACE}/batchjobs"


class BatchCluster:
    """`with BatchCluster() as api`; without an account, as `kubectl proxy` is."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        """Each request: its method and path."""
        self.status = 0
        """With it, everything is answered so."""
        self.refused = ""
        """Name of a BatchJob of which every request is answered by 403."""
        self.issuer = Issuer()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> BatchCluster:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def put(self, job: dict[str, Any]) -> None:
        """As `kubectl apply` does."""
        self.jobs[job["metadata"]["name"]] = job

    def token(self, pod: str, service: str = SERVICE, **claims: Any) -> str:
        """Return the token that a kubelet would fetch for a pod of the runners' account."""
        bound = {"namespace": NAMESPACE, "pod": {"name": pod, "uid": "uid-of-the-pod"}}
        page = {
            "iss": "https://kubernetes.default.svc",
            "aud": [batch_jobs.audience(NAMESPACE, service)],
            "sub": f"system:serviceaccount:{NAMESPACE}:{batch_jobs.account(service)}",
            "exp": time.time() + 3600,
            "kubernetes.io": bound,
        }
        return self.issuer.token(**{**page, **claims})

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        self.requests.append(f"{method} {path}")
        if self.status:
            return self.status, {}
        named = (path.split("/")[-2], (body or {}).get("metadata", {}).get("name"))
        if self.refused and self.refused in named:
            return 403, {}
        if path == "/openid/v1/jwks":
            return 200, json.loads(self.issuer.shown())
        if (method, path) == ("POST", JOBS):
            name = body["metadata"]["name"]
            if name in self.jobs:
                return 409, {}
            self.put({**body, "metadata": {**body["metadata"], "namespace": NAMESPACE, "uid": f"uid-{name}"}})
            return 201, body
        name, _, part = path.removeprefix(f"{JOBS}/").partition("/")
        if method == "PATCH" and part == "status" and name in self.jobs:
            self.jobs[name].setdefault("status", {}).update(body["status"])
            return 200, self.jobs[name]
        return 404, {}


def _handler(cluster: BatchCluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _any(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            status, answer = cluster.answer(self.command, self.path, body)
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PATCH = _any

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
