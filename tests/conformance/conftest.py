"""
Every case runs against one worker, and against router, prefill and decode worker over NIXL.

Servers that run already, such as a router before vLLM workers, are tested with `--server KIND:NAME=URL`:

    pytest tests/conformance --server smollm2:vllm=http://127.0.0.1:8602 --server thinker:vllm=http://127.0.0.1:8702

KIND is the model's: `smollm2`, or `thinker` for that of `scripted.py`. All other cases are skipped.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.conformance import deployment
from tests.conformance.deployment import LOG_LINES, PAIR, WAYS, Deployment, Deployments
from tests.conformance.scripted import make_scripted
from tests.engine.models import make_model

HERE = Path(__file__).parent

ALWAYS_RELAYED = "--local-prefill-tokens=4"
"""So that even a short prompt of the pair is computed by its prefill worker."""

_running = pytest.StashKey[Deployments]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--server", action="append", default=[], metavar="KIND:NAME=URL", type=parse_server)


def parse_server(text: str) -> tuple[tuple[str, str], str]:
    """
    >>> parse_server("thinker:vllm=http://127.0.0.1:8000")
    (('thinker', 'vllm'), 'http://127.0.0.1:8000')
    """
    kind, _, rest = text.partition(":")
    way, _, url = rest.partition("=")
    return (kind, way), url


def servers(config: pytest.Config) -> dict[tuple[str, str], str]:
    return dict(config.getoption("--server", default=[]))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = any("way" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "way" in metafunc.fixturenames and not chosen:
        given = dict.fromkeys(way for _, way in servers(metafunc.config))
        own = [WAYS[0], pytest.param(PAIR, marks=pytest.mark.nixl)]
        metafunc.parametrize("way", list(given) or own, indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Keep this folder's deployments from running beside other tests."""
    running = item.session.stash.get(_running, None)
    if running is not None and (nextitem is None or HERE not in nextitem.path.parents):
        running.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the deployment's last log lines to a failure's report."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        for name, value in item.funcargs.items():
            if isinstance(value, Deployment):
                report.sections.append((f"log of {name}", "\n".join(value.log[-LOG_LINES:])))
    return report


@pytest.fixture(scope="session")
def deployments(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployments]:
    running = Deployments(tmp_path_factory.mktemp("conformance"), servers(request.config))
    request.session.stash[_running] = running
    yield running
    running.close()


@pytest.fixture
def way(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    if chosen == PAIR:
        pytest.importorskip("nixl", reason="the NIXL library is missing")
    return chosen


@pytest.fixture
def served(deployments: Deployments, way: str) -> Deployment:
    """The built-in instruct model, under a name with a slash."""
    return smollm2(deployments, way)


@pytest.fixture
def thinker(deployments: Deployments, way: str) -> Deployment:
    """A model of Qwen3's architecture that thinks, answers and calls tools as Qwen3 writes it."""

    def begin(way: str) -> Deployment:
        folder = deployments.folder("scripted", make_scripted)
        flags = ["--dtype=float32", "--kv-cache-memory=16MiB", "--reasoning-parser=qwen3"]
        flags += ["--tool-call-parser=hermes", "--pooling=mean"]
        return deployment.start(way, str(folder), "thinker", *flags, *_relayed(way))

    return deployments.get("thinker", way, begin)


@pytest.fixture
def guarded(deployments: Deployments, way: str) -> Deployment:
    """A tiny model with an API key, one place in the batch and two in the queue."""

    def begin(way: str) -> Deployment:
        folder = deployments.folder("tiny", lambda folder: make_model(folder, max_position_embeddings=4096))
        flags = ["--dtype=float32", "--kv-cache-memory=16MiB", "--api-key=k"]
        flags += ["--max-running=1", "--max-queued=2"]
        return deployment.start(way, str(folder), "tiny", *flags, *_relayed(way), api_key="k")

    return deployments.get("guarded", way, begin)


def smollm2(deployments: Deployments, way: str) -> Deployment:
    """The built-in model, deployed in one of the ways."""

    def begin(way: str) -> Deployment:
        name = "HuggingFaceTB/SmolLM2-135M-Instruct"
        return deployment.start(way, "smollm2", name, "--kv-cache-memory=192MiB", *_relayed(way))

    return deployments.get("smollm2", way, begin)


def _relayed(way: str) -> tuple[str, ...]:
    return (ALWAYS_RELAYED,) if way == PAIR else ()
