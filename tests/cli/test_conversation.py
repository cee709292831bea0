"""`baton chat` against a service with scripted answers."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Iterable

import pytest
from rich.console import Console

from baton_api.errors import SetupError
from baton_cli.conversation import converse
from tests.cli.fake_service import FakeService, serving


async def talk(service: FakeService, lines: Iterable[str], system: str = "", api_key: str = "") -> str:
    """Return the terminal's content after these lines and Ctrl-D are typed."""
    screen = io.StringIO()
    typed = iter(lines)

    def read() -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    await converse(Console(file=screen, width=200), read, service.url, "", system, 50, api_key)
    return screen.getvalue()


async def test_chat_each_request_has_the_whole_conversation() -> None:
    async with serving(FakeService(["Paris it is.", "Two million people."])) as service:
        screen = await talk(service, ["What is the capital of France?", "", "How large is it?"], "Be brief.")
    assert "Paris it is.\n" in screen and "Two million people.\n" in screen
    assert service.seen[1]["model"] == "tiny"
    assert service.seen[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris it is."},
        {"role": "user", "content": "How large is it?"},
    ]


async def test_chat_response_has_a_limit_and_says_so() -> None:
    async with serving(FakeService(["Round and round", "Paris."], ends=["length", "stop"])) as service:
        screen = await talk(service, ["Tell me a story.", "What is the capital of France?"])
    assert [body["max_tokens"] for body in service.seen] == [50, 50]
    assert "Round and round (50 tokens; --max-tokens allows more)\n" in screen
    assert "Paris.\n" in screen


async def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on() -> None:
    async with serving(FakeService(["Once upon a time", "Yes."], hangs=True)) as service:
        screen = io.StringIO()
        typed = iter(["Tell me a story.", "Enough?"])

        class Terminal(io.StringIO):
            """Presses Ctrl-C as soon as the first word of the story is shown."""

            def write(self, text: str) -> int:
                if "Once" in text or "Yes." in text:
                    os.kill(os.getpid(), signal.SIGINT)
                return screen.write(text)

        def read() -> str:
            service.hangs = len(service.seen) == 0
            try:
                return next(typed)
            except StopIteration:
                raise EOFError from None

        async with asyncio.timeout(20):
            await converse(Console(file=Terminal(), width=200), read, service.url, "tiny", "", 50, "")
    assert "Once (stopped)" in screen.getvalue()
    assert [message["content"] for message in service.seen[1]["messages"]] == [
        "Tell me a story.",
        "Once",
        "Enough?",
    ]


async def test_chat_failed_question_is_not_in_the_conversation() -> None:
    async with serving(FakeService([])) as service:
        screen = await talk(service, ["Hello?", "Still there?"])
    assert screen.count("Nothing left to say.") == 2
    assert [message["content"] for message in service.seen[1]["messages"]] == ["Still there?"]


async def test_without_a_service_the_way_out_is_named() -> None:
    missing = FakeService([], url="http://127.0.0.1:9")
    with pytest.raises(SetupError, match="baton up"):
        await talk(missing, [])


@pytest.mark.parametrize(
    ("status", "key", "says"),
    [
        pytest.param(401, "", "wants an API key .401.. Set --api-key or BATON_API_KEY", id="no key"),
        pytest.param(401, "wrong", "does not accept this API key", id="a wrong key"),
        pytest.param(403, "small", "does not accept this API key", id="a key without rights"),
        pytest.param(503, "", "does not list its models: 503", id="trouble"),
        pytest.param(0, "", "has no model", id="no model"),
    ],
)
async def test_chat_service_that_answers_is_not_reported_as_missing(status: int, key: str, says: str) -> None:
    async with serving(FakeService([], refuses=status, has_model=False)) as service:
        with pytest.raises(SetupError, match=says) as caught:
            await talk(service, [], api_key=key)
    assert "baton up" not in str(caught.value)
