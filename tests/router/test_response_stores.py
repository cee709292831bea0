"""
Responses are kept within their bounds, for their owners alone, and continued whatever became of them.

By each store: in memory, and in a real Redis. What a Redis that fails may do: answers are never lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass

import pytest
from redis.asyncio import Redis

from baton_api import metrics
from baton_api.errors import ResponseNotFound, SetupError, StorageUnavailable
from baton_api.response_store import ITEM_OVERHEAD, OVERHEAD, ResponseStore, StoreLimits, Turn
from baton_router.proxy.redis_responses import KEYS, RedisResponseStore
from baton_router.proxy.response_stores import MemoryResponseStore, RouterResponseStore
from tests.router.fake_worker import FakeWorker
from tests.router.redis_server import RedisServer, UnkindRedis
from tests.router.running import running_router, until
from tests.router.test_responses import PATH, QUESTION, respond

ME, YOU = b"me", b"you"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Opened:
    store: RouterResponseStore
    clock: Clock
    usage: Callable[[], Awaitable[tuple[int, int]]]
    """Returns the number of retrievable responses, and the bytes of all turns."""


Opener = Callable[..., Opened]


def in_memory(responses: int = 100, bytes: int = 10**9, seconds: float = 60.0) -> Opened:
    clock = Clock()
    store = ResponseStore(StoreLimits(responses, bytes, seconds), clock)

    async def usage() -> tuple[int, int]:
        return len(store), store.size

    return Opened(MemoryResponseStore(store), clock, usage)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.slow)])
async def open_store(request: pytest.FixtureRequest) -> AsyncIterator[Opener]:
    if request.param == "memory":
        yield in_memory
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    async with Redis(port=server.port) as client:
        await client.flushall()
        opened: list[RedisResponseStore] = []

        async def usage() -> tuple[int, int]:
            count, size = await client.zcard(KEYS[1]), await client.hget(KEYS[0], "size")
            return count, int(size or 0)

        def in_redis(responses: int = 100, bytes: int = 10**9, seconds: float = 60.0) -> Opened:
            clock, limits = Clock(), StoreLimits(responses, bytes, seconds)
            opened.append(RedisResponseStore(server.url, limits, pytest.fail, clock))
            return Opened(opened[-1], clock, usage)

        yield in_redis
        for one in opened:
            await one.close()


def turn(id: str, before: Turn | None = None, text: str = "") -> Turn:
    return Turn(
        id, before, (b'"in %b"' % id.encode(),), b'{"output":["out %b","%b"]}' % (id.encode(), text.encode())
    )


def same(one: Turn | None, other: Turn | None) -> bool:
    """Whether two turns have the same content, with all that they continue."""
    if one is None or other is None:
        return one is other
    return (one.id, one.uid, one.input, one.body) == (other.id, other.uid, other.input, other.body) and same(
        one.before, other.before
    )


async def test_response_is_found_by_its_owner_only(open_store: Opener) -> None:
    store = open_store().store
    kept = turn("a")
    await store.put(ME, kept)
    assert same(await store.get(ME, "a"), kept)
    for someone, id in [(YOU, "a"), (ME, "b"), (b"", "a"), (ME, "é\n" * 1000)]:
        with pytest.raises(ResponseNotFound, match="not found"):
            await store.get(someone, id)
        with pytest.raises(ResponseNotFound):
            await store.delete(someone, id)
    assert same(await store.get(ME, "a"), kept)


async def test_any_bytes_are_stored(open_store: Opener) -> None:
    """Without an owner, an input or text; with all bytes; with ids as clients may choose them."""
    store = open_store().store
    for id in ("", " ", "a:b", "é" * 1000, "%d{x}*"):
        kept = Turn(id, None, (b"", bytes(range(256)), b""), bytes(range(256)) * 1000)
        await store.put(b"", kept)
        assert same(await store.get(b"", id), kept)
    await store.put(b"", empty := Turn("empty", None, (), b""))
    assert same(await store.get(b"", "empty"), empty)


async def test_items_are_found_by_their_ids_while_their_response_is(open_store: Opener) -> None:
    store = open_store().store
    asked, said = b'{"id":"i1","role":"user"}', b'{"id":"o1","x":"\\u00e9 \xc3\xa9"}'
    await store.put(ME, Turn("a", None, (b'{"x":1}', asked), b' {"x":1, "output":[{}, %b ]}' % said))
    await store.put(ME, Turn("b", None, (asked,), b'{"output":[]}'))
    await store.put(ME, Turn("no object", None, (), b"[]"))
    assert await store.items(ME, ["o1", "none", "i1"]) == {"o1": said, "i1": asked}
    assert await store.items(ME, []) == await store.items(YOU, ["o1"]) == {}
    await store.delete(ME, "a")
    assert await store.items(ME, ["o1", "i1"]) == {"i1": asked}, "the later response has it too"
    await store.delete(ME, "b")
    assert await store.items(ME, ["i1"]) == {}


async def test_items_outlive_a_later_response_that_has_them_too(open_store: Opener) -> None:
    store = open_store().store
    first, second = b'{"id":"msg_x","content":"first"}', b'{"id":"msg_x","content":"second"}'
    await store.put(ME, Turn("a", None, (), b'{"output":[%b]}' % first))
    await store.put(ME, Turn("b", None, (second, second), b'{"output":[]}'))
    assert await store.items(ME, ["msg_x"]) == {"msg_x": second}
    await store.delete(ME, "b")
    assert await store.items(ME, ["msg_x"]) == {"msg_x": first}
    await store.delete(ME, "a")
    assert await store.items(ME, ["msg_x"]) == {}


async def test_same_id_may_have_two_owners(open_store: Opener) -> None:
    store = open_store().store
    mine, yours = turn("a"), turn("a")
    await store.put(ME, mine)
    await store.put(YOU, yours)
    await store.delete(YOU, "a")
    assert same(await store.get(ME, "a"), mine)


async def test_oldest_responses_leave_above_the_count(open_store: Opener) -> None:
    opened = open_store(responses=2)
    for id in "abc":
        await opened.store.put(ME, turn(id))
    assert (await opened.usage())[0] == 2
    with pytest.raises(ResponseNotFound):
        await opened.store.get(ME, "a")
    await opened.store.get(ME, "b")


async def test_oldest_responses_leave_above_the_size(open_store: Opener) -> None:
    opened = open_store(bytes=3 * (OVERHEAD + ITEM_OVERHEAD + 1000))
    for id in "abcd":
        await opened.store.put(ME, turn(id, text="x" * 900))
    assert (await opened.usage())[0] == 3
    with pytest.raises(ResponseNotFound):
        await opened.store.get(ME, "a")


async def test_oversized_response_is_not_stored_and_evicts_nothing(open_store: Opener) -> None:
    store = open_store(bytes=OVERHEAD + ITEM_OVERHEAD + 100).store
    await store.put(ME, turn("a"))
    await store.put(ME, turn("b", text="x" * 900))
    await store.get(ME, "a")
    with pytest.raises(ResponseNotFound):
        await store.get(ME, "b")


@pytest.mark.parametrize(
    "bounds", [{"responses": 10}, {"bytes": 10 * (OVERHEAD + ITEM_OVERHEAD + 200)}], ids=str
)
async def test_owner_with_most_evicts_its_own_responses(open_store: Opener, bounds: dict[str, int]) -> None:
    store = open_store(**bounds).store
    for number in range(3):
        await store.put(ME, turn(f"mine {number}", text="x" * 10))
    before: Turn | None = None
    for number in range(50):
        before = turn(f"yours {number}", before if number % 5 else None, "x" * 100)
        await store.put(YOU, before)
    for number in range(3):
        await store.get(ME, f"mine {number}")
    await store.get(YOU, "yours 49")
    with pytest.raises(ResponseNotFound):
        await store.get(YOU, "yours 10")


async def test_response_with_a_known_id_replaces_it(open_store: Opener) -> None:
    opened = open_store()
    await opened.store.put(ME, turn("a", text="x" * 100))
    await opened.store.put(ME, latest := turn("a"))
    assert same(await opened.store.get(ME, "a"), latest)
    assert await opened.usage() == (1, latest.size)
    await opened.store.put(ME, latest)
    assert same(await opened.store.get(ME, "a"), latest)
    assert await opened.usage() == (1, latest.size)


async def test_response_may_continue_the_one_whose_id_it_takes(open_store: Opener) -> None:
    """vLLM lets clients choose the ids of their responses."""
    opened = open_store()
    first = turn("a")
    second = turn("a", first)
    third = turn("a", second)
    for one in (first, second, third):
        await opened.store.put(ME, one)
    assert same(await opened.store.get(ME, "a"), third)
    assert await opened.usage() == (1, first.size + second.size + third.size)
    await opened.store.delete(ME, "a")
    assert await opened.usage() == (0, 0)


@pytest.mark.parametrize("limits", [{"responses": 0}, {"bytes": 0}, {"seconds": 0.0}], ids=str)
async def test_zero_bound_stores_nothing(open_store: Opener, limits: dict[str, int]) -> None:
    opened = open_store(**limits)
    await opened.store.put(ME, turn("a"))
    assert await opened.usage() == (0, 0)


async def test_responses_expire(open_store: Opener) -> None:
    opened = open_store(seconds=60)
    store, clock = opened.store, opened.clock
    await store.put(ME, turn("a"))
    clock.now += 30
    await store.put(ME, turn("b"))
    clock.now += 29.9
    await store.get(ME, "a")
    clock.now += 0.2
    with pytest.raises(ResponseNotFound):
        await store.get(ME, "a")
    await store.get(ME, "b")
    clock.now += 30
    with pytest.raises(ResponseNotFound):
        await store.delete(ME, "b")
    assert await opened.usage() == (0, 0)


async def test_successor_of_a_deleted_response_keeps_its_items(open_store: Opener) -> None:
    opened = open_store()
    store = opened.store
    first = turn("a")
    second = turn("b", first)
    await store.put(ME, first)
    await store.put(ME, second)
    _, both = await opened.usage()
    await store.delete(ME, "a")
    assert await opened.usage() == (1, both)
    assert (await store.get(ME, "b")).whole_input[0] == b'"in a"'
    await store.delete(ME, "b")
    assert await opened.usage() == (0, 0)


async def test_response_continues_what_has_gone_while_it_was_made(open_store: Opener) -> None:
    """All of its conversation, the latest part of it, or none has been deleted meanwhile."""
    opened = open_store()
    store = opened.store
    first = turn("a")
    second = turn("b", first)
    for gone in ("", "a", "b", "ab"):
        await store.put(ME, first)
        await store.put(ME, second)
        before = await store.get(ME, "b")
        for id in gone:
            await store.delete(ME, id)
        third = turn("c", before)
        await store.put(ME, third)
        assert same(await store.get(ME, "c"), third), gone
        assert (await opened.usage())[1] == first.size + second.size + third.size, gone
        for id in {"a", "b", "c"} - set(gone):
            await store.delete(ME, id)
        assert await opened.usage() == (0, 0), gone


async def test_long_conversation_stores_each_turn_once(open_store: Opener) -> None:
    opened = open_store(responses=1000)
    last = None
    sizes = 0
    for number in range(200):
        last = turn(str(number), last, "x" * 100)
        await opened.store.put(ME, last)
        sizes += last.size
    assert await opened.usage() == (200, sizes)
    assert same(await opened.store.get(ME, "199"), last)


@pytest.mark.parametrize("seed", range(5))
async def test_law_bounds_hold_and_nothing_leaks(open_store: Opener, seed: int) -> None:
    rng = random.Random(seed)
    limit = 30 * (OVERHEAD + ITEM_OVERHEAD + 100)
    opened = open_store(responses=20, bytes=limit, seconds=50)
    store = opened.store
    stored: list[tuple[bytes, Turn]] = []
    for number in itertools.count():
        if number == 300:
            break
        someone = rng.choice([ME, YOU])
        mine = [kept for holder, kept in stored if holder == someone]
        before = rng.choice(mine) if mine and rng.random() < 0.7 else None
        if rng.random() < 0.8:
            added = turn(str(number), before, "x" * rng.randrange(200))
            await store.put(someone, added)
            stored.append((someone, added))
        elif before is not None:
            with contextlib.suppress(ResponseNotFound):  # it has gone by itself
                await store.delete(someone, before.id)
        opened.clock.now += rng.expovariate(0.5)
        count, size = await opened.usage()
        assert count <= 20
        assert size <= limit
    opened.clock.now += 1000
    with pytest.raises(ResponseNotFound):
        await store.get(ME, "0")
    assert await opened.usage() == (0, 0)
    assert not any(kept.holders for _, kept in stored)


# --- Redis ---

LIMITS = StoreLimits(100, 10**9, 60.0)


@contextlib.asynccontextmanager
async def connected(
    url: str, limits: StoreLimits = LIMITS, *, timeout_s: float = 30.0
) -> AsyncIterator[tuple[RedisResponseStore, list[str], Clock]]:
    """A store in Redis, the operations that failed, and its clock."""
    failed: list[str] = []
    clock = Clock()
    store = RedisResponseStore(url, limits, failed.append, clock, timeout_s)
    yield store, failed, clock
    await store.close()


@pytest.fixture
async def client(redis_server: RedisServer) -> AsyncIterator[Redis]:
    """Of an empty Redis."""
    async with Redis(port=redis_server.port) as client:
        await client.flushall()
        yield client


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_law_redis_keeps_what_memory_keeps(redis_server: RedisServer, client: Redis, seed: int) -> None:
    """Of random conversations of three owners; those who have most have so in both."""
    rng = random.Random(seed)
    limits = StoreLimits(10_000, 30 * (OVERHEAD + ITEM_OVERHEAD + 100), 50)
    memory = in_memory(limits.responses, limits.bytes, limits.seconds)
    async with connected(redis_server.url, limits) as (store, _, clock):
        stored: dict[bytes, list[Turn]] = {owner: [] for owner in (b"a", b"b", b"c")}
        for number in range(150):
            owner = rng.choice(list(stored))
            before = rng.choice(stored[owner]) if stored[owner] and rng.random() < 0.7 else None
            if rng.random() < 0.8:
                added = turn(str(number), before, "x" * rng.randrange(300))
                stored[owner].append(added)
                await memory.store.put(owner, added)
                await store.put(owner, added)
            elif before is not None:
                ends = []
                for one in (memory.store, store):
                    try:
                        await one.delete(owner, before.id)
                        ends.append("deleted")
                    except ResponseNotFound:
                        ends.append("not found")
                assert ends[0] == ends[1]
            memory.clock.now += rng.expovariate(0.5)
            clock.now = memory.clock.now
            wanted = rng.choice([*stored[owner], added])
            both: list[Turn | None] = []
            for one in (memory.store, store):
                try:
                    both.append(await one.get(owner, wanted.id))
                except ResponseNotFound:
                    both.append(None)
            assert same(*both)
            count, size = await memory.usage()
            assert (await client.zcard(KEYS[1]), int(await client.hget(KEYS[0], "size") or 0)) == (
                count,
                size,
            )


@pytest.mark.slow
async def test_redis_drops_everything_when_no_router_does(redis_server: RedisServer, client: Redis) -> None:
    """All keys end with the last response, whatever other routers have as its time to live."""
    item = Turn("a", None, (b'{"id":"i"}',), b"{}")
    async with (
        connected(redis_server.url, StoreLimits(9, 10**9, 1000.0)) as (store, *_),
        connected(redis_server.url, StoreLimits(9, 10**9, 10.0)) as (other, *_),
    ):
        await store.put(ME, item)
        await other.put(ME, turn("b", item))
        assert set(await client.keys("*")) == {key.encode() for key in KEYS}
        assert all([900_000 < await client.pttl(key) <= 1_000_000 for key in KEYS])


@pytest.mark.slow
async def test_redis_that_has_evicted_keys_loses_all_and_goes_on(
    redis_server: RedisServer, client: Redis
) -> None:
    async with connected(redis_server.url) as (store, failed, _):
        for key in KEYS:
            first = Turn("a", None, (b'{"id":"i"}',), b"{}")
            await store.put(ME, first)
            await client.delete(key)
            with contextlib.suppress(ResponseNotFound):
                await store.get(ME, "a")
            await store.items(ME, ["i"])
            await store.put(ME, second := turn("b", first))
            assert same(await store.get(ME, "b"), second)
            await store.delete(ME, "b")
        assert not failed


@pytest.mark.slow
async def test_redis_that_is_full_stores_nothing_and_still_finds(
    redis_server: RedisServer, client: Redis
) -> None:
    async with connected(redis_server.url) as (store, failed, _):
        await store.put(ME, turn("a"))
        await client.config_set("maxmemory", "1")
        try:
            with pytest.raises(StorageUnavailable):
                await store.put(ME, turn("b"))
            await store.get(ME, "a")
            await store.delete(ME, "a")
        finally:
            await client.config_set("maxmemory", "0")
        assert failed == ["write"]
        assert not await client.exists(KEYS[1])


@pytest.mark.slow
async def test_redis_may_restart(redis_server: RedisServer, client: Redis) -> None:
    """Connections end, and the script is lost."""
    async with connected(redis_server.url) as (store, failed, _):
        await store.put(ME, turn("a"))
        await asyncio.to_thread(redis_server.stop)
        with pytest.raises(StorageUnavailable):
            await store.get(ME, "a")
        await asyncio.to_thread(redis_server.start)
        with pytest.raises(ResponseNotFound):
            await store.get(ME, "a")
        await store.put(ME, turn("a"))
        await client.script_flush()
        await store.get(ME, "a")
        assert failed == ["read"]


@pytest.mark.slow
async def test_late_reply_is_not_taken_for_that_of_a_later_operation(
    redis_server: RedisServer, client: Redis
) -> None:
    async with connected(redis_server.url) as (store, *_):
        for id in "ab":
            await store.put(ME, turn(id))
    async with (
        UnkindRedis(redis_server.port) as unkind,
        connected(f"redis://127.0.0.1:{unkind.port}") as (store, failed, _),
    ):
        await store.get(ME, "a")
        unkind.released.clear()
        asked = asyncio.create_task(store.get(ME, "a"))
        await until(lambda: unkind.scripts == 2)
        asked.cancel()  # as a timeout does
        await asyncio.wait([asked])
        unkind.released.set()
        assert (await store.get(ME, "b")).id == "b"
        unkind.cut = 20
        with pytest.raises(StorageUnavailable):
            await store.get(ME, "a")
        unkind.cut = None
        assert (await store.get(ME, "b")).id == "b"
        assert failed == ["read"]


UNKIND = {
    "no Redis": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "noise": b"\xff\x00\r\n",
    "closed": b"",
    "closed within a reply": b"$100\r\nabc",
    "full": b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
    "loading": b"-LOADING Redis is loading the dataset in memory\r\n",
    "no password": b"-NOAUTH Authentication required.\r\n",
    "a replica": b"-READONLY You can't write against a read only replica.\r\n",
    "no script, again and again": b"-NOSCRIPT No matching script.\r\n",
    "no scripts at all": b"-ERR unknown command 'EVALSHA'\r\n",
}


@pytest.mark.parametrize("reply", [pytest.param(reply, id=name) for name, reply in UNKIND.items()])
async def test_unkind_redis_is_503(reply: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with UnkindRedis(reply=reply) as unkind, connected(unkind.url) as (store, failed, _):
        for _ in range(2):
            for operation in (
                store.get(ME, "a"), store.items(ME, ["i"]), store.delete(ME, "a"), store.put(ME, turn("a")),
            ):  # fmt: skip
                with pytest.raises(StorageUnavailable) as error:
                    await operation
                assert (error.value.status, error.value.retry_after) == (503, 2)
        assert failed == 2 * ["read", "read", "read", "write"]
        assert 1 <= caplog.text.count("The store of responses failed") <= 8
        assert "secret" not in caplog.text


async def test_redis_that_is_silent_is_503_after_the_timeout() -> None:
    async with UnkindRedis() as unkind, connected(unkind.url, timeout_s=0.1) as (store, failed, _):
        async with asyncio.timeout(60):
            await asyncio.gather(*[_unavailable(store) for _ in range(100)])
        assert failed == ["read"] * 100


async def _unavailable(store: RedisResponseStore) -> None:
    with pytest.raises(StorageUnavailable):
        await store.get(ME, "a")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "Memory",
        "http://host",
        "redis://user:se#cret@host",
        "redis://h:port",
        "redis://h?secret=1",
        "rediss",
    ],
)
def test_invalid_url_is_named_without_what_it_has(url: str) -> None:
    with pytest.raises(SetupError, match="--response-store") as error:
        RedisResponseStore(url, StoreLimits(1, 1, 1), pytest.fail)
    assert "cret" not in str(error.value)


# --- Routers ---


async def test_router_without_its_redis_answers() -> None:
    """The client gets each answer; what needs the store is 503, and nothing else is touched."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"redis://127.0.0.1:{closed.getsockname()[1]}"
    async with FakeWorker(respond) as worker, running_router([worker], response_store=url) as router:

        def failed(operation: str) -> float:
            return router.metric(metrics.ROUTER_RESPONSE_STORE_ERRORS.name, operation=operation)

        for number, stream in enumerate((False, True), 1):
            answer = await router.post({**QUESTION, "stream": stream}, PATH)
            assert answer.status_code == 200
            assert "1 items" in answer.text and answer.text.endswith("}\n\n" if stream else "}")
            assert (failed("write"), failed("read")) == (number, 0)
        assert (await router.post({**QUESTION, "store": False}, PATH)).status_code == 200
        assert (failed("write"), failed("read")) == (2, 0)
        requests = len(worker.requests)
        reference = [{"type": "item_reference", "id": "msg_1"}]
        for answer in (
            await router.post({**QUESTION, "previous_response_id": "resp_1"}, PATH),
            await router.post({**QUESTION, "input": reference, "store": False}, PATH),
            await router.client.get(f"{PATH}/resp_1"),
            await router.client.get(f"{PATH}/resp_1/input_items"),
            await router.client.delete(f"{PATH}/resp_1"),
            await router.client.post(f"{PATH}/resp_1/cancel"),
        ):
            assert (answer.status_code, answer.headers["retry-after"].isdigit()) == (503, True)
            assert answer.json()["error"]["code"] == StorageUnavailable.code
        assert failed("read") == 6
        assert len(worker.requests) == requests
        assert (await router.client.get("/ready")).status_code == 200


