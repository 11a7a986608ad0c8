"""From sampled tokens to what the client reads: text, stop strings, the end of a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.request import FinishReason, Output, TokenLogprob
from worker.core.sequence import Sequence
from worker.sampler import Choice
from worker.text import Detokenizer, StopMatcher, TextCodec


@dataclass(slots=True)
class Writer:
    """One request's text so far. `take` is called once a sampled token."""

    sequence: Sequence
    codec: TextCodec
    eos_ids: set[int]
    detokenizer: Detokenizer = field(init=False)
    stops: StopMatcher = field(init=False)

    def __post_init__(self) -> None:
        self.detokenizer = self.codec.detokenizer()
        self.stops = StopMatcher(self.sequence.request.sampling.stop)
        if self.sequence.request.resume_tokens:
            # What a former worker sent is not sent again, but a stop string may begin in it.
            self.stops.prime(self.detokenizer.prime(self.sequence.request.resume_tokens))

    def take(self, choice: Choice) -> Output:
        """Append the token to the sequence and return what the client gains by it."""
        sequence, sampling = self.sequence, self.sequence.request.sampling
        sequence.tokens.append(choice.token)
        ended: FinishReason | None = None
        text = ""
        if choice.token in self.eos_ids and not sampling.ignore_eos:
            ended = "stop"
        else:
            text, stopped = self.stops.push(self.detokenizer.push(choice.token))
            if stopped:
                ended = "stop"
            elif sequence.generated >= sequence.max_tokens:
                ended = "length"
        if ended:
            text += self.stops.flush(self.detokenizer.flush())
        return Output(
            request_id=sequence.request.request_id,
            text=text,
            tokens=[choice.token],
            cached_tokens=sequence.cached,
            logprobs=self._logprobs(choice),
            finish_reason=ended,
        )

    def _logprobs(self, choice: Choice) -> list[TokenLogprob] | None:
        if choice.logprob is None:
            return None
        top = [(self.codec.decode([token]), logprob) for token, logprob in choice.top or []]
        return [TokenLogprob(self.codec.decode([choice.token]), choice.logprob, top)]
