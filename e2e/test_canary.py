"""Canary rollouts: a new revision gets the weight of its step, and is rolled back if it fails requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from e2e.kubernetes import Kubernetes
from e2e.polling import until
from e2e.services import NAME, READY_S, addresses, tiny_service
from e2e.stopwatch import Stopwatch
from e2e.traffic import Traffic

PER_SECOND = 20
WEIGHT = 20
"""Percent of the requests for the new revision."""

SAMPLE = 400
"""Answers by which the share is measured."""

BROKEN = """
import http.server, json

LOAD = {"role": "decode", "model": "NAME", "epoch": "1", "compatibility": "none",
        "total_blocks": 1000, "free_blocks": 1000, "block_size": 16}

class Worker(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer(200, LOAD)

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.answer(500, {"error": {"message": "broken", "type": "server_error"}})

    def answer(self, status, body):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

http.server.ThreadingHTTPServer(("", 8000), Worker).serve_forever()
""".replace("NAME", NAME)
"""A decode worker that is ready and fails all requests."""

STAYS = {"canary": {"steps": [{"weight": WEIGHT, "pause": "1h"}]}}


def test_canary_gets_the_weight_of_its_step(cluster: Kubernetes, tmp_path: Path) -> None:
    cluster.apply(tiny_service(cluster, tmp_path))
    cluster.wait(f"bsvc/{NAME}", "condition=Ready", READY_S)
    old = _status(cluster)["currentRevision"]

    with cluster.reach(NAME) as url, Traffic(url, PER_SECOND) as traffic:
        until("twenty answers before the change", lambda: traffic.outcome.answered > 20, 60)
        watch = Stopwatch("a canary")
        cluster.patch(f"bsvc/{NAME}", {"spec": {"engine": {"maxModelLen": 256}, "rollout": STAYS}})
        until("another revision exists", lambda: _status(cluster)["updateRevision"] != old, READY_S)
        new = _status(cluster)["updateRevision"]
        until("the new revision answers", lambda: traffic.outcome.of(addresses(cluster, new)), READY_S)
        watch.note("changed -> its first answer")

        workers = addresses(cluster, new)
        answered, of_new = traffic.outcome.answered, traffic.outcome.of(workers)
        until("a sample", lambda: traffic.outcome.answered >= answered + SAMPLE, READY_S)
        sample = traffic.outcome.answered - answered
        share = (traffic.outcome.of(workers) - of_new) / sample
        watch.note(f"-> {sample} answers later")
        print(f"\n{share:.1%} of {sample} answers were the canary's, {WEIGHT} % expected")
        assert _status(cluster)["currentRevision"] == old
        assert WEIGHT / 2 < 100 * share < 2 * WEIGHT

        cluster.patch(f"bsvc/{NAME}", {"spec": {"rollout": {"canary": None}}})
        until("it gets all requests", lambda: _status(cluster)["currentRevision"] == new, READY_S)
        until("the old revision is gone", lambda: not _pods(cluster, old), READY_S)
        watch.note("steps removed -> the old revision is gone")
    assert not traffic.outcome.failures


def test_canary_that_fails_requests_is_rolled_back(cluster: Kubernetes) -> None:
    old = _status(cluster)["currentRevision"]
    template = cluster.object("bsvc", NAME)["spec"]["decode"]["podTemplate"]
    template["spec"]["containers"][0]["command"] = ["python", "-c", BROKEN]
    with cluster.reach(NAME) as url, Traffic(url, PER_SECOND) as traffic:
        until("twenty answers before the change", lambda: traffic.outcome.answered > 20, 60)
        watch = Stopwatch("a canary that fails its requests")
        cluster.patch(f"bsvc/{NAME}", {"spec": {"decode": {"podTemplate": template}, "rollout": STAYS}})
        cluster.wait(f"bsvc/{NAME}", "condition=Degraded", READY_S)
        watch.note("changed -> rolled back")
        (failed,) = [one for one in _status(cluster)["revisions"] if one["phase"] == "Failed"]
        (why,) = [one["message"] for one in _status(cluster)["conditions"] if one["type"] == "Degraded"]
        print(f"\n{why}")
        until("it is gone", lambda: not _pods(cluster, failed["name"]), READY_S)
        answered = traffic.outcome.answered
        until("a hundred answers after it", lambda: traffic.outcome.answered > answered + 100, 120)
    assert not traffic.outcome.failures
    assert "requests failed" in why
    assert _status(cluster)["currentRevision"] == old


def _status(cluster: Kubernetes) -> Any:
    return cluster.object("bsvc", NAME)["status"]


def _pods(cluster: Kubernetes, revision: str) -> list[Any]:
    return cluster.objects("pods", f"baton.dev/revision={revision}")
