"""
`baton demo`: send two requests to a service, and show where their prompts were computed.

Both share a long system prompt. The prefill worker computes the first prompt, and NIXL transfers its
KV blocks. For the second one, the shared prefix is cached; only the rest is computed and transferred. The
numbers come from the usage of the responses and from the records of the decode workers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton_api.setting_types import show_size
from baton_api.workers import Role
from baton_cli.display import Display
from baton_cli.up import Service, make_plan, run

SYSTEM = """\
You are the guide of a small museum of geography. Answer each question in one short sentence. Give facts, \
not opinions. The museum has five halls. The first hall shows maps that sailors drew before there were \
satellites. The second hall shows rivers: how they begin in the mountains, how they carry stones and sand, \
and how they end in deltas. The third hall shows cities, and why so many of them stand where a river meets \
the sea. The fourth hall shows deserts and the people who live in them. The fifth hall shows the ice of the \
north and the south, and what it shows us about the weather of the past. The museum is open from nine in the \
morning to five in the afternoon, on every day but Monday. Children enter for free. There is a small shop \
beside the entrance where visitors can buy maps, postcards and books about travel."""

NOTEBOOK = """\
Here is a page of my notebook. The Nile is a river in Africa, and it ends in the Mediterranean Sea. The \
Amazon is a river in South America, and it ends in the Atlantic Ocean. The Ganges is a river in Asia, and it \
ends in the Bay of Bengal. The Danube is a river in Europe, and it ends in the Black Sea."""

QUESTIONS = (
    "What is the capital of France?",
    f"{NOTEBOOK} Where does the Danube end? Answer in one short sentence.",
)
"""
The second one is long enough for a prefill worker to compute its new part.

The built-in model answers both correctly at its default temperature, with every one of ten seeds. It is too
small for most other questions.
"""

RECORD_S = 10.0
"""Longest wait for the record of an answer. A worker makes it just after the answer's last byte."""
RETRY_S = 0.05

MAX_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Answer:
    """A response as the client sees it."""

    id: str
    tokens: int
    cached_tokens: int
    prompt_tokens: int
    ttft_s: float
    total_s: float

    @property
    def tokens_per_s(self) -> float:
        """Generation speed after the first token."""
        seconds = self.total_s - self.ttft_s
        return (self.tokens - 1) / seconds if seconds > 0 else 0.0


def demo(verbose: bool, given: Mapping[str, Any]) -> None:
    """Send two requests and show where they were computed. In a terminal, keep the service running."""
    display = Display(Console(), logs=verbose)
    # The prompts are short: with the default the decode worker would compute them itself.
    plan = make_plan(display, 1, 1, {"port": 0, "local_prefill_max_tokens": 0}, given)

    async def use(service: Service) -> None:
        await show(display.console, service, plan.name)
        if display.console.is_terminal:
            invite(display.console, service, plan.name)
            await asyncio.Event().wait()

    run(display, plan, use)


async def show(console: Console, service: Service, model: str) -> None:
    """Send the requests, stream the responses, and print the table."""
    console.print(
        f"\n[bold]{model}[/] answers on {service.url}/v1: one router, one prefill, one decode worker."
    )
    client = AsyncOpenAI(
        base_url=f"{service.url}/v1",
        api_key=service.api_key or "none",
        http_client=DefaultAsyncHttpxClient(trust_env=False),
    )
    workers = {member.name: member.url for member in service.of(Role.DECODE)}
    rows = []
    async with client:
        for question in QUESTIONS:
            console.print(f"\n[bold cyan]Question:[/] {question}")
            answer = await ask(console, client, model, question)
            rows.append((answer, await record_of(workers, answer.id, service.api_key)))
    console.print()
    console.print(answers_table(rows))


