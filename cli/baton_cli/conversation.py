"""`baton chat`: a streaming conversation with a service in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator, Callable, Iterator

from openai import (
    APIConnectionError,
    APIStatusError,
    AsyncOpenAI,
    AuthenticationError,
    DefaultAsyncHttpxClient,
    PermissionDeniedError,
)
from openai.types.chat import ChatCompletionMessageParam
from rich.console import Console
from rich.text import Text

from baton_api.errors import SetupError

NO_KEY = "none"
"""The SDK wants a key even if the service wants none."""


class Conversation:
    """The messages of a conversation, and the service that continues it."""

    def __init__(self, client: AsyncOpenAI, model: str, system: str, max_tokens: int) -> None:
        self._client = client
        self._model = model
        self.max_tokens = max_tokens
        self.cut = False
        """Whether the last response ended because it had `max_tokens` tokens."""
        self.messages: list[ChatCompletionMessageParam] = []
        if system:
            self.messages.append({"role": "system", "content": system})

    async def say(self, text: str) -> AsyncGenerator[str, None]:
        """
        Yield the response in pieces.

        A partial response stays in the conversation. A message without any response is removed.
        """
        question: ChatCompletionMessageParam = {"role": "user", "content": text}
        answer = ""
        self.cut = False
        self.messages.append(question)
        try:
            stream = await self._client.chat.completions.create(
                model=self._model, messages=self.messages, max_tokens=self.max_tokens, stream=True
            )
            async with stream:
                async for chunk in stream:
                    for choice in chunk.choices:
                        self.cut = choice.finish_reason == "length"
                        if piece := choice.delta.content:
                            answer += piece
                            yield piece
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()


def chat(url: str, model: str, system: str, max_tokens: int, api_key: str) -> None:
    """Chat until Ctrl-D."""
    console = Console()

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    # The handler of asyncio would cancel the whole conversation. It does not replace a custom handler.
    signal.signal(signal.SIGINT, interrupt)
    prompt = "[bold cyan]>[/] "
    asyncio.run(converse(console, lambda: console.input(prompt), url, model, system, max_tokens, api_key))


async def converse(
    console: Console,
    read: Callable[[], str],
    url: str,
    model: str,
    system: str,
    max_tokens: int,
    api_key: str,
) -> None:
    """Answer the lines of `read` until EOFError. Raises SetupError if the service does not answer."""
    async with AsyncOpenAI(
        base_url=f"{url.rstrip('/')}/v1",
        api_key=api_key or NO_KEY,
        max_retries=0,
        # Proxies of the environment are for the web, not for the user's own service.
        http_client=DefaultAsyncHttpxClient(trust_env=False),
    ) as client:
        model = model or await _first_model(client, url)
        conversation = Conversation(client, model, system, max_tokens)
        console.print(f"[dim]{model} on {url}. Ctrl-C stops a response, Ctrl-D exits.[/]")
        while True:
            try:
                # Reading may block, because no task runs meanwhile. Ctrl-C discards the line.
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
            if conversation.cut:
                limit = f"({conversation.max_tokens} tokens; --max-tokens allows more)"
                console.print(f" [dim]{limit}[/]", end="")
        except asyncio.CancelledError:
            console.print(" [dim](stopped)[/]", end="")
        except (APIStatusError, APIConnectionError) as error:
            console.print(Text(error.message, style="red"), end="")
    console.print()


@contextlib.contextmanager
def _on_interrupt(call: Callable[[], object]) -> Iterator[None]:
    """Call a function on Ctrl-C, and restore the handler at the end."""
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
    except APIConnectionError as error:
        raise SetupError(
            f"No service answers on {url} ({error.message.rstrip('.')}). Start one with "
            "`baton up`, or set its address with --url."
        ) from error
    except (AuthenticationError, PermissionDeniedError) as error:
        wrong = "wants an API key" if client.api_key == NO_KEY else "does not accept this API key"
        raise SetupError(
            f"The service on {url} {wrong} ({error.status_code}). Set --api-key or BATON_API_KEY."
        ) from error
    except APIStatusError as error:
        raise SetupError(
            f"The service on {url} does not list its models: {error.status_code}, {error.message}"
        ) from error
    if not models.data:
        raise SetupError(f"The service on {url} has no model that this key may use. Name one with --model.")
    return models.data[0].id
