"""The dashboard in Chromium with controlled workers: hostile ones, slow ones, and none at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from baton_api.workers import Role
from baton_router.settings import RouterSettings
from tests.dashboard.browser import Browser
from tests.ports import steady_port
from tests.router.fake_worker import (
    STREAM_END,
    STREAM_HEAD,
    FakeWorker,
    WorkerRequest,
    chunk,
    event,
    gated,
    streaming,
)
from tests.router.running import RunningRouter, running_router, until

pytestmark = pytest.mark.slow

HOSTILE = '<img src=x onerror="window.hurt = 1"><script>window.hurt = 1</script>'
UNKEYED = "API key required"

VISITS = 5

# A browser is waited for in a thread: the router that it asks is in this one.
browsing = asyncio.to_thread


@asynccontextmanager
async def service(worker: FakeWorker, **settings: Any) -> AsyncIterator[RunningRouter]:
    """A router with a page, before a prefill worker and `worker`."""
    prefill = FakeWorker(role=Role.PREFILL, control="127.0.0.1:1")
    prefill.load = msgspec.structs.replace(prefill.load, model=worker.load.model)
    async with (
        worker,
        prefill,
        running_router([worker], [prefill], dashboard=True, local_prefill_max_tokens=0, **settings) as router,
    ):
        yield router


def delta(**fields: object) -> bytes:
    chunk = {"id": "x", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": fields}]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


async def test_answer_is_shown_while_it_arrives_and_can_be_stopped(browser: Browser) -> None:
    worker = FakeWorker(gated)

    def story(url: str) -> None:
        browser.open(url)
        browser.until_live()
        browser.ask("What is the capital of France?")
        browser.until(lambda: browser.text(".answer.running .text") == "The", "the first token is shown")
        browser.until(lambda: "running" in browser.text("#requests .total"), "its timeline runs")
        browser.until(lambda: browser.count("#relay .box.decode.busy"), "the picture shows who is busy")
        browser.one("#stop").click()
        browser.until(browser.answered, "the answer has ended")
        browser.until(worker.left.is_set, "the worker was told")
        browser.until(lambda: "running" not in browser.text("#requests .total"), "its timeline ends")
        browser.until(lambda: "stopped" in browser.text(".answer .about"), "it says why")
        assert browser.text(".answer .text") == "The"
        assert browser.one("#send").is_displayed() and not browser.one("#stop").is_displayed()
        assert browser.complaints() == []

    async with service(worker) as router:
        await browsing(story, router.url)


async def test_hostile_text_is_shown_as_text(browser: Browser) -> None:
    call = {"index": 0, "id": "a", "function": {"name": HOSTILE, "arguments": HOSTILE}}
    parts = [delta(content=HOSTILE), delta(reasoning_content=HOSTILE), delta(tool_calls=[call])]
    worker = FakeWorker(streaming(*parts, event(None, "stop"), b"data: [DONE]\n\n"), model=HOSTILE)

    def story(url: str) -> None:
        browser.open(url)
        browser.until_live()
        browser.until(lambda: browser.text("#model") == HOSTILE, "the model is offered")
        browser.ask(HOSTILE)
        browser.until(lambda: browser.text(".answer .text") == HOSTILE, "the answer is shown")
        browser.until(browser.answered, "the answer has ended")
        browser.until(lambda: browser.count("#requests > li"), "its timeline is shown")
        browser.run("document.querySelector('#requests button').click()")
        assert browser.text(".question .text") == HOSTILE
        assert browser.text(".thoughts") == HOSTILE
        assert browser.text(".call") == f"{HOSTILE}({HOSTILE})"
        assert HOSTILE in browser.text("#requests .details") and HOSTILE in browser.text("#workers")
        assert browser.count("img, script") == browser.count("h1 img, head script")
        assert browser.run("return window.hurt") is None
        assert browser.complaints() == []

    async with service(worker) as router:
        await browsing(story, router.url)


MARKDOWN = """\
# Relay

1. **First**
   - `in`
2. *Second*

```html
<script>window.hurt = 1</script>
```