async def ask(console: Console, client: AsyncOpenAI, model: str, question: str) -> Answer:
    """Stream a response to the console."""
    began = time.monotonic()
    first = None
    answer_id, usage = "", None
    console.print("[bold green]Answer:[/] ", end="")
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        answer_id, usage = chunk.id, chunk.usage or usage
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text:
            first = first or time.monotonic()
            console.print(Text(text), end="", soft_wrap=True)
    ended = time.monotonic()
    console.print()
    assert usage is not None, "the service did not send the usage that was asked for"
    details = usage.prompt_tokens_details
    return Answer(
        id=answer_id,
        tokens=usage.completion_tokens,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        prompt_tokens=usage.prompt_tokens,
        ttft_s=(first or ended) - began,
        total_s=ended - began,
    )


async def record_of(workers: Mapping[str, str], answer_id: str, api_key: str = "") -> Mapping[str, Any]:
    """Return the record of the worker that answered. `workers` are URLs by name."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    deadline = time.monotonic() + RECORD_S
    async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=RECORD_S) as client:
        while True:
            for name, url in workers.items():
                records = (await client.get(f"{url}/debug/requests")).json()["data"]
                for record in records:
                    if record["id"] == answer_id:
                        return {**record, "worker": name}
            if time.monotonic() > deadline:
                return {"relays": [], "worker": "unknown"}
            await asyncio.sleep(RETRY_S)


def answers_table(rows: list[tuple[Answer, Mapping[str, Any]]]) -> Table:
    """Return a table with one column per request."""
    table = Table(title="What happened", title_style="bold", show_lines=False)
    table.add_column("")
    for number in range(len(rows)):
        table.add_column(f"Question {number + 1}", justify="right")
    for label, cells in _lines(rows):
        table.add_row(label, *cells)
    return table


def _lines(rows: list[tuple[Answer, Mapping[str, Any]]]) -> list[tuple[str, list[str]]]:
    lines = [
        ("prompt tokens", [str(answer.prompt_tokens) for answer, _ in rows]),
        ("from a prefix cache", [str(answer.cached_tokens) for answer, _ in rows]),
    ]
    relays = [record["relays"][0] if record["relays"] else None for _, record in rows]
    if any(relays):
        lines += [
            ("in the decode worker's cache", [_cell(relay, "local_tokens") for relay in relays]),
            ("computed by", [_cell(relay, "prefill_worker") for relay in relays]),
            ("tokens it computed", [_cell(relay, "computed_tokens") for relay in relays]),
            ("KV blocks moved", [_cell(relay, "blocks") for relay in relays]),
            ("bytes moved", [show_size(relay["bytes"]) if relay else "-" for relay in relays]),
            ("over", [_cell(relay, "transport") for relay in relays]),
            ("at", [_speed(relay) for relay in relays]),
        ]
    return [
        *lines,
        ("tokens generated", [str(answer.tokens) for answer, _ in rows]),
        ("generated by", [str(record["worker"]) for _, record in rows]),
        ("time to first token", [f"{answer.ttft_s * 1000:.0f} ms" for answer, _ in rows]),
        ("tokens per second", [f"{answer.tokens_per_s:.0f}" for answer, _ in rows]),
    ]


def _cell(relay: Mapping[str, Any] | None, name: str) -> str:
    return "-" if relay is None else str(relay[name])


def _speed(relay: Mapping[str, Any] | None) -> str:
    if relay is None or not relay["transfer_s"]:
        return "-"
    return f"{show_size(relay['bytes'] / relay['transfer_s'])}/s in {relay['transfer_s'] * 1000:.1f} ms"


def invite(console: Console, service: Service, model: str) -> None:
    """Print commands to try."""
    curl = f"""\
  curl {service.url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "{model}", "max_tokens": 100,
         "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'
"""
    python = f"""\
  from openai import OpenAI
  client = OpenAI(base_url="{service.url}/v1", api_key="none")
  messages = [{{"role": "user", "content": "Why is the sky blue?"}}]
  answer = client.chat.completions.create(model="{model}", messages=messages, max_tokens=100)
  print(answer.choices[0].message.content)
"""
    chat = f"  baton chat --url {service.url}\n"
    lead = "\nThe service runs until Ctrl-C. Try it:\n"
    console.print(Text("\n".join((lead, curl, python, chat))), soft_wrap=True)
