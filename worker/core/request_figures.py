"""What a model's requests were like: distributions of their times and sizes, in vLLM's terms.

Times count from when the engine has a request, as vLLM's count from when its engine has it; what comes before (the way
there, the template, the tokeniser) is in the gateway's figures. A request that moves to another node is counted on
each: its prompt there includes what it had said before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

from contracts.request import Output
from contracts.turn_times import Phase
from worker.core.sequence import Sequence

#: Upper bounds of buckets, in seconds and tokens: vLLM's.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
REQUEST_TOKENS = tuple(float(mantissa * 10**power) for power in range(6) for mantissa in (1, 2, 5))
#: How a request ended, as vLLM says it; every one is shown, also with count 0.
ENDS = ("stop", "length", "abort", "error")
_WAITS = (Phase.QUEUE, Phase.MEMORY)


class Distribution:
    """Values by bucket. One thread adds; any may read, and may then miss what is being added."""

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: Ordered[float]) -> None:
        """bounds: upper ones, rising; a value that equals one belongs below it."""
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulated(self) -> list[tuple[str, float]]:
        """For each bound, and infinity, how many values do not exceed it, as Prometheus wants them."""
        found, reached = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), tuple(self._counts), strict=True):
            reached += count
            found.append((bound, float(reached)))
        return found


@dataclass(slots=True)
class _Open:
    sequence: Sequence
    began_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    waited_s: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class RequestFigures:
    """Of one engine. Only its thread calls the methods; attributes may be read on any thread.

    computed, in_hbm, brought: prompt tokens by where their KV came from: computed here, found in HBM, loaded from a
    lower tier. generated: tokens of answers. ended: accepted requests by `ENDS`.
    """

    computed: int = 0
    in_hbm: int = 0
    brought: int = 0
    generated: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    first_token_s: Distribution = field(default_factory=lambda: Distribution(FIRST_TOKEN_S))
    between_tokens_s: Distribution = field(default_factory=lambda: Distribution(TOKEN_S))
    token_s: Distribution = field(default_factory=lambda: Distribution(TOKEN_S))
    request_s: Distribution = field(default_factory=lambda: Distribution(REQUEST_S))
    waited_s: Distribution = field(default_factory=lambda: Distribution(REQUEST_S))
    inference_s: Distribution = field(default_factory=lambda: Distribution(REQUEST_S))
    prefill_s: Distribution = field(default_factory=lambda: Distribution(REQUEST_S))
    decode_s: Distribution = field(default_factory=lambda: Distribution(REQUEST_S))
    prompt_tokens: Distribution = field(default_factory=lambda: Distribution(REQUEST_TOKENS))
    computed_tokens: Distribution = field(default_factory=lambda: Distribution(REQUEST_TOKENS))
    answer_tokens: Distribution = field(default_factory=lambda: Distribution(REQUEST_TOKENS))
    most_tokens: Distribution = field(default_factory=lambda: Distribution(REQUEST_TOKENS))
    step_tokens: Distribution = field(default_factory=lambda: Distribution(STEP_TOKENS))
    _open: dict[str, _Open] = field(default_factory=dict)

    def accepted(self, request_id: str, sequence: Sequence, now: float) -> None:
        """The engine has a request."""
        self._open[request_id] = _Open(sequence, now)

    def spoke(self, output: Output, now: float) -> None:
        """A request has got a token, perhaps its last. now: when the step had ended."""
        if (one := self._open.get(output.request_id)) is None:
            return
        if not one.tokens:
            self._first(one, output, now)
        else:
            self.between_tokens_s.add(now - one.last_s)
        one.last_s = now
        one.tokens += len(output.tokens)
        self.generated += len(output.tokens)
        if output.finish_reason is not None:
            self._last(one, output.finish_reason)
            del self._open[output.request_id]

    def gone(self, request_id: str, end: str) -> None:
        """A request ended without its last token: abort or error. Nothing, if it was not accepted."""
        if self._open.pop(request_id, None) is not None:
            self.ended[end] += 1

    def _first(self, one: _Open, output: Output, now: float) -> None:
        one.first_s = now
        one.waited_s = sum((output.times or {}).get(str(phase), 0.0) for phase in _WAITS)
        prompt, cached = one.sequence.prompt_tokens, min(output.cached_tokens, one.sequence.prompt_tokens)
        in_hbm = min(one.sequence.cached_here, cached)
        self.first_token_s.add(now - one.began_s)
        self.in_hbm += in_hbm
        self.brought += cached - in_hbm
        self.computed += prompt - cached
        self.computed_tokens.add(prompt - cached)

    def _last(self, one: _Open, reason: str) -> None:
        prefill_s = max(one.first_s - one.began_s - one.waited_s, 0.0)
        decode_s = one.last_s - one.first_s
        self.ended[reason] += 1
        self.request_s.add(one.last_s - one.began_s)
        self.waited_s.add(one.waited_s)
        self.prefill_s.add(prefill_s)
        self.decode_s.add(decode_s)
        self.inference_s.add(prefill_s + decode_s)
        self.prompt_tokens.add(one.sequence.prompt_tokens)
        self.answer_tokens.add(one.tokens)
        self.most_tokens.add(one.sequence.max_tokens)
        if one.tokens > 1:
            self.token_s.add(decode_s / (one.tokens - 1))
