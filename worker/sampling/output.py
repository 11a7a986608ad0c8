"""From sampled tokens to the client's output: text, tool calls, stop strings, the end of an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from contracts.errors import InvalidRequest
from contracts.request import FinishReason, Output, TokenLogprob
from worker.core.sequence import Sequence
from worker.core.stops import StopMatcher
from worker.core.tool_calls import CallReader
from worker.sampling.sampler import Choice, Constraint
from worker.text.codec import Detokenizer, TextCodec


class GuidedConstraint(Constraint, Protocol):
    """A constraint that can end the answer."""

    error: str

    @property
    def complete(self) -> bool:
        """Whether no token may follow."""
        ...


@dataclass(frozen=True, slots=True)
class Guide:
    """An answer's constraint, and the reader of its tool calls, if it may have any."""

    constraint: GuidedConstraint
    calls: CallReader | None


@dataclass(slots=True)
class Writer:
    """One request's text so far. `take` is called once per sampled token, after `guide`'s constraint took it."""

    sequence: Sequence
    codec: TextCodec
    eos_ids: set[int]
    guide: Guide | None = None
    detokenizer: Detokenizer = field(init=False)
    stops: StopMatcher = field(init=False)
    _ends: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        sampling = self.sequence.request.sampling
        self.detokenizer = self.codec.detokenizer(sampling.skip_special_tokens)
        self.stops = StopMatcher(sampling.stop, sampling.include_stop)
        self._ends = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(self.eos_ids)
        )
        if self.sequence.request.resume_tokens:
            # The previous worker's text is not sent again, but a stop string or a call may begin in it.
            said = self.stops.prime(self.detokenizer.prime(self.sequence.request.resume_tokens))
            if self.guide is not None and self.guide.calls is not None:
                self.guide.calls.push(said)

    @property
    def error(self) -> InvalidRequest | None:
        """Why the answer cannot go on: its grammar exceeded a limit. None: it can."""
        if self.guide is None or not self.guide.constraint.error:
            return None
        request = self.sequence.request
        field_name = (request.form_field or "response_format") if request.tool_use is None else "tools"
        return not_kept(field_name, self.guide.constraint.error)

    def take(self, choice: Choice) -> Output:
        """The client's output for the sequence's next token, which is not appended to the sequence yet."""
        sequence, sampling = self.sequence, self.sequence.request.sampling
        ended: FinishReason | None = None
        text, stopped = "", False
        shown = choice.token not in self._ends or sampling.include_stop
        if shown:
            text, stopped = self.stops.push(self.detokenizer.push(choice.token))
        if stopped or choice.token in self._ends or (self.guide is not None and self.guide.constraint.complete):
            ended = "stop"
        elif sequence.generated + 1 >= sequence.max_tokens:
            ended = "length"
        if ended:
            text += self.stops.flush(self.detokenizer.flush())
        called = None
        if self.guide is not None and self.guide.calls is not None:
            text, called = self.guide.calls.push(text, last=ended is not None)
        return Output(
            request_id=sequence.request.request_id,
            text=text,
            tokens=[choice.token],
            cached_tokens=sequence.cached,
            logprobs=self._logprobs(choice) if shown else None,
            finish_reason=ended,
            tool_calls=called or None,
            stop=self.stops.met,
        )

    def _logprobs(self, choice: Choice) -> list[TokenLogprob] | None:
        if choice.logprob is None:
            return None
        top = [(self.codec.spelling(token), logprob) for token, logprob in choice.top or []]
        return [TokenLogprob(self.codec.spelling(choice.token), choice.logprob, top)]


def not_kept(param: str, reason: str) -> InvalidRequest:
    """The error of an answer whose grammar cannot go on."""
    return InvalidRequest(f"the answer could not be kept to {param}: {reason}", param=param, code="generation_failed")
