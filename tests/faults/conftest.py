"""One cluster for all fault tests: each leaves it healthy, or the next one makes it so."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.faults.cluster import Cluster, open_cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    pytest.importorskip("nixl", reason="the NIXL library is missing")
    async with open_cluster(tmp_path_factory.mktemp("faults")) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(running: Cluster) -> Cluster:
    await running.healthy()
    return running
