"""A served model's side towards callers: tokenising prompts, and checking requests against its limits."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from contracts.context import ContextBound
from contracts.errors import InvalidRequest, RequestError
from contracts.request import GenerateRequest
from contracts.template_kwargs import decode_template_kwargs
from runtime import telemetry
from runtime.sections import WorkerSection
from worker.core.bounds import check_request
from worker.engine.engine import NativeEngine
from worker.sampling.grammars import GrammarCompiler, Grammars
from worker.text.codec import TextCodec
from worker.text.token_calls import TokenCalls
from worker.text.tokenising import Tokenising

log = telemetry.logger("worker.service.hosted")


@dataclass(slots=True)
class Hosted:
    """See the module. max_tokens: of prompt plus output. tokenising: threads that all models of a worker share."""

    engine: NativeEngine
    codec: TextCodec
    max_tokens: int
    vocab_size: int
    settings: WorkerSection
    tokenising: Tokenising
    bound: ContextBound = field(init=False)
    grammars: Grammars = field(init=False)
    calls: TokenCalls = field(init=False)

    def __post_init__(self) -> None:
        codec = self.codec
        self.bound = ContextBound(self.max_tokens, codec.longest_token_bytes, codec.message_token_bytes)
        self.grammars = Grammars(GrammarCompiler(codec, self.vocab_size, self.engine.eos_ids), self.settings)
        self.calls = TokenCalls(codec, self.bound, self.vocab_size, self.tokenising)

    @property
    def name(self) -> str:
        """The model's name in the API."""
        return self.engine.model_name

    def tokens(self, request: GenerateRequest) -> list[int]:
        """The prompt's token ids. Any thread. Raises InvalidRequest."""
        check_request(request)
        # Refuse prompts that are too long before any work; a gateway may not have known this model's limits.
        self.bound.check_prompt(request.prompt if request.prompt_tokens is None else request.prompt_tokens)
        self.bound.check_messages(request.messages)
        if request.prompt_tokens is not None:
            tokens = request.prompt_tokens
            if not isinstance(tokens, list) or any(type(t) is not int or not 0 <= t < self.vocab_size for t in tokens):
                raise InvalidRequest(f"prompt holds token ids outside of 0 to {self.vocab_size - 1}", param="prompt")
        elif request.prompt is not None:
            tokens = self.codec.encode(request.prompt)
        else:
            tokens = self._rendered(request)
        if not tokens:
            raise InvalidRequest("the prompt is empty", param="prompt" if request.messages is None else "messages")
        return tokens

    def _rendered(self, request: GenerateRequest) -> list[int]:
        tools = json.loads(request.tool_use.tools) if request.tool_use is not None else None
        try:
            variables = decode_template_kwargs(request.template_kwargs)
            return self.codec.render(request.messages or [], tools, self._check_rendered, variables)
        except RequestError:
            raise
        except Exception as error:  # a template may raise anything
            log.exception("messages not rendered", request=request.request_id)
            raise InvalidRequest(
                "the messages could not be rendered with this model's chat template", param="messages"
            ) from error

    def _check_rendered(self, amount: int) -> None:
        self.bound.check_bytes(amount, self.codec.longest_token_bytes, "messages")

    def limit(self, request: GenerateRequest, prompt: int) -> int:
        """The limit of generated tokens. Raises InvalidRequest when the context lacks space for prompt and max_tokens,
        or a parameter names an unknown token."""
        sampling = request.sampling
        named = {
            "logit_bias": sampling.logit_bias,
            "stop_token_ids": sampling.stop_token_ids,
            "resume_tokens": request.resume_tokens,
        }
        for param, tokens in named.items():
            if any(not 0 <= token < self.vocab_size for token in tokens):
                raise InvalidRequest(f"{param} names token ids outside of 0 to {self.vocab_size - 1}", param=param)
        spec = sampling.max_tokens
        room = self.max_tokens - prompt
        if room < 1 or (spec is not None and spec > room):
            raise InvalidRequest(
                f"this model's context holds {self.max_tokens} tokens; the prompt has {prompt}"
                + (f" and max_tokens is {spec}" if spec is not None else "")
                + ". Shorten the prompt or lower max_tokens",
                param="messages" if request.messages is not None else "prompt",
                code="context_length_exceeded",
            )
        limit = room if spec is None else spec
        if len(request.resume_tokens) > limit:
            raise InvalidRequest(
                f"resume_tokens holds more than the {limit} tokens that may be generated", param="resume_tokens"
            )
        return limit
