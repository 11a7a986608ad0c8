"""The tokenizer of toy workers: a character is a token, and its code point the token's id."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import msgpack

from contracts.errors import InvalidRequest, RequestError, to_wire
from contracts.v1 import worker_pb2 as pb

MAX_MODEL_LEN = 2000


class ToyTokenizer:
    """What a worker answers beside its stream. refuse_question: refuse every question so; stuck: answer none."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.refuse_question: RequestError | None = None
        self.stuck = False

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeReply:
        refused = await self._heard(request)
        if refused:
            return pb.TokenizeReply(refused=refused)
        if request.messages:
            text = "".join(f"<{m['role']}>{m['content']}" for m in msgpack.unpackb(request.messages))
            text += "<assistant>" * request.add_generation_prompt
        else:
            text = msgpack.unpackb(request.prompt)
        strs = list(text) if request.return_token_strs else []
        return pb.TokenizeReply(tokens=map(ord, text), token_strs=strs, max_model_len=MAX_MODEL_LEN)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeReply:
        refused = await self._heard(request)
        tokens = [] if refused else msgpack.unpackb(request.tokens)
        if not all(0 <= token <= sys.maxunicode for token in tokens):
            refused = json.dumps(to_wire(InvalidRequest("the model has no such token", param="tokens")))
        return pb.DetokenizeReply(refused=refused) if refused else pb.DetokenizeReply(text="".join(map(chr, tokens)))

    async def _heard(self, request: Any) -> str:
        self.asked.append(request)
        if self.stuck:
            await asyncio.sleep(60)
        return json.dumps(to_wire(self.refuse_question)) if self.refuse_question is not None else ""
