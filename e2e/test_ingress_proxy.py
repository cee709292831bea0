"""nginx in front of the routers, like an ingress: with its defaults, which do not suit streams."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import openai
import pytest

from e2e.kubernetes import Kubernetes
from e2e.polling import until
from e2e.services import NAME, READY_S, service

READ_TIMEOUT_S = 5
"""Seconds without data after which this nginx ends a request. The default is 60."""

CONFIGURATION = """
daemon off;
master_process off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass {upstream};
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_read_timeout {timeout}s;
        }}
    }}
}}
"""


@pytest.fixture(scope="module")
def proxy(cluster: Kubernetes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an nginx in front of a service's routers."""
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    if nginx is None:
        pytest.skip("nginx is not installed")
    cluster.apply(service())
    cluster.wait(f"bsvc/{NAME}", "condition=Ready", READY_S)
    folder, port = tmp_path_factory.mktemp("nginx"), _free_port()
    with cluster.reach(NAME) as upstream:
        written = Path(folder / "nginx.conf")
        written.write_text(
            CONFIGURATION.format(folder=folder, port=port, upstream=upstream, timeout=READ_TIMEOUT_S)
        )
        with subprocess.Popen([nginx, "-e", str(folder / "error.log"), "-c", str(written)]) as process:
            try:
                until("nginx listens", lambda: _listens(port), 10)
                yield f"http://127.0.0.1:{port}"
            finally:
                process.terminate()


def test_tokens_arrive_one_by_one(proxy: str) -> None:
    arrivals = _stream(proxy, "Count from one to one hundred.", 64)
    spread, gaps = arrivals[-1] - arrivals[0], len(arrivals) - 1
    together = sum(later - earlier < 0.0005 for earlier, later in pairwise(arrivals))
    print(f"\n{gaps + 1} pieces over {spread:.2f} s, {together} of them together with the one before")
    assert gaps >= 32
    assert together < gaps / 2


def test_stream_longer_than_the_proxy_timeout_is_not_cut(proxy: str) -> None:
    arrivals = _stream(proxy, "Tell the whole history of Rome, at length.", 400)
    print(f"\n{len(arrivals)} pieces over {arrivals[-1] - arrivals[0]:.1f} s; nginx waits {READ_TIMEOUT_S} s")
    assert arrivals[-1] - arrivals[0] > READ_TIMEOUT_S


def _stream(url: str, question: str, tokens: int) -> list[float]:
    """Return the arrival time of each piece of an answer with exactly `tokens` tokens."""
    arrivals = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": question}],
            max_tokens=tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        reason = None
        for chunk in stream:
            if chunk.choices:
                reason = chunk.choices[0].finish_reason or reason
                if chunk.choices[0].delta.content:
                    arrivals.append(time.monotonic())
    assert reason == "length"
    return arrivals


def _free_port() -> int:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port


def _listens(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
