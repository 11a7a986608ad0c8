"""One request on its way through the engine.

    WAITING --admitted--> LOADING --layers near--> RUNNING --done--> FINISHED
       ^                     |                        |
       +- lost, replanned ---+------ lost, preempted -+        cancelled: from any state to FINISHED

Invariants: blocks cover positions [0, len(blocks) * chunk_tokens); `computed` tokens have their KV in them; what is shared
with others (keyed blocks) lies wholly below `computed` and is never written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from contracts.errors import IllegalTransition
from contracts.request import GenerateRequest
from worker.core.hbm import Block
from worker.core.turn_times import TurnTimes


class State(Enum):
    """Where the sequence is."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


class Event(Enum):
    """What moves it."""

    ADMITTED = "admitted"
    LAYERS_NEAR = "layers near"
    LOST = "lost"
    PREEMPTED = "preempted"
    REPLANNED = "replanned"
    DONE = "done"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.WAITING, Event.ADMITTED): State.LOADING,
    (State.WAITING, Event.DONE): State.FINISHED,
    (State.LOADING, Event.LAYERS_NEAR): State.RUNNING,
    (State.LOADING, Event.LOST): State.WAITING,
    (State.LOADING, Event.PREEMPTED): State.WAITING,
    (State.LOADING, Event.REPLANNED): State.WAITING,
    (State.LOADING, Event.DONE): State.FINISHED,
    (State.RUNNING, Event.LOST): State.WAITING,
    (State.RUNNING, Event.PREEMPTED): State.WAITING,
    (State.RUNNING, Event.DONE): State.FINISHED,
}


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's tokens, keys and blocks. `arrival` orders equal priorities; smaller is earlier. `arrival_s`: monotonic."""

    request: GenerateRequest
    prompt_tokens: int
    tokens: list[int]
    max_tokens: int
    arrival: int
    arrival_s: float = 0.0
    state: State = State.WAITING
    blocks: list[Block] = field(default_factory=list)
    #: Chunk keys of the full chunks of `tokens`, as far as they have been needed.
    keys: list[bytes] = field(default_factory=list)
    computed: int = 0
    #: Prompt tokens whose KV was found, not computed, at the (last) admission.
    cached: int = 0
    #: The load that brings what is missing; 0: none under way.
    load_id: int = 0
    #: Leading chunks that can be used once `load_id` is done; None while the store has not said.
    found: int | None = None
    #: Leading blocks that have all their layers, as far as was looked.
    whole: int = 0
    #: Leading chunks that were in HBM, wholly or partly, at admission.
    matched: int = 0
    #: Chunks that are worth having from the cache; what is behind them is sooner computed. None: all.
    worth: int | None = None
    #: Its session was erased while it ran: nothing of it is kept.
    erased: bool = False
    #: Restarts after lost pieces; bounds how often the store is asked.
    losses: int = 0
    #: When the store was last heard of for this load, and how many pieces had come by then.
    heard_s: float = 0.0
    came: int = 0
    #: When it was last chosen for a step: smaller is longer ago, 0 is never. No two sequences share another value.
    last_chosen: int = 0
    #: Tokens that have had their KV before it was last taken off the device, and by what.
    reached: int = 0
    restarted: Event | None = None
    #: When the store said what it brings.
    found_s: float = 0.0
    #: What its time goes into.
    times: TurnTimes = field(default_factory=TurnTimes)

    @property
    def priority(self) -> tuple[int, int]:
        """Smaller runs first."""
        return (self.request.priority, self.arrival)

    @property
    def generated(self) -> int:
        """Tokens sampled so far, those of a former worker included."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def spoken(self) -> bool:
        """It has had a new token here."""
        return self.generated > len(self.request.resume_tokens)

    @property
    def pending(self) -> int:
        """Tokens that must be run before the next can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def kept(self) -> int:
        """Tokens whose KV is thought to be kept somewhere, before the caches were asked."""
        return max(self.request.kept_tokens, self.reached)

    @property
    def uncached(self) -> int:
        """Tokens that it will have to run, as far as that is known before it is admitted."""
        return max(len(self.tokens) - self.kept, 1)

    def on(self, event: Event) -> None:
        """Move to the next state. Raises IllegalTransition when there is none."""
        try:
            self.state = TRANSITIONS[(self.state, event)]
        except KeyError:
            raise IllegalTransition(f"request {self.request.request_id}: {event.value} while {self.state.value}") from None
