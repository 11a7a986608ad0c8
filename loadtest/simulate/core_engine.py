"""A worker's engine in virtual time: the production core (`worker.core.engine_core`), whose steps take what a node's costs say.

A stretch of steps in which the core decides nothing is one event; whatever comes meanwhile cuts it at the end of the step under way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from loadtest.simulate.costs import NodeKind
from loadtest.simulate.events import Events
from worker.core import events as ev
from worker.core import instructions as do
from worker.core.engine_core import EngineCore
from worker.core.sequence import Sequence

#: Steps in one go at most.
_STRETCH = 256


class Tokens(Collection[int]):
    """So many tokens; which ones nobody asks."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(range(self._count))

    def __contains__(self, token: object) -> bool:
        return False

    def append(self, token: int) -> None:
        """One more."""
        self._count += 1


@dataclass(slots=True)
class _Stretch:
    """The steps under way: how many, when they began, what the first takes, and by how much each takes longer than the one before."""

    step: do.Step
    start_s: float
    count: int
    first_s: float
    growth_s: float

    def seconds(self, count: int) -> float:
        return count * self.first_s + self.growth_s * count * (count - 1) / 2

    def over(self, seconds: float) -> int:
        """How many are over after so long."""
        a, b = self.growth_s / 2, self.first_s - self.growth_s / 2
        found = (math.sqrt(b * b + 4 * a * seconds) - b) / (2 * a) if a > 1e-15 else seconds / b
        return min(int(found + 1e-9), self.count)


class CoreEngine:
    """See the module. execute: does what the core asks for. spoke, ended: told of each first token, and of each complete answer. is_here:
    whether what a step waits for has come; None: it never will."""

    def __init__(
        self,
        events: Events,
        kind: NodeKind,
        core: EngineCore,
        *,
        execute: Callable[[do.Instruction], None],
        spoke: Callable[[Sequence], None],
        ended: Callable[[Sequence], None],
        is_here: Callable[[do.Coming], bool | None],
    ) -> None:
        self._events, self._kind, self.core = events, kind, core
        self._execute, self._spoke, self._ended, self._is_here = execute, spoke, ended, is_here
        self.busy_s = 0.0
        self.steps = 0
        self._stretch: _Stretch | None = None
        #: It is over but for KV that it waits for.
        self._held = False
        self._version = 0
        self._turn_s = math.inf
        #: What follows the step under way.
        self.after_step: list[Callable[[], None]] = []
        costs, pace = kind.costs, core.pace
        pace.prefill_token_s = costs.prefill_s(512, 0) / 512
        pace.expect_decodes({batch: costs.decode(batch, 1024.0 * batch)[0] for batch in (1, 8)})
        pace.request_s = costs.prefill_s(256, 0) + 128 * pace.marginal_token_s
        pace.output_tokens = 128.0

    @property
    def stepping(self) -> bool:
        """A step is under way."""
        return self._stretch is not None

    def tell(self, event: ev.Event) -> None:
        """Something came."""
        self.core.handle(event, self._events.now)
        self._act()
        if self._stretch is None:
            self._turn_at(self._events.now)
        elif self._held:
            self._over(self._version)
        elif self._stretch.count > 1 and self.core.interrupted(self._stretch.step):
            self._cut()

    def _act(self) -> None:
        while asked := self.core.take():
            for instruction in asked:
                self._execute(instruction)

    def _turn_at(self, time_s: float) -> None:
        if time_s < self._turn_s:
            self._turn_s = time_s
            self._events.at(time_s, lambda: self._turn(time_s))

    def _turn(self, time_s: float) -> None:
        if time_s != self._turn_s:
            return
        self._turn_s = math.inf
        if self._stretch is not None:
            return
        step = self.core.turn(self._events.now)
        self._act()
        if step is not None:
            self._begin(step)
        elif self.core.going_on:
            self._turn_at(self._events.now)
        elif math.isfinite(due_s := self.core.due_in_s(self._events.now)):
            self._turn_at(self._events.now + max(due_s, 1e-6))

    def _begin(self, step: do.Step) -> None:
        costs, now = self._kind.costs, self._events.now
        decoding = [s for s, count in step.batch if count == 1]
        context = float(sum(len(s.tokens) for s in decoding))
        if len(decoding) == len(step.batch):
            first_s, slope_s = costs.decode(len(decoding), context)
            self._stretch = _Stretch(step, now, min(self.core.quiet_steps(step), _STRETCH), first_s, slope_s * len(decoding))
        else:
            prompts = [(count, s.computed) for s, count in step.batch if count > 1]
            self._stretch = _Stretch(step, now, 1, costs.mixed_s(len(decoding), context, prompts), 0.0)
        self._schedule()

    def _schedule(self) -> None:
        stretch = self._stretch
        assert stretch is not None
        self._version += 1
        version = self._version
        self._events.at(stretch.start_s + stretch.seconds(stretch.count), lambda: self._over(version))

    def _cut(self) -> None:
        stretch = self._stretch
        assert stretch is not None
        count = min(stretch.over(self._events.now - stretch.start_s) + 1, stretch.count)
        if count < stretch.count:
            stretch.count = count
            self._schedule()

    def _over(self, version: int) -> None:
        stretch = self._stretch
        if version != self._version or stretch is None:
            return
        step, self._held = stretch.step, False
        void = set[str]()
        for request_id, coming in step.coming.items():
            here = [self._is_here(each) for each in coming]
            if None in here:
                void.add(request_id)
            elif not all(here):
                self._held = True
        if self._held:
            return
        self._stretch = None
        self.busy_s += self._events.now - stretch.start_s
        self.steps += stretch.count
        self._stepped(step, stretch, void)
        after, self.after_step = self.after_step, []
        for follow in after:
            follow()
        self._turn_at(self._events.now)

    def _stepped(self, step: do.Step, stretch: _Stretch, void: set[str]) -> None:
        spoke, ended = [], []
        tokens: dict[str, int] = {}
        for s, count in step.batch:
            request_id = s.request.request_id
            if request_id in void or s.computed + count < len(s.tokens):
                continue
            tokens[request_id] = 0
            if not s.generated:
                spoke.append(s)
            if s.generated + stretch.count >= s.max_tokens:
                ended.append(s)
        seconds = stretch.seconds(stretch.count) / stretch.count
        done = ev.Stepped(
            step.batch, seconds, tokens, ended={s.request.request_id for s in ended}, void=frozenset(void), steps=stretch.count
        )
        self.core.handle(done, self._events.now)
        self._act()
        for s in spoke:
            self._spoke(s)
        for s in ended:
            self._ended(s)
