"""One request on its way through the engine.

    WAITING --admitted--> LOADING --layers near--> RUNNING --done--> FINISHED
       ^                     |                        |
       +- lost, replanned ---+------ lost, preempted -+        cancelled: from any state to FINISHED

Invariants: blocks cover positions [0, len(blocks) * chunk_tokens); the KV of the first `computed` tokens is in them;
shared blocks (with a key) lie wholly below `computed` and are never written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from contracts.errors import IllegalTransition
from contracts.kv import KvShape, chunk_keys, request_extras
from contracts.request import GenerateRequest
from worker.core.block import Block
from worker.core.turn_times import TurnTimes


class State(Enum):
    """State of a sequence."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


class Event(Enum):
    """Event that changes the state."""

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


@dataclass(frozen=True, slots=True)
class Adapter:
    """A request's LoRA adapter. number: among its model's; -1: it has none. digest: over what it computes with; enters
    the request's chunk keys."""

    number: int = -1
    digest: bytes = b""


NO_ADAPTER = Adapter()


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's tokens, keys and blocks. arrival: number that orders equal priorities. arrival_s: monotonic."""

    request: GenerateRequest
    prompt_tokens: int
    tokens: list[int]
    max_tokens: int
    arrival: int
    arrival_s: float = 0.0
    adapter: Adapter = NO_ADAPTER
    state: State = State.WAITING
    blocks: list[Block] = field(default_factory=list)
    #: Keys of the full chunks of `tokens`, computed as needed.
    keys: list[bytes] = field(default_factory=list)
    computed: int = 0
    #: Prompt tokens whose KV was found at the last admission, not computed.
    cached: int = 0
    #: Those of them whose KV was in HBM, wholly or in part.
    cached_here: int = 0
    #: The load of its missing pieces; 0: none.
    load_id: int = 0
    #: Leading chunks usable when the load ends; None until the store has answered.
    found: int | None = None
    #: Leading blocks known to have all that it reads.
    whole: int = 0
    #: Leading blocks of which it reads layers without a window only (`worker.core.windowed`).
    passed: int = 0
    #: Leading chunks that were in HBM at admission, wholly or partly.
    matched: int = 0
    #: Leading chunks to use from the cache; computing the rest is faster. None: all.
    worth: int | None = None
    #: Its session was erased while it ran: nothing is kept.
    erased: bool = False
    #: Restarts after lost pieces (see `admission.MAX_LOSSES`).
    losses: int = 0
    #: When this load last made progress, and how many pieces had arrived by then.
    heard_s: float = 0.0
    came: int = 0
    #: Order of its last step: smaller is longer ago, unique; 0 is never.
    last_chosen: int = 0
    #: Tokens computed before it was last taken off the device, and the event that did so.
    reached: int = 0
    restarted: Event | None = None
    #: When the store answered this load.
    found_s: float = 0.0
    #: Time by phase.
    times: TurnTimes = field(default_factory=TurnTimes)

    @property
    def priority(self) -> tuple[int, int]:
        """Smaller runs first."""
        return (self.request.priority, self.arrival)

    @property
    def generated(self) -> int:
        """Tokens sampled so far, including those of an earlier worker."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def spoken(self) -> bool:
        """Whether this worker has sampled a token for it."""
        return self.generated > len(self.request.resume_tokens)

    @property
    def pending(self) -> int:
        """Tokens to compute before the next can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def kept(self) -> int:
        """Estimated cached tokens, used until the caches have been asked."""
        return max(self.request.kept_tokens, self.reached)

    @property
    def uncached(self) -> int:
        """Estimated tokens to compute, before admission."""
        return max(len(self.tokens) - self.kept, 1)

    @property
    def to_compute(self) -> int:
        """Tokens to compute before its next token, estimated while it waits."""
        return self.uncached if self.state is State.WAITING else self.pending

    def extend_keys(self, salt: bytes, shape: KvShape, chunks: int) -> None:
        """Compute the keys of the first `chunks` chunks. salt: its tenant's."""
        extras = request_extras(self.request.cache_salt, self.adapter.digest)
        self.keys = chunk_keys(salt, shape, self.tokens[: chunks * shape.chunk_tokens], self.keys, extras)

    def on(self, event: Event) -> None:
        """Move to the next state. Raises IllegalTransition when there is none."""
        try:
            self.state = TRANSITIONS[(self.state, event)]
        except KeyError:
            raise IllegalTransition(
                f"request {self.request.request_id}: {event.value} while {self.state.value}"
            ) from None
