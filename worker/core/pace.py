"""Learns this worker's speed from its own steps, and estimates outstanding work in seconds.

Running means adapt to noise and longer contexts within some tens of steps. Used by the load plan and the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Protocol

from worker.core.batching import HasPriority

_WEIGHT = 0.1
#: Clip for one step's ratio of measured to expected time, and its inverse.
_MAX_ERROR = 4.0
#: Weight of a step in the slope over batch sizes; minimum relative variance of batch sizes to fit it; weight of a slope
#: from a profile, as variance in sequences squared; minimum fraction of a mean share that one more sequence costs.
_SLOPE_WEIGHT, _MIN_VARIANCE, _PROFILE_VARIANCE, _MIN_EXTRA = 0.01, 0.01, 4.0, 0.02


class Asked(HasPriority, Protocol):
    """The part of a request that estimates need. expected_tokens: estimated answer length, or None."""

    @property
    def expected_tokens(self) -> int | None: ...


class Work(Protocol):
    """The part of a sequence that estimates need (`worker.core.sequence.Sequence`, or the simulator's)."""

    @property
    def request(self) -> Asked: ...
    @property
    def tokens(self) -> Sized: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def generated(self) -> int: ...
    @property
    def computed(self) -> int: ...
    @property
    def found(self) -> int | None: ...
    @property
    def kept(self) -> int: ...


@dataclass(slots=True)
class Pace:
    """Seconds per prefilled token, per decoded token (its share of the step), and of a typical request.

    request_s and output_tokens are 0 until a request has ended. extra_token_s: growth of a decode-only step per
    additional sequence; None until several batch sizes were seen. Where reading the weights dominates, it is far less
    than a sequence's share of the step. It is what one request costs another, so estimates of outstanding work use it.
    """

    prefill_token_s: float = 1e-3
    decode_token_s: float = 1e-2
    request_s: float = 0.0
    output_tokens: float = 0.0
    extra_token_s: float | None = None
    #: Running means over decode-only steps: batch, seconds, batch squared, batch times seconds.
    _means: tuple[float, float, float, float] | None = None
    #: The slope given by a profile.
    _measured: float | None = None

    def stepped(self, seconds: float, prefill_tokens: int, decodes: int, steps: int = 1) -> None:
        """Learn from a step. steps: number of identical decode-only steps, of `seconds` each."""
        if not prefill_tokens and decodes:
            self.decode_token_s += _over(_WEIGHT, steps) * (seconds / decodes - self.decode_token_s)
            self._learn(seconds, float(decodes), steps)
        elif prefill_tokens:
            # Divide the error between prompts and the rest, in proportion to their expected times.
            prefill_s = prefill_tokens * self.prefill_token_s
            expected_s = prefill_s + self._without_prompts_s(decodes)
            error = min(max(seconds / expected_s, 1 / _MAX_ERROR), _MAX_ERROR)
            self.prefill_token_s *= error ** (_WEIGHT * prefill_s / expected_s)
            self._slow_down(error ** (_SLOPE_WEIGHT * (1 - prefill_s / expected_s)))

    def _slow_down(self, times: float) -> None:
        """Scale the expected time of decode-only steps."""
        self.decode_token_s *= times
        if self._means is not None:
            b, s, bb, bs = self._means
            self._means = (b, times * s, bb, times * bs)
        if self.extra_token_s is not None:
            self.extra_token_s *= times

    def _without_prompts_s(self, decodes: int) -> float:
        """Expected time of a step beyond its prefilled tokens: its decodes, or the fixed cost of a step without any."""
        if decodes or self._means is None:
            return self.decode_s(decodes)
        return max(self.decode_s(1) - self.marginal_token_s, 0.0)

    def expect_decodes(self, steps_s: Mapping[int, float]) -> None:
        """Seed with a profile's decode-only steps: batch -> seconds."""
        seen = [(float(batch), seconds, float(batch * batch), batch * seconds) for batch, seconds in steps_s.items()]
        self._fit(tuple(sum(x) / len(seen) for x in zip(*seen, strict=True)))
        self._measured = self.extra_token_s
        least = min(steps_s)
        self.decode_token_s = steps_s[least] / least

    def _learn(self, seconds: float, batch: float, steps: int) -> None:
        seen, weight = (batch, seconds, batch * batch, batch * seconds), _over(_SLOPE_WEIGHT, steps)
        self._fit(tuple(m + weight * (x - m) for m, x in zip(self._means or seen, seen, strict=True)))

    def _fit(self, means: tuple[float, ...]) -> None:
        b, s, bb, bs = means
        self._means = (b, s, bb, bs)
        varied, together = bb - b * b, bs - b * s
        if self._measured is not None:
            varied, together = varied + _PROFILE_VARIANCE, together + _PROFILE_VARIANCE * self._measured
        if varied > _MIN_VARIANCE * b * b:
            self.extra_token_s = min(max(together / varied, _MIN_EXTRA * s / b), s / b)

    def decode_s(self, sequences: int) -> float:
        """Expected seconds of a decode-only step of `sequences`: the line over batch sizes."""
        if self._means is None or not sequences:
            return sequences * self.decode_token_s
        batch, seconds = self._means[:2]
        return max(seconds + (sequences - batch) * self.marginal_token_s, 0.0)

    @property
    def marginal_token_s(self) -> float:
        """Seconds that one more decoding sequence adds to a step."""
        return self.decode_token_s if self.extra_token_s is None else min(self.extra_token_s, self.decode_token_s)

    def ended(self, prefilled: int, generated: int) -> None:
        """A request ended after this worker prefilled and generated so many of its tokens."""
        work_s = prefilled * self.prefill_token_s + generated * self.marginal_token_s
        weight = _WEIGHT if self.request_s else 1.0
        self.request_s += weight * (work_s - self.request_s)
        self.output_tokens += weight * (generated - self.output_tokens)

    def outstanding_s(self, sequences: Iterable[Work], chunk_tokens: int) -> dict[int, float]:
        """Remaining work of these sequences in seconds, by priority."""
        total: dict[int, float] = {}
        output_token_s = self.marginal_token_s
        for s in sequences:
            left_s = self.prefill_s(s, chunk_tokens) + self._remaining_output(s) * output_token_s
            total[s.request.priority] = total.get(s.request.priority, 0.0) + left_s
        return total

    def device_s(self, s: Work, to_compute: int, hbm_tokens: float, step_s: float) -> float:
        """Cost of a sequence in seconds of the whole device: computing `to_compute` tokens, plus its share of HBM
        (capacity `hbm_tokens`) for as long as the answer takes with steps of `step_s`. Serving low cost first minimises
        the mean wait, whichever of the two is scarce."""
        left = self._remaining_output(s)
        return to_compute * self.prefill_token_s + (len(s.tokens) + left) / hbm_tokens * left * step_s

    def _remaining_output(self, s: Work) -> float:
        """Expected remaining output tokens: from the caller's estimate or the typical answer, at most the limit."""
        expected, generated = s.request.expected_tokens or self.output_tokens, s.generated
        return max(min(s.max_tokens, max(expected, generated + 1.0)) - generated, 0.0)

    def prefill_s(self, s: Work, chunk_tokens: int) -> float:
        """Seconds of prompt left to compute. Chunks that the store found count as cached; before it answers, the
        estimated cache hits."""
        tokens = len(s.tokens) - max(s.computed, s.kept if s.found is None else s.found * chunk_tokens)
        return max(tokens - 1, 0) * self.prefill_token_s


def _over(weight: float, steps: int) -> float:
    """Weight of a value that enters a running mean `steps` times."""
    return weight if steps == 1 else 1.0 - (1.0 - weight) ** steps
