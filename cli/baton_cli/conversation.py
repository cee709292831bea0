"""`baton chat`: a conversation with a service in the terminal, answer by answer as it is generated."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator, Callable, Iterator

from openai import APIConnectionError, APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types.chat import ChatCompletionMessageParam
from rich.console import Console
from rich.text import Text

from baton_api.errors import SetupError


class Conversation:
    """All that was said so far, and the service that goes on with it."""

    def __init__(self, client: AsyncOpenAI, model: str, system: str = "") -> None:
        self._client = client
        self._model = model
        self.messages: list[ChatCompletionMessageParam] = []
        if system:
            self.messages.append({"role": "system", "content": system})

    async def say(self, text: str) -> AsyncGenerator[str, None]:
        """
        The answer, piece by piece.

        What came of an answer that is stopped stays in the conversation; a question that got no answer
        at all does not.
        """
        question: ChatCompletionMessageParam = {"role": "user", "content": text}
        answer = ""
        self.messages.append(question)
        try:
            stream = await self._client.chat.completions.create(
                model=self._model, messages=self.messages, stream=True
            )
            async with stream:
                async for chunk in stream:
                    piece = chunk.choices[0].delta.content if chunk.choices else None
                    if piece:
                        answer += piece
                        yield piece
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()


def chat(url: str, model: str, system: str, api_key: str) -> None:
    """Talk until Ctrl-D."""
    console = Console()

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    # asyncio's own handler would cancel the whole conversation; it leaves one that is not Python's alone.
    signal.signal(signal.SIGINT, interrupt)
    asyncio.run(converse(console, lambda: console.input("[bold cyan]>[/] "), url, model, system, api_key))


async def converse(
    console: Console, read: Callable[[], str], url: str, model: str, system: str, api_key: str
) -> None:
    """Answer what `read` gives until it raises EOFError. Raises SetupError if no service answers."""
    async with AsyncOpenAI(
        base_url=f"{url.rstrip('/')}/v1",
        api_key=api_key or "none",
        max_retries=0,
        # A proxy that is set for the web is not on the way to a service of one's own.
        http_client=DefaultAsyncHttpxClient(trust_env=False),
    ) as client:
        model = model or await _first_model(client, url)
        conversation = Conversation(client, model, system)
        console.print(f"[dim]{model} on {url}. Ctrl-C stops an answer, Ctrl-D ends.[/]")
        while True:
            try:
                # Reading blocks, and nothing else is going on; Ctrl-C here discards the line.
                text = read().strip()
            except EOFError:
                console.print()
                return
            except KeyboardInterrupt:
                console.print()
                continue
            if text:
                await _answer(console, conversation, text)


async def _answer(console: Console, conversation: Conversation, text: str) -> None:
    async def show() -> None:
        async with contextlib.aclosing(conversation.say(text)) as pieces:
            async for piece in pieces:
                console.print(Text(piece), end="", soft_wrap=True)

    answering = asyncio.create_task(show())
    with _on_interrupt(answering.cancel):
        try:
            await answering
        except asyncio.CancelledError:
            console.print(" [dim](stopped)[/]", end="")
        except (APIStatusError, APIConnectionError) as error:
            console.print(Text(error.message, style="red"), end="")
    console.print()


@contextlib.contextmanager
def _on_interrupt(call: Callable[[], object]) -> Iterator[None]:
    """Have Ctrl-C do this, and then what it did before."""
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, call)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


async def _first_model(client: AsyncOpenAI, url: str) -> str:
    try:
        models = await client.models.list()
    except (APIStatusError, APIConnectionError) as error:
        raise SetupError(
            f"No service answers on {url} ({error.message.rstrip('.')}). Start one with "
            "`baton up`, or give its address with --url."
        ) from error
    return models.data[0].id
