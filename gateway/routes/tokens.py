"""`POST /tokenize`, `POST /detokenize`: a model's tokenizer, in vLLM's format.

A worker that serves the model answers, or its engine where that has HTTP of its own. A request counts toward its
tenant's requests, not its tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from contracts.errors import Unavailable
from contracts.turn_times import Phase
from contracts.v1 import worker_pb2 as pb
from gateway.backend import Question
from gateway.core.admission import Caller
from gateway.core.refusals import refusal
from gateway.core.relay_bodies import Relayed
from gateway.core.routing import FleetView, direct_route
from gateway.core.turn_times import TurnTimes, server_timing
from gateway.entering import entered
from gateway.generate import unknown_model
from gateway.intake import NODE_HEADER, caller_of, pinned_node, read_tokens_asked
from gateway.openai.token_answers import detokenized, tokenized
from gateway.openai.token_requests import TokensAsked
from gateway.parts import PARTS
from gateway.routes.relayed import relay
from gateway.timing import ARRIVED_S, HEADER

#: Memory of an answer in sizes of the worker's reply: the reply itself, and JSON, in which an id takes up to twice the
#: bytes.
_HELD_TIMES = 4


async def tokenize(request: web.Request) -> web.StreamResponse:
    """The token ids of a prompt, or of messages rendered by the model's template."""
    caller = caller_of(request)
    asked = await read_tokens_asked(request, "tokenize", caller)
    if isinstance(asked, Relayed):
        return await relay(request, caller, asked)
    question = pb.TokenizeRequest(
        tenant=caller.tenant,
        prompt=asked.prompt,
        messages=asked.messages,
        tools=asked.tools,
        template_kwargs=asked.template_kwargs,
        add_special_tokens=asked.add_special_tokens,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        return_token_strs=asked.return_token_strs,
    )

    def answer(reply: pb.TokenizeReply) -> Iterator[bytes]:
        return tokenized(reply.tokens, reply.token_strs if asked.return_token_strs else None, reply.max_model_len)

    return await _answered(request, caller, asked, Question("Tokenize", question), answer)


async def detokenize(request: web.Request) -> web.StreamResponse:
    """The text of token ids, with special tokens spelled."""
    caller = caller_of(request)
    asked = await read_tokens_asked(request, "detokenize", caller)
    if isinstance(asked, Relayed):
        return await relay(request, caller, asked)
    question = Question("Detokenize", pb.DetokenizeRequest(tenant=caller.tenant, tokens=asked.tokens))
    return await _answered(request, caller, asked, question, lambda reply: detokenized(reply.text))


async def counted(
    request: web.Request, caller: Caller, asked: TokensAsked, question: pb.TokenizeRequest
) -> web.Response:
    """The number of a prompt's tokens, as Anthropic says it."""

    def answer(reply: pb.TokenizeReply) -> Iterator[bytes]:
        yield b'{"input_tokens":%d}' % len(reply.tokens)

    return await _answered(request, caller, asked, Question("Tokenize", question), answer)


async def _answered(
    request: web.Request, caller: Caller, asked: TokensAsked, question: Question, answer: Any
) -> web.Response:
    parts = request.app[PARTS]
    model = asked.model or parts.config.served_model
    if not parts.fleet.knows_model(model):
        raise unknown_model(model)
    model = parts.fleet.base_of(model)
    pin = pinned_node(request, caller, parts, model)
    times, clock = TurnTimes(request[ARRIVED_S]), parts.clock
    async with entered(request, caller.tenant, caller.priority(0), 0):
        times.enter(Phase.PREPARE, clock.now())
        node, reply = await _asked(request, model, pin, question)
        parts.bodies.hold(request, _HELD_TIMES * reply.ByteSize())
        body = bytearray()
        for piece in answer(reply):
            body += piece
            await asyncio.sleep(0)
    timing = server_timing(times.so_far(clock.now()), clock.now() - times.arrived_s)
    return web.Response(
        body=bytes(body), headers={"Content-Type": "application/json; charset=utf-8", NODE_HEADER: node, HEADER: timing}
    )


async def _asked(request: web.Request, model: str, pin: str, question: Question) -> tuple[str, Any]:
    """The node and reply of the least loaded worker that serves the model. Raises RequestError. Not retried after a
    lost worker, because the request may have killed it."""
    parts = request.app[PARTS]
    workers = parts.workers
    question.message.model = model
    route = direct_route(parts.fleet.view or FleetView(), model, workers.in_flight, workers.connected, pin=pin)
    if route is None:
        raise Unavailable(f"no node serves {model} at the moment; try again")
    reply = await workers.stream(route.node, route.worker_address).ask(question, parts.generator.retry_limits.accept_s)
    if reply.refused:
        raise refusal(reply.refused) or Unavailable(f"{route.node} refused without saying why; try again")
    return route.node, reply
