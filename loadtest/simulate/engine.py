"""A worker's engine in virtual time: the production core (`worker.core.engine_core`), with step times from a node's
costs.

A stretch of steps in which the core decides nothing is one event. An arrival cuts it at the end of its current step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass

from loadtest.simulate.costs import NodeKind, seed
from loadtest.simulate.events import Events
from loadtest.simulate.stretch import LONGEST, Stretch
from worker.core import events as ev
from worker.core import instructions as do
from worker.core.engine_core import EngineCore
from worker.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Shell:
    """The rest of an engine's model. execute: carries out the core's instructions. spoke, ended: called at each first
    token and each complete answer. is_here: whether a load that a step needs has arrived; None: it never will. told:
    called with the sequences that got tokens, and how many each."""

    execute: Callable[[do.Instruction], None]
    spoke: Callable[[Sequence], None]
    ended: Callable[[Sequence], None]
    is_here: Callable[[do.Coming], bool | None]
    told: Callable[[list[Sequence], int], None] = lambda sequences, count: None


class Engine:
    """See the module. Takes its own turns: the device is its own."""

    def __init__(self, events: Events, kind: NodeKind, core: EngineCore, shell: Shell) -> None:
        self._events, self._kind, self.core, self._shell = events, kind, core, shell
        self.busy_s = 0.0
        self.steps = 0
        #: The current step, and the stretch of equal steps that it begins.
        self._step: do.Step | None = None
        self._stretch = Stretch(0.0, 0, 0.0)
        #: The step is computed, but waits for KV.
        self._held = False
        self._version = 0
        self._turn_s = math.inf
        #: Called after the current step.
        self.after_step: list[Callable[[], None]] = []
        #: Seconds of the device used by something else (a codec), added to the next step.
        self._owed_s = 0.0
        #: Most steps of a stretch.
        self._longest = LONGEST
        seed(core.pace, kind.costs)

    @property
    def stepping(self) -> bool:
        """Whether a step is running."""
        return self._step is not None

    def tell(self, event: ev.Event) -> None:
        """Give the core an event."""
        self.core.handle(event, self._events.now)
        self._act()
        if self._step is None:
            self._wants_turn()
        elif self._held:
            self._over(self._version)
        elif self._stretch.count > 1 and self.core.interrupted() and self._stretch.cut(self._events.now):
            self._schedule()

    def disturb(self, seconds: float) -> None:
        """Something else occupies the device for `seconds`: the next step takes that much longer."""
        self._owed_s += seconds

    def catch_up(self) -> None:
        """Report the finished steps of the current stretch to the core."""
        if (
            self._step is not None
            and self._stretch.count > 1
            and (over := self._stretch.over(self._events.now)) < self._stretch.count
        ):
            self._stepped(self._step, over, frozenset(), 0.0)

    def _act(self) -> None:
        while asked := self.core.take():
            for instruction in asked:
                self._shell.execute(instruction)

    def _wants_turn(self) -> None:
        """There is news, or a step is over."""
        self._turn_at(self._events.now)

    def _turn_at(self, time_s: float) -> None:
        if time_s < self._turn_s:
            self._turn_s = time_s
            self._events.at(time_s, lambda: self._turn(time_s))

    def _turn(self, time_s: float) -> None:
        if time_s != self._turn_s:
            return
        self._turn_s = math.inf
        if self._step is not None:
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
        prompts = [(count, s.computed) for s, count in step.batch if count > 1]
        decodes = len(step.batch) - len(prompts)
        context = float(sum(len(s.tokens) for s, count in step.batch if count == 1))
        self._step, count = step, 1
        if prompts:
            self._stretch = Stretch(now, 1, costs.mixed_s(decodes, context, prompts))
        else:
            first_s, slope_s = costs.decode(decodes, context)
            count = min(self.core.quiet_steps(step), LONGEST)
            self._stretch = Stretch(now, min(count, self._longest), first_s, slope_s * decodes)
            if self._stretch.seconds(self._stretch.count) > (quiet_s := self.core.quiet_s):
                self._stretch.cut(now + quiet_s)
        if self._owed_s:
            self._stretch.count, self._stretch.first_s, self._owed_s = 1, self._stretch.first_s + self._owed_s, 0.0
        self._begun(count)
        self._schedule()

    def _begun(self, quiet: int) -> None:
        """A step has begun, and with it so many that are alike."""

    def _schedule(self) -> None:
        self._version += 1
        version = self._version
        self._events.at(self._stretch.end_s, lambda: self._over(version))

    def _over(self, version: int) -> None:
        step = self._step
        if version != self._version or step is None:
            return
        void, self._held = set[str](), False
        for request_id, coming in step.coming.items():
            here = [self._shell.is_here(each) for each in coming]
            if None in here:
                void.add(request_id)
            elif not all(here):
                self._held = True
        if self._held:
            return
        stalled_s = self._events.now - self._stretch.end_s
        self._step = None
        self._stepped(step, self._stretch.count, void, stalled_s)
        after, self.after_step = self.after_step, []
        for follow in after:
            follow()
        self._wants_turn()

    def _stepped(self, step: do.Step, steps: int, void: Set[str], stalled_s: float) -> None:
        """Report `steps` finished steps of the stretch; the last one also waited `stalled_s` for KV."""
        if not steps:
            return
        seconds = self._stretch.seconds(steps) + stalled_s
        self._stretch.pass_over(steps)
        self.busy_s += seconds
        self.steps += steps
        first_tokens, told, ended = [], [], []
        tokens: dict[str, int] = {}
        for s, count in step.batch:
            request_id = s.request.request_id
            if request_id in void or s.computed + count < len(s.tokens):
                continue
            tokens[request_id] = 0
            told.append(s)
            if not s.generated:
                first_tokens.append(s)
            if s.generated + steps >= s.max_tokens:
                ended.append(s)
        over = {s.request.request_id for s in ended}
        self.core.handle(
            ev.Stepped(
                step.batch, seconds / steps, tokens, ended=over, void=frozenset(void), stalled_s=stalled_s, steps=steps
            ),
            self._events.now,
        )
        self._act()
        for s in first_tokens:
            self._shell.spoke(s)
        self._shell.told(told, steps)
        for s in ended:
            self._shell.ended(s)
