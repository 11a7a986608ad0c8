"""Answers a request for text: starts its choices, then streams or collects their outputs.

Headers are sent after workers have accepted every choice, so errors in a request are still plain 4xx answers.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from contracts.errors import RequestError
from contracts.request import Output
from gateway import metrics, sse, timing
from gateway.answering import Answering
from gateway.attainment import TPOT, TTFT
from gateway.core.admission import Caller
from gateway.core.hops import hop_of
from gateway.core.reasoning import ReasoningReader, SaidLogprobs
from gateway.core.seeds import SEED_MASK, choice_seed
from gateway.core.turn_times import TurnTimes, server_timing
from gateway.entering import entered
from gateway.envelope import route_name
from gateway.generate import ChoiceCall, Generation, Job, check_model
from gateway.inline_hints import InlineHints
from gateway.intake import pinned_node
from gateway.openai.asked import Asked, Prompt
from gateway.openai.responses import Choice, Usage
from gateway.parts import PARTS, Parts
from gateway.request_ids import labelled
from gateway.sessions import Resolved
from gateway.together import together
from gateway.tracing import Outcome, turn_trace
from gateway.turn_headers import turn_headers
from runtime import telemetry

log = telemetry.logger("gateway.answer")


@dataclass(frozen=True, slots=True)
class Part:
    """One prompt of a request: its session, its job, and a callback for the end of its answer.

    ended: called with the first choice and its tokens when the request ends, also after a failure.
    """

    session: Resolved
    job: Job
    ended: Callable[[Choice, list[int]], None]


def new_job(
    request: web.Request, asked: Asked, prompt: Prompt, caller: Caller, session: Resolved, request_id: str
) -> Job:
    """The job of one prompt, shared by its choices. request_id: unique. Raises what `check_model`, `pinned_node`
    and `hop_of` raise."""
    parts = request.app[PARTS]
    check_model(parts.fleet, asked.model)
    base = parts.fleet.base_of(asked.model)
    sampling = asked.sampling
    if sampling.seed is None:
        sampling = replace(sampling, seed=secrets.randbits(63))
    return Job(
        request_id=labelled(request, request_id),
        session=session.key,
        model=base,
        adapter=asked.model if base != asked.model else "",
        sampling=sampling,
        arrived_s=request[timing.ARRIVED_S],
        messages=prompt.messages,
        prompt=prompt.prompt,
        prompt_tokens=prompt.prompt_tokens,
        packed=prompt.packed,
        prompt_estimate=prompt.estimate,
        priority=caller.priority(asked.priority if asked.priority is not None else asked.said.priority or 0),
        expected_tokens=asked.said.expected_tokens,
        weight=parts.config.gateway.weight(session.key.tenant),
        json_schema=asked.form.json_schema if asked.form is not None else None,
        regex=asked.form.regex if asked.form is not None else None,
        form_field=asked.form.field if asked.form is not None else "",
        tool_use=asked.tool_use,
        template_kwargs=asked.template_kwargs,
        pin=pinned_node(request, caller, parts, base),
        hop=hop_of(request.headers, session.key.session_id),
        cache_salt=session.scope(
            asked.user, asked.cache_salt, per_user=parts.config.gateway.per_user(session.key.tenant)
        ),
        trace=turn_trace(request, session.key.tenant, request[timing.ARRIVED_S]),
    )


#: What is to be done with an answer that has ended, before the caller can read its end; further fields of its body.
Keep = Callable[[list[Choice], Usage], Awaitable[dict[str, Any]]]


async def answer(
    request: web.Request,
    caller: Caller,
    asked: Asked,
    prompts: list[Part],
    answering: Answering,
    keep: Keep | None = None,
) -> web.StreamResponse:
    """The whole answer, streamed or not. Inline hints are sent for the first prompt's session. Raises RequestError
    before headers are sent."""
    job = prompts[0].job
    estimate = sum(prompt.job.prompt_estimate for prompt in prompts)
    async with entered(request, job.session.tenant, job.priority, estimate) as used:
        inline = InlineHints(request, caller, asked.said, job.session.session_id, job.model, job.priority)
        run = _Run(request, request.app[PARTS], caller, asked, prompts, answering, inline, keep)
        try:
            await run.begin()
            return await (run.stream() if asked.stream else run.collect())
        except RequestError as e:
            run.failure = e.status
            raise
        finally:
            used.tokens = run.used_tokens()
            run.end()
            if job.trace is not None:
                now = run.parts.clock.now()
                job.trace.end(request, job.request_id, job.session, job.model, run.outcome(), now, asked.sampling)


class _Run:
    """One request being answered. Choice `i` of prompt `p` has index `p * n + i`."""

    def __init__(
        self,
        request: web.Request,
        parts: Parts,
        caller: Caller,
        asked: Asked,
        prompts: list[Part],
        answering: Answering,
        inline: InlineHints,
        keep: Keep | None,
    ) -> None:
        self.request, self.parts, self.caller, self.asked, self.prompts, self.answering = (
            request,
            parts,
            caller,
            asked,
            prompts,
            answering,
        )
        self.inline, self._keep = inline, keep
        self.route, self.model = route_name(request), prompts[0].job.model
        self.arrived_s = prompts[0].job.arrived_s
        self.n = asked.n
        #: By choice index, once accepted.
        self.generations: dict[int, Generation] = {}
        self.choices = [Choice(i) for i in range(self.n * len(prompts))]
        self._first_s: dict[int, float] = {}
        #: Held of the answer's logprobs.
        self._kept_bytes = 0
        #: Status of the error that ended it, if any.
        self.failure = 0
        targets = parts.fleet.targets(self.model)
        self._attained = [parts.attainments.answer(self.model, targets) for _ in self.choices]

    # ---- life --------------------------------------------------------------------------------------------------
    async def begin(self) -> None:
        """Get every choice accepted. First the first choice alone: it chooses the node, and an error would be every
        choice's. Then the first choice of each other prompt, so that workers have it before the choices that share its
        prompt's KV."""
        self.inline.tell(after=False)
        await self._begin(0, "")
        node = self.generations[0].progress.node
        later = [choice.index for choice in self.choices[1:]]
        for firsts in (True, False):
            await together([self._begin(index, node) for index in later if (index % self.n == 0) is firsts])

    async def _begin(self, index: int, prefer: str) -> None:
        prompt, number = self.prompts[index // self.n], index % self.n
        job = prompt.job
        assert job.sampling.seed is not None
        group = f"{job.request_id}-{index - number}" if self.n > 1 else ""
        turn = ChoiceCall(
            f"{job.request_id}-{index}",
            choice_seed(job.sampling.seed & SEED_MASK, number),
            group,
            number,
            None if index else job.hop,
        )
        self.generations[index] = await self.parts.generator.begin(job, turn, prefer)

    def end(self) -> None:
        """Cancel what still runs, log the request, and remember how the conversations ended."""
        for generation in self.generations.values():
            generation.cancel()
        waited_s = self.parts.clock.now() - self.arrived_s
        for attained in self._attained if not 400 <= self.failure < 500 else ():
            attained.stopped(waited_s, failed=self.failure >= 500)
        if len(self.generations) != len(self.choices):
            return
        self._log()
        self.inline.tell(after=True)
        for place, prompt in enumerate(self.prompts):
            index = place * self.n
            progress = self.generations[index].progress
            prompt.ended(self.choices[index], progress.tokens)
            timing.observe(self.model, progress.times)
            self.parts.turn_reports.note(prompt.job.session, progress)

    # ---- answers -----------------------------------------------------------------------------------------------
    async def collect(self) -> web.Response:
        """The answer in one body."""

        async def finish(index: int) -> None:
            async for _ in self._outputs(index):
                pass

        await together([finish(choice.index) for choice in self.choices])
        whole = self.answering.whole(self.choices, self._usage()) | self._results()
        body = sse.encoded(whole | await self._kept())
        said = {"Content-Type": "application/json; charset=utf-8", timing.HEADER: self._timing()}
        return web.Response(body=body, headers=said | self._headers())

    async def stream(self) -> web.StreamResponse:
        """The answer as server-sent events."""
        known = server_timing(self._times.so_far(self.parts.clock.now()))
        events = sse.EventStream({timing.HEADER: known} | self._headers())
        await events.prepare(self.request)
        for choice in self.choices:
            events.keep(self.answering.opened(choice.index))
        if not self.generations[0].waiting:
            await events.send()  # so that the caller sees the beginning
        try:
            async with events.kept_alive(self.parts.config.gateway.comment_s, self._waits_for):
                await self._stream_choices(events)
        except RequestError as e:
            log.warning("stream failed", request=self.prompts[0].job.request_id, error=e.message)
            self.failure = e.status
            await events.end(self.answering.failed(e))
        else:
            told = sse.comment(f"server-timing {self._timing()}") if timing.asks(self.request) else b""
            await self._kept()
            await events.end(self.answering.ended(self.choices, self._usage(), told))
        return events

    async def _kept(self) -> dict[str, Any]:
        return {} if self._keep is None else await self._keep(self.choices, self._usage())

    def _waits_for(self) -> str:
        """Why the stream is silent, as far as is known."""
        view = self.parts.fleet.view
        node = view.node(self.generations[0].progress.node) if view is not None else None
        return f"activating {self.model}" if node is not None and node.wakes(self.model) else "waiting"

    async def _stream_choices(self, events: sse.EventStream) -> None:
        running = len(self.choices)

        async def send(index: int) -> None:
            nonlocal running
            async for outputs in self._outputs(index):
                made = self.answering.grown(index, outputs, self._usage)
                if outputs[-1][0].finish_reason is not None:
                    made += self.answering.closed(self.choices[index], {} if index else self._results())
                    running -= 1
                if made and running:
                    await events.send(made)
                else:
                    events.keep(made)  # nothing, or the last events, which are sent with the end

        await together([send(choice.index) for choice in self.choices])

    async def _outputs(self, index: int) -> AsyncGenerator[list[tuple[Output, str]]]:
        """Batches of new outputs of choice `index`, each output without its thought, and the thought."""
        choice, clock = self.choices[index], self.parts.clock
        last_s = self.arrived_s
        reader = None if self.asked.reasoning == "text" else ReasoningReader(self.generations[index].progress.thinking)
        said = SaidLogprobs() if self.answering.said_logprobs else None
        async with contextlib.aclosing(self.generations[index].outputs()) as batches:
            async for outputs in batches:
                tokens, gained = 0, []
                for output in outputs:
                    tokens += len(output.tokens)
                    before = reader.state if reader is not None else "saying"
                    gained.append((output, "" if reader is None else self._take_thought(choice, reader, output)))
                    if reader is not None and said is not None and output.logprobs is not None:
                        output.logprobs = said.of(before, reader.state, output.text, output.logprobs) or None
                    choice.text.append(output.text)
                    if output.tool_calls:
                        choice.called(output.tool_calls)
                    if output.logprobs and not self.asked.stream:
                        choice.logprobs += output.logprobs
                    choice.finish_reason = output.finish_reason or choice.finish_reason
                    choice.ended = output.finish_reason is not None
                    choice.stop = output.stop or choice.stop
                if tokens:
                    choice.completion_tokens += tokens
                    last_s = clock.now()
                    if index not in self._first_s:
                        self._first_s[index] = last_s
                        metrics.child(metrics.TTFT, self.route, self.model).observe(last_s - self.arrived_s)
                        self._attained[index].took(TTFT, last_s - self.arrived_s)
                self._gather(choice)
                yield gained
        if choice.completion_tokens > 1:
            token_s = (last_s - self._first_s[index]) / (choice.completion_tokens - 1)
            metrics.child(metrics.TPOT, self.route, self.model).observe(token_s)
            self._attained[index].took(TPOT, token_s)

    def _gather(self, choice: Choice) -> None:
        """Encode the choice's new logprobs, and hold what the answer keeps of any. Raises Unavailable."""
        if choice.logprobs:
            self.answering.gather(choice)
        if (more := self.answering.kept_bytes - self._kept_bytes) > 0:
            self.parts.bodies.hold_more(self.request, more)
            self._kept_bytes += more

    def _take_thought(self, choice: Choice, reader: ReasoningReader, output: Output) -> str:
        """The thought in `output` for the caller; mutates the output's text to the rest."""
        thought, output.text = reader.push(output.text, last=output.finish_reason is not None)
        if reader.state in ("thinking", "thought"):
            choice.reasoning_tokens += len(output.tokens)
        if not thought or self.asked.reasoning == "away":
            return ""
        choice.reasoning.append(thought)
        return thought

    def _results(self) -> dict[str, Any]:
        """The results of `kv_hints`; a stream sends them with the end of choice 0."""
        return {} if self.inline.results is None else {"kv_hints": self.inline.results}

    def _usage(self) -> Usage:
        """Usage of the whole request so far."""
        prompt_tokens = cached_tokens = completion_tokens = reasoning_tokens = 0
        for choice in self.choices:
            completion_tokens += choice.completion_tokens
            reasoning_tokens += choice.reasoning_tokens
            if not choice.index % self.n:
                progress = self.generations[choice.index].progress
                prompt_tokens += progress.prompt_tokens
                cached_tokens += progress.cached_tokens or 0
        return Usage(prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens)

    def outcome(self) -> Outcome:
        """For the request's trace. A request that ended before it was placed has no times but the first."""
        if len(self.generations) != len(self.choices):
            return Outcome(TurnTimes(self.arrived_s), "", self.failure)
        usage, progress = self._usage(), self.generations[0].progress
        return Outcome(
            progress.times,
            progress.node,
            self.failure,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            usage.reasoning_tokens,
            [choice.ended_by for choice in self.choices if choice.ended],
        )

    def used_tokens(self) -> int:
        """Tokens of prompts and answers of the accepted choices; each prompt counts once."""
        used = 0
        for index, generation in self.generations.items():
            progress = generation.progress
            used += len(progress.tokens) + (0 if index % self.n else progress.prompt_tokens)
        return used

    def _log(self) -> None:
        usage, job = self._usage(), self.prompts[0].job
        if log.is_enabled_for(logging.INFO):
            log.info(
                "answered",
                request=job.request_id,
                session=str(job.session),
                node=self.generations[0].progress.node,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                ttft_s=round(min(self._first_s.values(), default=self.arrived_s) - self.arrived_s, 4),
                total_s=round(self.parts.clock.now() - self.arrived_s, 4),
            )
        for kind, tokens in (
            ("prompt", usage.prompt_tokens),
            ("cached", usage.cached_tokens),
            ("completion", usage.completion_tokens),
        ):
            metrics.child(metrics.TOKENS, kind, self.model).inc(tokens)

    @property
    def _times(self) -> TurnTimes:
        """The first choice's times, which stand for the answer."""
        return self.generations[0].progress.times

    def _timing(self) -> str:
        """The complete `Server-Timing` of a finished answer."""
        return server_timing(self._times.whole(), self.parts.clock.now() - self.arrived_s)

    def _headers(self) -> dict[str, str]:
        session_id, request_id = self.prompts[0].session.key.session_id, self.prompts[0].job.request_id
        return turn_headers(self.caller, session_id, request_id, self.generations[0].progress)
