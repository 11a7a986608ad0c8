"""How fast this worker is, learned from its own steps, and what its outstanding work comes to in seconds.

Running means, so that a noisy machine or a longer context is followed within some tens of steps. The load plan and the
scheduler reckon with these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Protocol

from worker.core.batching import HasPriority

_WEIGHT = 0.1
#: One step is believed to have taken so many times as long as expected, or so many times less, at most.
_MOST_WRONG = 4.0
#: How slowly the slope over batches is learned; how much batches must have varied for it (of their mean, squared), or where it was measured
#: before anything ran, by how much (in sequences, squared) that counts as much; and the least share of a step that a sequence is believed
#: to cost, so that more of them are never free.
_SLOW, _VARIED, _MEASURED, _LEAST_EXTRA = 0.01, 0.01, 4.0, 0.02


class Asked(HasPriority, Protocol):
    """What is reckoned of a request. expected_tokens: how long its caller expects the answer to be, or None."""

    @property
    def expected_tokens(self) -> int | None: ...


class Work(Protocol):
    """What is reckoned of a sequence (`worker.core.sequence.Sequence`; the simulator has its own)."""

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
    """Seconds a prefilled token, seconds a decoded token (its share of the batch's step), and a typical request.

    request_s and output_tokens are 0 until a request has ended. extra_token_s: by how much a step that only decodes grows with each further
    sequence; None until batches of several sizes were seen. Where reading the weights is most of a step, that is far less than a sequence's
    share of it, and it is what one request costs another: outstanding work and requests are reckoned with it.
    """

    prefill_token_s: float = 1e-3
    decode_token_s: float = 1e-2
    request_s: float = 0.0
    output_tokens: float = 0.0
    extra_token_s: float | None = None
    #: Running means over steps that only decode: sequences, seconds, and their products.
    _means: tuple[float, float, float, float] | None = None
    #: The slope that was measured before anything ran.
    _measured: float | None = None

    def stepped(self, seconds: float, prefill_tokens: int, decodes: int, steps: int = 1) -> None:
        """A step took this long for so many prefilled tokens and decoding sequences. steps: so many equal ones that only decode, one after
        the other."""
        if not prefill_tokens and decodes:
            self.decode_token_s += _over(_WEIGHT, steps) * (seconds / decodes - self.decode_token_s)
            self._learn(seconds, float(decodes), steps)
        elif prefill_tokens:
            # What a step took beyond what was expected is laid to its prompts and to the rest, to each as far as it was a part of it.
            prefill_s = prefill_tokens * self.prefill_token_s
            expected_s = prefill_s + self._without_prompts_s(decodes)
            error = min(max(seconds / expected_s, 1 / _MOST_WRONG), _MOST_WRONG)
            self.prefill_token_s *= error ** (_WEIGHT * prefill_s / expected_s)
            self._slow_down(error ** (_SLOW * (1 - prefill_s / expected_s)))

    def _slow_down(self, times: float) -> None:
        """Steps that only decode are expected to take so many times as long."""
        self.decode_token_s *= times
        if self._means is not None:
            b, s, bb, bs = self._means
            self._means = (b, times * s, bb, times * bs)
        if self.extra_token_s is not None:
            self.extra_token_s *= times

    def _without_prompts_s(self, decodes: int) -> float:
        """What a step takes beside its prefilled tokens: its decodes, or where it has none, what any step takes."""
        if decodes or self._means is None:
            return self.decode_s(decodes)
        return max(self.decode_s(1) - self.marginal_token_s, 0.0)

    def expect_decodes(self, steps_s: Mapping[int, float]) -> None:
        """Before anything ran: a step that only decodes so many sequences takes so many seconds."""
        seen = [(float(batch), seconds, float(batch * batch), batch * seconds) for batch, seconds in steps_s.items()]
        self._fit(tuple(sum(x) / len(seen) for x in zip(*seen, strict=True)))
        self._measured = self.extra_token_s
        least = min(steps_s)
        self.decode_token_s = steps_s[least] / least

    def _learn(self, seconds: float, batch: float, steps: int) -> None:
        seen, weight = (batch, seconds, batch * batch, batch * seconds), _over(_SLOW, steps)
        self._fit(tuple(m + weight * (x - m) for m, x in zip(self._means or seen, seen, strict=True)))

    def _fit(self, means: tuple[float, ...]) -> None:
        b, s, bb, bs = means
        self._means = (b, s, bb, bs)
        varied, together = bb - b * b, bs - b * s
        if self._measured is not None:
            varied, together = varied + _MEASURED, together + _MEASURED * self._measured
        if varied > _VARIED * b * b:
            self.extra_token_s = min(max(together / varied, _LEAST_EXTRA * s / b), s / b)

    def decode_s(self, sequences: int) -> float:
        """What a step that only decodes so many is expected to take: as long as those so far, and what each more of them adds."""
        if self._means is None or not sequences:
            return sequences * self.decode_token_s
        batch, seconds = self._means[:2]
        return max(seconds + (sequences - batch) * self.marginal_token_s, 0.0)

    @property
    def marginal_token_s(self) -> float:
        """What a token of one more sequence adds to a step."""
        return self.decode_token_s if self.extra_token_s is None else min(self.extra_token_s, self.decode_token_s)

    def ended(self, prefilled: int, generated: int) -> None:
        """A request ended, of which so many tokens were prefilled and generated here."""
        work_s = prefilled * self.prefill_token_s + generated * self.marginal_token_s
        weight = _WEIGHT if self.request_s else 1.0
        self.request_s += weight * (work_s - self.request_s)
        self.output_tokens += weight * (generated - self.output_tokens)

    def outstanding_s(self, sequences: Iterable[Work], chunk_tokens: int) -> dict[int, float]:
        """The work that is left in these sequences, by priority."""
        total: dict[int, float] = {}
        for s in sequences:
            left_s = self.prefill_s(s, chunk_tokens) + self._answer_left(s) * self.marginal_token_s
            total[s.request.priority] = total.get(s.request.priority, 0.0) + left_s
        return total

    def device_s(self, s: Work, to_compute: int, hbm_tokens: float, step_s: float) -> float:
        """What a sequence with so many tokens to compute takes of the device, in seconds of all of it: computing its prompt, and its
        share of HBM, which holds `hbm_tokens`, for as long as its answer takes with steps of `step_s`. Whichever of the two is short,
        the mean wait is least when those who take little of it go first."""
        left = self._answer_left(s)
        return to_compute * self.prefill_token_s + (len(s.tokens) + left) / hbm_tokens * left * step_s

    def _answer_left(self, s: Work) -> float:
        """Tokens still to come. A client's limit is no plan: answers are expected to be typical, or as long as their caller expects."""
        expected = s.request.expected_tokens or self.output_tokens
        return max(min(s.max_tokens, max(expected, s.generated + 1.0)) - s.generated, 0.0)

    def prefill_s(self, s: Work, chunk_tokens: int) -> float:
        """What is left to compute of its prompt, reckoned with what is known to be loaded, or thought to be kept while nobody was asked."""
        tokens = len(s.tokens) - max(s.computed, s.kept if s.found is None else s.found * chunk_tokens)
        return max(tokens - 1, 0) * self.prefill_token_s


def _over(weight: float, steps: int) -> float:
    """The weight of a value in a running mean that saw it so many times."""
    return weight if steps == 1 else 1.0 - (1.0 - weight) ** steps