[page](https://example.org/) [bad](javascript:window.hurt=1) ![img](https://example.org/x.png)
"""


async def test_markdown_of_an_answer_is_drawn_without_markup(browser: Browser) -> None:
    cut = MARKDOWN.index("**First") + 3  # within a mark
    parts = [event(MARKDOWN[:cut]), event(MARKDOWN[cut:]), event(None, "stop"), b"data: [DONE]\n\n"]

    def story(url: str) -> None:
        browser.open(url)
        browser.until_live()
        browser.ask("What is a relay?")
        browser.until(browser.answered, "the answer has ended")
        assert browser.text(".text > .heading-of") == "Relay"
        assert browser.text(".text > ol > li > strong") == "First"
        assert browser.text(".text > ol > li > ul > li > code") == "in"
        assert browser.text(".text > ol > li > em") == "Second"
        assert browser.text(".text > pre > code") == "<script>window.hurt = 1</script>"
        links = browser.run("return [...document.querySelectorAll('.answer a')].map((one) => one.href)")
        assert links == ["https://example.org/", "https://example.org/x.png"]
        assert browser.count(".answer img, .answer script") == 0
        assert browser.run("return window.hurt") is None
        # What is copied is the text as the model wrote it.
        browser.run("navigator.clipboard.writeText = async (text) => { window.copied = text }")
        browser.one(".answer .copy").click()
        browser.until(lambda: browser.text(".answer .copy") == "Copied", "it is copied")
        assert browser.run("return window.copied") == MARKDOWN
        assert browser.complaints() == []

    async with service(FakeWorker(streaming(*parts))) as router:
        await browsing(story, router.url)


FROM_END = """
  const log = document.getElementById("conversation");
  return log.scrollHeight - log.scrollTop - log.clientHeight;
"""
LOCAL_PREFILL_TOKENS = RouterSettings(decode=("http://127.0.0.1:1",)).local_prefill_max_tokens
LINES = "".join(f"line {number}\n\n" for number in range(40))


async def test_stream_is_followed_unless_the_reader_scrolls_up_and_can_be_retried(browser: Browser) -> None:
    loop, pieces = asyncio.get_running_loop(), asyncio.Queue[str]()

    async def told(worker: FakeWorker, request: WorkerRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        while piece := await pieces.get():
            writer.write(chunk(event(piece)))
        writer.write(chunk(event(None, "stop") + b"data: [DONE]\n\n") + STREAM_END)

    worker = FakeWorker(told)

    def tell(*words: str) -> None:
        for word in words:
            loop.call_soon_threadsafe(pieces.put_nowait, word)
        shown = next(word for word in reversed(words) if word).strip()[-8:].strip()
        browser.until(lambda: shown in browser.text(".answer:last-child .text"), f"{shown} is shown")

    def ask(text: str) -> None:
        before = browser.count(".answer")
        browser.ask(text)
        browser.until(lambda: browser.count(".answer") > before, "the answer begins")

    def story(url: str) -> None:
        browser.open(url)
        browser.until_live()
        ask("The first?")
        tell(LINES, "first-1", "")
        browser.until(browser.answered, "the first answer has ended")
        ask("The second?")
        for number in range(3):
            tell(LINES, f"part-{number}")
            browser.until(lambda: browser.run(FROM_END) < 2, "its end is in view")
        browser.run("document.getElementById('conversation').scrollTop = 100")
        tell(LINES, "unseen-1")
        tell(LINES, "unseen-2")
        assert browser.run("return document.getElementById('conversation').scrollTop") == 100
        browser.run("document.getElementById('conversation').scrollTop = 1e9")
        tell(LINES, "seen-1")
        tell("seen-2", "")
        browser.until(lambda: browser.answered() and browser.run(FROM_END) < 2, "the end is in view again")

        browser.one(".answer:last-child .retry").click()
        tell("other", "")
        browser.until(browser.answered, "it is answered again")
        assert browser.count(".question") == 2 and browser.text(".answer:last-child .text") == "other"

        browser.one("#anew").click()
        browser.one("#long").click()
        tell("long", "")
        browser.until(browser.answered, "the long prompt is answered")
        assert browser.text(".question summary").endswith(" words)")
        assert browser.complaints() == []

    async with service(worker) as router:
        await browsing(story, router.url)
    _, second, again, [long] = (json.loads(request.body)["messages"] for request in worker.requests)
    assert second == again and [one["role"] for one in again] == ["user", "assistant", "user"]
    assert len(long["content"]) > 4 * LOCAL_PREFILL_TOKENS


async def test_content_policy_blocks_injected_scripts(browser: Browser) -> None:
    def story(url: str) -> None:
        browser.open(url)
        refused = browser.run(
            "try { document.body.innerHTML = arguments[0]; return false } catch { return true }", HOSTILE
        )
        assert refused and browser.run("return window.hurt") is None
        assert browser.complaints()  # the console reports it

    async with service(FakeWorker()) as router:
        await browsing(story, router.url)


async def test_dashboard_shows_nothing_until_a_key_is_entered(browser: Browser) -> None:
    def story(url: str) -> None:
        browser.open(url)
        browser.until(lambda: browser.one("#key").is_displayed(), "a key is asked for")
        browser.until(lambda: browser.focused() == "key-field", "and can be typed")
        assert browser.text("#connection") == UNKEYED and not browser.count("#relay .worker")
        browser.one("#key-field").send_keys("wrong\n")
        browser.until(
            lambda: "wrong" in browser.run("return sessionStorage['baton.key'] ?? ''"), "it is tried"
        )
        browser.until(lambda: browser.one("#key").is_displayed(), "it is asked for again")
        browser.one("#key-field").send_keys("k-1\n")
        browser.until_live()
        browser.until(lambda: browser.count("#relay .worker"), "the workers are shown")
        browser.ask("What is the capital of France?")
        browser.until(lambda: "Paris" in browser.text(".answer .text"), "the model answers")

        # It is kept for this tab, and nowhere else.
        assert browser.run("return Object.values(sessionStorage)") == ["k-1"]
        assert browser.run("return [...Object.values(localStorage), document.cookie].join('')") == ""
        assert "k-1" not in browser.driver.page_source and "k-1" not in browser.driver.current_url
        browser.driver.refresh()
        browser.until_live()
        browser.one("#key-open").click()
        browser.one("#key-forget").click()
        browser.until(lambda: browser.text("#connection") == UNKEYED, "it is forgotten")
        assert browser.run("return sessionStorage.length") == 0

    async with service(FakeWorker(), api_key="k-1") as router:
        await browsing(story, router.url)


async def test_lost_connection_is_shown_and_restored(browser: Browser) -> None:
    def opened(url: str) -> None:
        browser.open(url)
        browser.until_live()

    def lost() -> None:
        browser.until(lambda: "lost" in browser.text("#connection"), "the loss is said")
        browser.ask("Is anybody there?")
        browser.until(lambda: "connection" in browser.text(".answer .problem"), "so does the playground")

    def back() -> None:
        browser.until_live()
        browser.ask("What is the capital of France?")
        browser.until(lambda: "Paris" in browser.text(".answer .text"), "the model answers again")

    async with FakeWorker() as worker:
        async with running_router([worker], dashboard=True, port=steady_port()) as router:
            await browsing(opened, router.url)
        await browsing(lost)
        async with running_router([worker], dashboard=True, port=router.port):
            await browsing(back)


async def test_page_that_is_left_ends_its_stream(browser: Browser) -> None:
    """Browsers keep it for a minute, and have six connections: the seventh visit would wait for one."""

    def visits(url: str) -> None:
        for number in range(VISITS):
            browser.driver.get(f"{url}/?{number}")
            browser.until_live()

    def back() -> None:
        browser.driver.back()
        browser.until(lambda: browser.run("return location.search") == f"?{VISITS - 2}", "the page is back")
        browser.until_live()

    async with service(FakeWorker()) as router:
        page = router.router.dashboard
        assert page is not None
        await browsing(visits, router.url)
        assert page.watched < VISITS
        await browsing(back)
        await until(lambda: page.watched == 1)


async def test_service_without_workers_names_what_is_missing(browser: Browser) -> None:
    def story(url: str) -> None:
        browser.open(url)
        browser.until_live()
        browser.until(lambda: browser.one("#refusal").is_displayed(), "it says that nobody is there")
        assert "no decode worker" in browser.text("#refusal") and not browser.one("#long").is_displayed()
        browser.ask("Is anybody there?")
        browser.until(lambda: browser.text(".answer .problem"), "the playground says so too")

    async with running_router(dashboard=True) as router:
        await browsing(story, router.url)


async def test_page_connects_only_to_its_server(browser: Browser) -> None:
    def story(url: str) -> None:
        browser.open(url)
        browser.until_live()
        addresses = browser.run("return performance.getEntriesByType('resource').map((one) => one.name)")
        assert addresses and all(address.startswith(url) for address in addresses)

    async with service(FakeWorker()) as router:
        await browsing(story, router.url)
