"""Grammars that an answer must keep to: compiled once each, off the engine's thread, by llguidance.

A compiled grammar knows the bytes of every token as the detokeniser does, so that what it allows is what the client reads. A
request without one costs nothing here; the tables of the vocabulary are made when the first grammar comes.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from contracts.errors import InvalidRequest
from contracts.request import GenerateRequest, ToolUse
from worker.core.tool_calls import CallReader, call_grammar, json_grammar, json_rule, parameters_of
from worker.output import Guide
from worker.text import TextCodec

#: Compiled grammars that are kept; one takes up to a few MiB.
KEPT = 64
_MAX_REASON_CHARS = 300
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")


class GrammarConstraint:
    """One answer's way through its grammar. The engine's thread only, once made.

    error: why it cannot go on; empty as long as it can. What it allows after an error means nothing.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._words = np.zeros(vocab_size // 32 + 1, np.int32)  # with the stand-in's bit (`_tables`)
        self._allowed: npt.NDArray[np.bool_] | None = None
        self.error = ""

    @property
    def complete(self) -> bool:
        """Nothing may be added."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> npt.NDArray[np.bool_]:
        """See `worker.sampler.Constraint`."""
        if self._allowed is None:
            self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
            bits = np.unpackbits(self._words.view(np.uint8), count=self._vocab_size, bitorder="little")
            self._allowed = bits.view(np.bool_)
            if self._matcher.is_error() or not bits.any():
                self._failed()
                self._allowed = np.ones(self._vocab_size, np.bool_)
        return self._allowed

    def took(self, token: int) -> None:
        """See `worker.sampler.Constraint`."""
        self._allowed = None
        if not self.error and not self._matcher.consume_token(token):
            self._failed()

    def _failed(self) -> None:
        self.error = _reason(self._matcher.get_error()) or "nothing can follow"


class Grammars:
    """Compiles grammars for one model. Any thread; compiling takes milliseconds, up to seconds for a large schema."""

    def __init__(self, codec: TextCodec, vocab_size: int, eos_ids: set[int]) -> None:
        """vocab_size: the model's, which may be larger than the tokenizer's."""
        self._codec, self._vocab_size, self._eos_ids = codec, vocab_size, sorted(eos_ids)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def guide(self, request: GenerateRequest) -> Guide | None:
        """What limits this request's tokens, after its resumed ones, and reads its calls. None: nothing does. Raises
        InvalidRequest naming the field whose schema the library cannot do, with its reason."""
        use = request.tool_use
        if use is None and request.json_schema is None:
            return None
        dialect = self._codec.dialect
        if use is None:
            assert request.json_schema is not None
            matcher = self._matcher(json_grammar(request.json_schema), "response_format")
        elif use.choice == "auto" and request.json_schema is not None and not dialect.begin:
            raise InvalidRequest(
                "response_format cannot be combined with tool_choice 'auto' on this model, whose calls are JSON too; "
                "require a call, or leave one of both out",
                param="response_format",
            )
        else:
            self._check(use, request.json_schema)
            matcher = self._matcher(call_grammar(dialect, use, request.json_schema), "tools")
        constraint = GrammarConstraint(matcher, self._vocab_size)
        for token in request.resume_tokens:
            constraint.took(token)
        if use is None or use.choice == "none":
            return Guide(constraint, None)
        answer = f"{request.group or request.request_id} {request.choice}"
        return Guide(constraint, CallReader(dialect, answer, forced=use.choice == "required"))

    def _check(self, use: ToolUse, schema: str | None) -> None:
        """Name the one of several schemas that cannot be done."""
        if schema is not None:
            self._matcher(json_grammar(schema), "response_format")
        if use.choice == "none":
            return
        for i, tool in enumerate(json.loads(use.tools)):
            self._matcher(f"start: {json_rule(parameters_of(tool))}\n", f"tools[{i}].function.parameters")

    def _matcher(self, grammar: str, param: str) -> LLMatcher:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _tables(self._codec, self._vocab_size, self._eos_ids)
            tokenizer, known = self._tokenizer, self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known.deep_copy()
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise InvalidRequest(f"{param} cannot be enforced: {_reason(matcher.get_error())}", param=param, code="unsupported_schema")
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return matcher.deep_copy()


def _reason(error: str) -> str:
    """The library's words without its state and its place in our grammar."""
    return _PLACE.sub("", error.split("<state>")[0].split("\n")[0]).strip()[:_MAX_REASON_CHARS]


def _tables(codec: TextCodec, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """The vocabulary as the library wants it. It must have an end-of-text token: one beyond the model's stands in, if need be."""
    tokens = [*(codec.spelling(token) for token in range(vocab_size)), b"<end>"]
    ends = [token for token in eos_ids if 0 <= token < vocab_size] or [vocab_size]
    special = sorted({vocab_size, *ends, *(token for token in codec.special_ids if token < vocab_size)})
    described = _Vocabulary(codec, tokens, special, ends[0])
    return LLTokenizer(TokenizerWrapper(described), n_vocab=len(tokens), eos_token=ends)


class _Vocabulary:
    """What the library asks a tokenizer for."""

    bos_token_id = None

    def __init__(self, codec: TextCodec, tokens: list[bytes], special: list[int], eos: int) -> None:
        self._codec, self.tokens, self.special_token_ids, self.eos_token_id = codec, tokens, special, eos
        self._ids: dict[bytes, int] = {}

    def __call__(self, text: str) -> list[int]:
        """Tokens whose bytes are those of `text`: the tokenizer's own choice, unless it adds a space in front, normalises, or takes
        a special token's spelling for the token; then the longest that fit, one by one."""
        data = text.encode()
        tokens = self._codec.plain_tokens(text)
        if b"".join(map(self._codec.token_bytes, tokens)) == data:
            return tokens
        if not self._ids:
            special = set(self.special_token_ids)
            self._ids = {spelled: token for token, spelled in enumerate(self.tokens) if spelled and token not in special}
        longest, tokens, at = max(map(len, self._ids)), [], 0
        while at < len(data):
            found = next((n for n in range(min(longest, len(data) - at), 0, -1) if data[at : at + n] in self._ids), 0)
            if not found:  # a vocabulary without this byte: the library gives up on what it cannot spell
                break
            tokens.append(self._ids[data[at : at + found]])
            at += found
        return tokens