@pytest.mark.slow
async def test_routers_share_responses_which_outlive_them(redis_server: RedisServer, client: Redis) -> None:
    url = redis_server.url
    async with FakeWorker(respond) as worker:
        async with running_router([worker], response_store=url) as router:
            first = (await router.post(QUESTION, PATH)).json()
            streamed = await router.post({**QUESTION, "stream": True}, PATH)
            assert streamed.status_code == 200
        async with (
            running_router([worker], response_store=url) as one,
            running_router([worker], response_store=url) as other,
        ):
            follow_up = {**QUESTION, "previous_response_id": first["id"]}
            second = (await other.post(follow_up, PATH)).json()
            assert second["output"][0]["content"][0]["text"] == "3 items"
            assert (await one.client.get(f"{PATH}/{second['id']}")).json() == second
            items = (await one.client.get(f"{PATH}/{second['id']}/input_items")).json()
            assert [item.get("role") for item in items["data"]] == ["user", "assistant", "user"]
            assert (await one.client.delete(f"{PATH}/{first['id']}")).json()["deleted"] is True
            assert (await other.client.get(f"{PATH}/{first['id']}")).status_code == 404
            assert (await other.post(follow_up, PATH)).status_code == 400
            reference = [{"type": "item_reference", "id": second["output"][0]["id"]}]
            assert (await one.post({**QUESTION, "input": reference}, PATH)).status_code == 200
