"""Answers a gateway's calls for `POST /tokenize` and `POST /detokenize`: the ids of a prompt, and the text of ids.

Runs on the threads that tokenise prompts (`worker.text.tokenising`), in turns by tenant, without the engine. Errors of
a call are in its reply.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from typing import Any, TypeVar

import msgpack

from contracts import token_lists
from contracts.context import ContextBound, text_bytes
from contracts.errors import InvalidRequest, RequestError, to_wire
from contracts.template_kwargs import decode_template_kwargs
from contracts.v1 import worker_pb2 as pb
from runtime import telemetry
from worker.core.faults import told
from worker.text.codec import TextCodec
from worker.text.tokenising import Tokenising

log = telemetry.logger("worker.tokens")
Reply = TypeVar("Reply", pb.TokenizeReply, pb.DetokenizeReply)
#: Ids converted to Python objects at a time, while the interpreter's lock is held.
_SLICE = 4096


class TokenCalls:
    """The two calls. One event loop."""

    def __init__(self, codec: TextCodec, bound: ContextBound, vocab_size: int, tokenising: Tokenising) -> None:
        self._codec, self._bound, self._vocab_size, self._tokenising = codec, bound, vocab_size, tokenising

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeReply:
        """The ids of a prompt, or of messages by the model's template; or an error."""
        amount = len(request.prompt) + len(request.messages) + len(request.tools)
        return await self._answered(
            request.tenant, amount, functools.partial(self._tokenize, request), pb.TokenizeReply
        )

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeReply:
        """The text of ids, with special tokens spelled out; or an error."""
        return await self._answered(
            request.tenant, len(request.tokens), functools.partial(self._detokenize, request), pb.DetokenizeReply
        )

    async def _answered(self, tenant: str, amount: int, work: Callable[[], Reply], reply: type[Reply]) -> Reply:
        try:
            return await self._tokenising.run(tenant, amount, work)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # panics of Rust libraries are no Exception
            if not isinstance(error, RequestError):
                log.exception("tokenizer's question not answered")
            return reply(refused=json.dumps(to_wire(told("its preparation", error))))

    # ---- in a thread -------------------------------------------------------------------------------------------
    def _tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeReply:
        param = "messages" if request.messages else "prompt"
        tokens = self._rendered(request) if request.messages else self._encoded(request)
        token_lists.check_answer(len(tokens), 0, param)
        reply, spelled_bytes = pb.TokenizeReply(max_model_len=self._bound.max_tokens), 0
        for at in range(0, len(tokens), _SLICE):
            part = tokens[at : at + _SLICE]
            reply.tokens.extend(part)
            if request.return_token_strs:
                spelled = [self._codec.vocabulary_text(token) for token in part]
                spelled_bytes += sum(map(text_bytes, spelled))
                token_lists.check_answer(len(tokens), spelled_bytes, param)
                reply.token_strs.extend(spelled)
        return reply

    def _encoded(self, request: pb.TokenizeRequest) -> list[int]:
        prompt = _unpacked(request.prompt, str, "prompt")
        self._bound.check_prompt(prompt)
        return self._codec.encode(prompt, add_special_tokens=request.add_special_tokens)

    def _rendered(self, request: pb.TokenizeRequest) -> list[int]:
        messages = _unpacked(request.messages, list, "messages")
        self._bound.check_messages(messages)
        if request.add_generation_prompt and request.continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message cannot both be true", param="continue_final_message"
            )
        try:
            return self._codec.render(
                messages,
                json.loads(request.tools) if request.tools else None,
                lambda amount: self._bound.check_bytes(amount, self._codec.longest_token_bytes, "messages"),
                decode_template_kwargs(request.template_kwargs or None),
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                add_special_tokens=request.add_special_tokens,
            )
        except RequestError:
            raise
        except Exception as error:  # a template may raise anything
            log.exception("messages not rendered")
            raise InvalidRequest(
                "the messages could not be rendered with this model's chat template", param="messages"
            ) from error

    def _detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeReply:
        tokens = _unpacked(request.tokens, list, "tokens")
        token_lists.check_count(tokens, self._bound.max_tokens)
        if any(type(token) is not int or not 0 <= token < self._vocab_size for token in tokens):
            raise InvalidRequest(f"tokens holds ids outside of 0 to {self._vocab_size - 1}", param="tokens")
        text = self._codec.text_of(tokens)
        token_lists.check_answer(len(tokens), text_bytes(text), "tokens")
        return pb.DetokenizeReply(text=text)


def _unpacked(packed: bytes, kind: type[Any], param: str) -> Any:
    try:
        value = msgpack.unpackb(packed, raw=False, strict_map_key=False)
    except (ValueError, TypeError) as e:
        raise InvalidRequest(f"the worker cannot read {param}: {e}", param=param) from None
    if not isinstance(value, kind):
        raise InvalidRequest(f"the worker cannot read {param}: it is no {kind.__name__}", param=param)
    return value
