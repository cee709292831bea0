"""Workers by DNS, asked for at a small real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton_api.workers import Role
from baton_router.settings import DnsName
from baton_router.workers.discovery.kubernetes import (
    EMPTY_ANSWERS_LIMIT,
    Address,
    DnsWorkers,
    LastGoodAddresses,
)
from baton_router.workers.discovery.listed import ListedWorker
from tests.router.fake_dns import FakeDns
from tests.router.running import until

ONE, TWO = ("10.0.0.1", 8000), ("10.0.0.2", 8000)
NAME = "workers.example.org"
SERVICE = "_http._tcp.workers.example.org"

NOTHING_TO_ASK_FOR = [
    "workers",
    "workers:",
    ":8000",
    "workers:http",
    "workers:0",
    "http://workers:8000",
    "::1:80",
]


@pytest.mark.parametrize("text", NOTHING_TO_ASK_FOR)
def test_dns_flag_without_port_or_name_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(ValueError, match=r"give NAME:PORT"):
        DnsName.parse(text)


ANSWERS: dict[str, tuple[list[list[Address]], list[Address]]] = {
    "nothing yet": ([], []),
    "an answer": ([[ONE]], [ONE]),
    "another answer": ([[ONE], [TWO]], [TWO]),
    "nobody, once": ([[ONE], []], [ONE]),
    "nobody, and then one": ([[ONE], [], [], [TWO]], [TWO]),
    "nobody, for good": ([[ONE], *[[]] * EMPTY_ANSWERS_LIMIT], []),
    "nobody counts from the last answer on": ([[ONE], [], [], [ONE], [], []], [ONE]),
}


@pytest.mark.parametrize(("answers", "left"), ANSWERS.values(), ids=ANSWERS.keys())
def test_failed_query_keeps_the_last_answer(answers: list[list[Address]], left: list[Address]) -> None:
    good = LastGoodAddresses()
    for answer in answers:
        assert good.took(frozenset(answer)) == good.addresses
    assert good.addresses == set(left)


class Follower:
    """Records the lists of one source."""

    def __init__(self, source: DnsWorkers) -> None:
        self.source = source
        self.lists: list[frozenset[ListedWorker]] = []

    @property
    def addresses(self) -> set[str]:
        return {one.name for one in self.lists[-1]} if self.lists else set()

    async def next(self) -> set[str]:
        """After two more answers: the first may have been asked for before."""
        count = len(self.lists)
        await until(lambda: len(self.lists) >= count + 2)
        return self.addresses


@asynccontextmanager
async def followed(server: FakeDns, name: str) -> AsyncIterator[Follower]:
    follower = Follower(DnsWorkers(DnsName.parse(name), Role.PREFILL, 0.005, resolver=server.resolver))
    task = asyncio.create_task(follower.source.watch(follower.lists.append))
    try:
        yield follower
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_workers_follow_their_addresses() -> None:
    async with FakeDns() as server, followed(server, f"{NAME}:8000") as follower:
        server.records[NAME, "A"] = ["10.0.0.1", "10.0.0.2"]
        assert await follower.next() == {"10.0.0.1:8000", "10.0.0.2:8000"}
        assert {one.role for one in follower.lists[-1]} == {Role.PREFILL}
        server.records[NAME, "A"] = ["10.0.0.2", "10.0.0.3"]
        assert await follower.next() == {"10.0.0.2:8000", "10.0.0.3:8000"}
        del server.records[NAME, "A"]
        await until(lambda: not follower.addresses)
        assert follower.source.trouble == f"{NAME} has no address"


@pytest.mark.parametrize("kind", ["silent", "failing"])
async def test_known_workers_stay_while_no_server_answers(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeDns() as server:
        server.records[NAME, "A"] = ["10.0.0.1"]
        server.resolver.lifetime = 0.1
        async with followed(server, f"{NAME}:8000") as follower:
            assert await follower.next() == {"10.0.0.1:8000"}
            setattr(server, kind, True)
            await until(lambda: NAME in follower.source.trouble)
            queries, lists = len(server.requests), len(follower.lists)
            await until(lambda: len(server.requests) > queries + 3)
            assert (follower.addresses, len(follower.lists)) == ({"10.0.0.1:8000"}, lists)
            setattr(server, kind, False)
            server.records[NAME, "A"] = ["10.0.0.2"]
            await until(lambda: not follower.source.trouble)
            assert await follower.next() == {"10.0.0.2:8000"}
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


async def test_ipv6_is_used_without_ipv4() -> None:
    async with FakeDns() as server, followed(server, f"{NAME}:8000") as follower:
        server.records[NAME, "AAAA"] = ["fd00::1"]
        assert await follower.next() == {"[fd00::1]:8000"}
        server.records[NAME, "A"] = ["10.0.0.1"]  # the same worker by another address
        assert await follower.next() == {"10.0.0.1:8000"}


async def test_srv_records_give_host_and_port_of_each_worker() -> None:
    async with FakeDns() as server, followed(server, SERVICE) as follower:
        server.records[SERVICE, "SRV"] = ["0 50 8001 a.example.org.", "0 50 8002 b.example.org."]
        server.records["a.example.org", "A"] = ["10.0.0.1"]
        server.records["b.example.org", "A"] = ["10.0.0.2"]
        assert await follower.next() == {"10.0.0.1:8001", "10.0.0.2:8002"}
        server.along = [("a.example.org", "10.0.0.1"), ("b.example.org", "10.0.0.9")]
        await until(lambda: follower.addresses == {"10.0.0.1:8001", "10.0.0.9:8002"})
        server.requests.clear()
        await follower.next()
        assert {kind for _, kind in server.requests} == {"SRV"}  # additional records caused no queries


async def test_short_name_uses_the_search_list() -> None:
    async with FakeDns() as server, followed(server, "workers:8000") as follower:
        server.records["workers.svc.cluster.local", "A"] = ["10.0.0.1"]
        assert await follower.next() == {"10.0.0.1:8000"}
