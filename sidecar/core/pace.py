"""How fast a vLLM engine is, from its figures: seconds of a computed prompt token, of a generated one, of a request.

Its histograms count requests that have ended, so estimates follow within some requests. They are ratios of decaying
sums: long requests count more, and a few cached prompts do not make a token look expensive.
"""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.core.samples import Sample

#: What a request that has ended counts in the sums once so many others have followed: 1 / e.
_REMEMBERED = 32.0
#: Computed tokens below which nothing is concluded from the sums: a short prompt costs a step, however short.
_LEAST_TOKENS = 64.0
#: Used for estimates until something was measured, as a worker does.
UNKNOWN_PREFILL_TOKEN_S, UNKNOWN_TOKEN_S, UNKNOWN_ANSWER_TOKENS = 1e-3, 1e-2, 128.0


@dataclass(slots=True)
class Pace:
    """See the module. Zero: not measured yet. `batch`: requests that run together, when any does."""

    requests: float = 0.0
    prefill_s: float = 0.0
    computed_tokens: float = 0.0
    decode_s: float = 0.0
    generated_tokens: float = 0.0
    batch: float = 1.0
    _last: Sample | None = None
    #: Requests of the sidecar's own that figures will count, and their seconds.
    _own: int = 0
    _own_s: float = 0.0

    def own(self, seconds: float) -> None:
        """A request of the sidecar's own for one token has ended: it is left out."""
        self._own, self._own_s = self._own + 1, self._own_s + seconds

    def seen(self, sample: Sample) -> None:
        """Learn from the figures of a moment. Those of a server that has started anew begin a new count."""
        last, self._last = self._last, sample
        if sample.running >= 1:
            self.batch += 0.1 * (sample.running - self.batch)
        if last is None or not sample.follows(last):
            return
        own = min(self._own, int(sample.ended - last.ended))
        ended = sample.ended - last.ended - own
        own_s, self._own, self._own_s = self._own_s, 0, 0.0
        if ended <= 0:
            return
        kept = max(1.0 - ended / _REMEMBERED, 0.0) if ended < _REMEMBERED else 0.0
        self.requests = kept * self.requests + ended
        prefill_s = max(sample.ended_prefill_s - last.ended_prefill_s - own_s, 0.0)
        self.prefill_s = kept * self.prefill_s + prefill_s
        computed = sample.ended_computed_tokens - last.ended_computed_tokens - own
        self.computed_tokens = kept * self.computed_tokens + computed
        self.decode_s = kept * self.decode_s + sample.ended_decode_s - last.ended_decode_s
        self.generated_tokens = (
            kept * self.generated_tokens + sample.ended_generated_tokens - last.ended_generated_tokens - own
        )

    @property
    def prefill_token_s(self) -> float:
        """Seconds of computing a prompt token; 0: not measured."""
        return self.prefill_s / self.computed_tokens if self.computed_tokens >= _LEAST_TOKENS else 0.0

    @property
    def token_s(self) -> float:
        """Seconds of the device that a generated token takes: its step's, shared by the batch; 0: not measured."""
        if self.generated_tokens < 1 or not self.decode_s:
            return 0.0
        return self.decode_s / self.generated_tokens / max(self.batch, 1.0)

    @property
    def answer_tokens(self) -> float:
        """Tokens of a typical answer."""
        return self.generated_tokens / self.requests if self.requests else UNKNOWN_ANSWER_TOKENS

    @property
    def request_s(self) -> float:
        """The work of a typical request in seconds; 0: not measured."""
        if not self.requests or not self.prefill_token_s:
            return 0.0
        prompt_s = self.computed_tokens / self.requests * self.prefill_token_s
        return prompt_s + self.answer_tokens * self.token_s

    def work_s(self, prompt_tokens: float, answer_tokens: float) -> float:
        """Estimated seconds of the device for so many tokens."""
        prompt_s = prompt_tokens * (self.prefill_token_s or UNKNOWN_PREFILL_TOKEN_S)
        return prompt_s + answer_tokens * (self.token_s or UNKNOWN_TOKEN_S)
