"""The device of another system's node. Batches are formed as in our worker, so that only the systems' decisions differ.

`worker.core.batching` composes steps, `worker.core.pace` estimates outstanding work. An arrival cuts a stretch of
decode-only steps at the end of its current step.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from loadtest.simulate.costs import NodeKind, seed
from loadtest.simulate.events import Events
from loadtest.simulate.stretch import LONGEST, Stretch
from loadtest.simulate.systems.running import Running, Steps
from worker.core.batching import Budget, choose, mixed_tokens
from worker.core.pace import Pace


class Engine:
    """See the module. spoke: called at each first token. ended: called at each complete answer."""

    def __init__(
        self, events: Events, kind: NodeKind, spoke: Callable[[Running], None], ended: Callable[[Running], None]
    ) -> None:
        self._events, self._kind, self._spoke, self._ended = events, kind, spoke, ended
        self.steps, self.pace = Steps(), Pace()
        self.prefilling: list[Running] = []
        #: Decoding sequences: a heap by their last step.
        self.decoding: list[tuple[int, int, Running]] = []
        self._context_tokens = 0.0
        self._stretch: Stretch | None = None
        self._mixed: list[tuple[Running, int]] | None = None
        self._version = self._chosen = 0
        self.busy_s = 0.0
        #: Seconds of the device used by something else (a codec), added to the next step.
        self._owed_s = 0.0
        self._between = False
        self._leaving: list[tuple[Running, Callable[[bool], None]]] = []
        self._joining: list[tuple[Running, int]] = []
        seed(self.pace, kind.costs)

    def join(self, sequence: Running) -> None:
        """Add a sequence whose cache has arrived; it computes from the next step on."""
        self.prefilling.append(sequence)
        self._wake()

    def disturb(self, seconds: float) -> None:
        """Something else occupies the device for `seconds`: the next step takes that much longer."""
        self._owed_s += seconds

    def leave(self, sequence: Running, gone: Callable[[bool], None]) -> None:
        """Remove a decoding sequence at the end of the current step. gone: called with False if it ended by then."""
        self._leaving.append((sequence, gone))
        if self._stretch is not None:
            self._cut()

    def take(self, sequence: Running) -> None:
        """Continue a sequence of another node, from the next step on."""
        self._joining.append((sequence, sequence.generated))
        self._wake()

    def _wake(self) -> None:
        """A sequence was added: cut the current stretch, or start an idle device."""
        if self._stretch is not None:
            self._cut()
        elif self._mixed is None and not self._between:
            self._next()

    def catch_up(self) -> None:
        """Count the finished steps of the current stretch."""
        stretch = self._stretch
        if stretch is None:
            return
        over = stretch.over(self._events.now)
        if over:
            self._made(over, stretch.seconds(over))
            stretch.pass_over(over)

    def _cut(self) -> None:
        self.catch_up()
        stretch = self._stretch
        assert stretch is not None
        if stretch.cut(self._events.now):
            self._schedule(stretch.end_s)

    def _schedule(self, time_s: float) -> None:
        self._version += 1
        version = self._version
        self._events.at(time_s, lambda: self._over(version))

    def _made(self, count: int, seconds: float) -> None:
        batch = len(self.decoding)
        self.steps.made += count
        self._context_tokens += count * batch
        self.busy_s += seconds
        if self._mixed is None:
            self.pace.stepped(seconds / count, 0, batch, count)

    def _over(self, version: int) -> None:
        if version != self._version:
            return
        if self._stretch is not None:
            if self._stretch.count:
                self._made(self._stretch.count, self._stretch.seconds(self._stretch.count))
            self._stretch = None
        else:
            self._mixed_over()
        self._next()

    def _next(self) -> None:
        """Between two steps. Callbacks may add work, which starts with the next step."""
        self._between = True
        self._change()
        self._finish()
        self._between = False
        self._begin()

    def _mixed_over(self) -> None:
        chosen, self._mixed = self._mixed, None
        assert chosen is not None
        self.steps.made += 1
        self._context_tokens += len(self.decoding)
        for sequence, count in chosen:
            sequence.prefilled += count
            if sequence.prefilled >= sequence.request.prompt_tokens:
                self.prefilling.remove(sequence)
                sequence.decoding_from = self.steps.made
                self._context_tokens += sequence.context_tokens
                last = self.steps.made + sequence.request.answer_tokens - 1
                heapq.heappush(self.decoding, (last, sequence.arrival, sequence))
                self._spoke(sequence)

    def _change(self) -> None:
        """Between two steps: remove leaving sequences that have not ended, add those from other nodes."""
        leaving, self._leaving = self._leaving, []
        for sequence, gone in leaving:
            stays = [d for d in self.decoding if d[2] is not sequence or d[0] <= self.steps.made]
            there = len(stays) < len(self.decoding)
            if there:
                self.decoding = stays
                heapq.heapify(self.decoding)
                self._context_tokens -= sequence.context_tokens
            gone(there)
        joining, self._joining = self._joining, []
        for sequence, generated in joining:
            sequence.steps, sequence.decoding_from = self.steps, self.steps.made + 1 - generated
            last = self.steps.made + sequence.request.answer_tokens - generated
            heapq.heappush(self.decoding, (last, sequence.arrival, sequence))
            self._context_tokens += sequence.context_tokens

    def _finish(self) -> None:
        while self.decoding and self.decoding[0][0] <= self.steps.made:
            _, _, sequence = heapq.heappop(self.decoding)
            self._context_tokens -= sequence.context_tokens
            self.pace.ended(sequence.request.prompt_tokens - sequence.request.cached_tokens, sequence.generated)
            self._ended(sequence)

    def _begin(self) -> None:
        if self.prefilling:
            self._begin_mixed()
        elif self.decoding:
            count = min(self.decoding[0][0] - self.steps.made, LONGEST)
            batch = len(self.decoding)
            first_s, slope_s = self._kind.costs.decode(batch, self._context_tokens)
            if self._owed_s:
                first_s, count, self._owed_s = first_s + self._owed_s, 1, 0.0
            self._stretch = Stretch(self._events.now, count, first_s, slope_s * batch)
            self._schedule(self._stretch.end_s)

    def _begin_mixed(self) -> None:
        kind, batch, pace = self._kind, len(self.decoding), self.pace
        mixed = mixed_tokens(kind.mixed_step_s, pace.decode_s(batch), pace.prefill_token_s)
        # One decoding sequence represents all: each has a token in every step.
        step_tokens = max(kind.step_tokens - max(batch - 1, 0), 16)
        budget = Budget(step_tokens, step_tokens if mixed is None else mixed, pace.prefill_token_s)
        one = [min((s for _, _, s in self.decoding), key=lambda s: s.request.priority)] if batch else []
        chosen = [(s, count) for s, count in choose([*self.prefilling, *one], budget) if s.decoding_from < 0]
        if not chosen:
            chosen = [(self.prefilling[0], min(self.prefilling[0].pending, 16))]
        self._mixed = chosen
        seconds = kind.costs.mixed_s(batch, self._context_tokens, [(count, s.prefilled) for s, count in chosen])
        pace.stepped(seconds, sum(count for _, count in chosen), batch)
        seconds, self._owed_s = seconds + self._owed_s, 0.0
        self.busy_s += seconds
        self._schedule(self._events.now + seconds)

    def validate(self) -> None:
        """Raise AssertionError if its sums do not match its sequences."""
        context = sum(s.context_tokens for _, _, s in self.decoding)
        assert abs(context - self._context_tokens) < 1e-3 * max(context, 1), (context, self._context_tokens)
