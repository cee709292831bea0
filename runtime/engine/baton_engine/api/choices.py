"""
The choices of one request during generation: one engine request each, with merged outputs.

The first choice of a prompt is submitted first. The others follow after its first token, so that they find
the prompt in the prefix cache. All choices are submitted before the first piece is emitted, so that a
rejection is still an HTTP status. Closing the iterator aborts the remaining choices.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from baton_api import headers
from baton_api.errors import NotReady, RequestAborted
from baton_api.kv_events import block_number
from baton_api.prompt_report import PromptReport
from baton_api.stream_comments import AnswerUsage
from baton_engine.api.answer_shape import Choice
from baton_engine.api.exchange import Exchange
from baton_engine.api.request_log import AnswerLog
from baton_engine.api.resuming import catch_up
from baton_engine.api.served import Served
from baton_engine.api.streaming import Usage
from baton_engine.api.transcript import Piece, Transcript
from baton_engine.api.work import Work
from baton_engine.client import Generation
from baton_engine.requests import FinishReason, Output, PromptLogprobs, RemotePrefill, Request


class Choices:
    """The choices of one request, in order of their index."""

    answer_log: AnswerLog | None
    """Receives the text of the answers if request logging is enabled."""
    aborted: bool
    """Whether another client request aborted this one by its id."""

    def __init__(
        self,
        served: Served,
        work: Work,
        exchange: Exchange,
        remote: RemotePrefill | None = None,
        answer_log: AnswerLog | None = None,
        salt: str = "",
        *,
        patient: bool = False,
    ) -> None:
        self.answer_log = answer_log
        self._served = served
        self._work = work
        self._exchange = exchange
        self._queue: asyncio.Queue[tuple[Choice, Piece | None] | Exception] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        n = work.parameters.n
        self.all = [
            Choice(
                index=index,
                prompt=index // n,
                request=Request(
                    id=_engine_id(work, index),
                    prompt=work.prompts[index // n].tokens,
                    sampling=work.parameters.choice(index % n, work.prompts[index // n].max_tokens),
                    salt=salt,
                    adapter=work.adapter,
                    hashes=work.prompts[index // n].hashes,
                    matcher=None if work.matchers is None else work.matchers(),
                    client_id=exchange.request_id,
                    trace=exchange.onward,
                    step_summary=None if exchange.spans is None else exchange.spans.step_summary(),
                    prediction=work.prediction,
                    tenant=exchange.tenant,
                    patient=patient,
                    remote=remote if index % n == 0 else None,
                ),
                transcript=_transcript(served, work),
                followers=[],
            )
            for index in range(n * len(work.prompts))
        ]
        self._leads = self.all[::n]
        for lead in self._leads:
            lead.followers = self.all[lead.index + 1 : lead.index + n]
        if work.resumption is not None:
            catch_up(work, self.all[0])
        drawn = work.parameters.sampling.drawn
        self.count = AnswerUsage(
            prompt=sum(len(prompt.tokens) for prompt in work.prompts) - drawn,
            generated=sum(choice.transcript.count for choice in self.all),
        )
        """Tokens of all prompts, and of all choices so far."""
        self._unsubmitted = len(self.all) - len(self._leads)
        """Number of followers that are not yet submitted."""
        self.aborted = False

    @property
    def usage(self) -> Usage:
        count = self.count
        return Usage(
            prompt_tokens=count.prompt,
            completion_tokens=count.generated,
            cached_tokens=sum(lead.cached_tokens for lead in self._leads),
            peer_tokens=sum(lead.peer_tokens for lead in self._leads),
            tier_tokens=[tokens for lead in self._leads for tokens in lead.tier_tokens],
            reasoning_tokens=sum(choice.transcript.reasoning_tokens for choice in self.all),
            accepted_prediction_tokens=sum(choice.transcript.predicted for choice in self.all),
            rejected_prediction_tokens=sum(
                len(self._work.prediction) - choice.transcript.predicted for choice in self.all
            ),
        )

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Response headers with the report of the prompt."""
        report = self._exchange.report
        return [] if report is None else [(headers.PROMPT.encode(), report.encode().encode())]

    def abort(self) -> None:
        """Abort the request from outside: `pieces` raises RequestAborted."""
        self.aborted = True
        for choice in self.all:
            if choice.outputs is not None:
                self._served.engine.abort(choice.request.id)

    async def pieces(self) -> AsyncGenerator[tuple[Choice, Piece]]:
        """Yield the pieces of all choices as they arrive. Raises the errors of the engine."""
        try:
            if self._work.resumption is not None and self._work.resumption.ended:
                yield self.all[0], Piece()
                return
            if not any(lead.request.generates or lead.request.wants_prompt_output for lead in self._leads):
                for choice in self.all:
                    choice.transcript.finish = FinishReason.LENGTH
                    yield choice, Piece(finish=FinishReason.LENGTH)
                return
            for lead in self._leads:
                lead.outputs = self._generate(lead)
            if len(self._leads) > 1:
                await _all_accepted(self._leads)
            if len(self.all) == 1:
                async for piece in self._pieces_of(self.all[0]):
                    yield self.all[0], piece
                return
            async for item in self._merged():
                yield item
        finally:
            await self._close()

    def _generate(self, choice: Choice) -> Generation:
        """Submit a choice. A whole batch line without stop strings needs no single tokens."""
        parameters = self._work.parameters
        together = choice.request.patient and not parameters.streaming.wanted and not parameters.stops
        return self._served.engine.generate(choice.request, together=together)

    async def _merged(self) -> AsyncGenerator[tuple[Choice, Piece]]:
        self._tasks += [asyncio.create_task(self._drive(lead)) for lead in self._leads]
        live = len(self.all)
        pending: list[tuple[Choice, Piece]] = []
        while live:
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            choice, piece = item
            if piece is None:
                live -= 1
            else:
                pending.append((choice, piece))
            if not self._unsubmitted:
                for ready in pending:
                    yield ready
                pending.clear()

    async def _drive(self, choice: Choice) -> None:
        try:
            async for piece in self._pieces_of(choice):
                followers, choice.followers = choice.followers, []
                for follower in followers:
                    follower.outputs = self._generate(follower)
                await _all_accepted(followers)
                for follower in followers:
                    self._unsubmitted -= 1  # after the submission, so that a rejection precedes all pieces
                    self._tasks.append(asyncio.create_task(self._drive(follower)))
                self._queue.put_nowait((choice, piece))
            self._queue.put_nowait((choice, None))
        except Exception as error:  # `_merged` raises it
            self._queue.put_nowait(error)

    async def _pieces_of(self, choice: Choice) -> AsyncGenerator[Piece]:
        assert choice.outputs is not None
        transcript = choice.transcript
        async for output in choice.outputs:
            if transcript.finish is not None:
                continue  # a stop string ended the text, and the engine has not yet processed the finish
            if output.error is not None:
                raise output.error
            if self.aborted:
                raise RequestAborted
            if output.finish is FinishReason.ABORT:
                raise NotReady("This worker stopped before the answer was complete. Try again.")
            if isinstance(output.prompt_output, PromptLogprobs):
                for waiting in (choice, *choice.followers):
                    waiting.scores = output.prompt_output
            before = transcript.count
            piece = transcript.push(output)
            if self.answer_log is not None:
                self.answer_log.add(choice.index, piece.text)
            tokens = transcript.count - before
            self.count = AnswerUsage(self.count.prompt, self.count.generated + tokens)
            self._observe(choice, output, tokens)
            if transcript.finish is not None and output.finish is None:
                self._served.engine.finish(choice.request.id)
            yield piece

    def _observe(self, choice: Choice, output: Output, tokens: int) -> None:
        exchange, metrics = self._exchange, self._served.metrics
        if output.relay is not None:
            exchange.relays.append(output.relay)
            metrics.relayed(output.relay)
        if not tokens:
            return
        now = time.monotonic()
        if choice.last_token is None:
            exchange.report = exchange.report or report_of(len(choice.request.prompt), output)
            if choice.index % self._work.parameters.n == 0:
                exchange.cached_tokens += output.cached_tokens
            if self._served.settings.cache_report and self._work.resumption is None:
                choice.cached_tokens, choice.peer_tokens = output.cached_tokens, output.peer_tokens
                choice.tier_tokens = output.tier_tokens
            choice.first_token = now
            metrics.first_token(now - exchange.started)
            exchange.first_token = exchange.first_token or now
            tokens -= 1
        if tokens:
            metrics.tokens(now - (choice.last_token or now), tokens)
        choice.last_token = exchange.last_token = now

    async def _close(self) -> None:
        """Abort unfinished choices and record the usage."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for choice in self.all:
            if choice.outputs is not None:
                await choice.outputs.aclose()
        usage = self.usage
        self._exchange.prompt_tokens = usage.prompt_tokens
        self._exchange.completion_tokens = usage.completion_tokens


async def _all_accepted(choices: Sequence[Choice]) -> None:
    """Return when the engine has accepted all of these. Raises the first rejection."""
    for choice in choices:
        assert choice.outputs is not None
        await choice.outputs.accepted()


def _transcript(served: Served, work: Work) -> Transcript:
    return Transcript(served.tokenizer, work.parameters, work.reader(), work.marks, work.prediction)


def report_of(tokens: int, output: Output) -> PromptReport | None:
    """Create the report of a prompt of `tokens` tokens from the output with its first token."""
    relay, timing = output.relay, output.timing
    tail = f"{block_number(output.tail):016x}" if output.tail else ""
    if relay is not None:
        return PromptReport(
            tokens=tokens,
            cached=output.cached_tokens,
            held=relay.local_tokens,
            queue_s=relay.queue_s,
            compute_s=relay.compute_s,
            transfer_s=relay.transfer_s,
            remote=True,
            tail=tail,
        )
    if timing is None:
        return None
    return PromptReport(
        tokens=tokens,
        cached=output.cached_tokens,
        held=output.cached_tokens,
        queue_s=timing.queue_s,
        compute_s=timing.compute_s,
        transfer_s=0.0,
        remote=False,
        tail=tail,
        fallback=output.fallback if output.fallback.isidentifier() else "",
    )


def _engine_id(work: Work, index: int) -> str:
    """Return the engine's id of a choice. A resumed request has another id than the original one, because
    the same worker may not have released that one yet.
    """
    drawn = work.parameters.sampling.drawn
    return f"{work.shape.id}-{index}" + (f"-from-{drawn}" if work.resumption is not None else "")
