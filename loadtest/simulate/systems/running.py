"""A request on a node of another system, with the attributes that the worker's cores use."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.simulate.request import Request
from worker.core.batching import due_s
from worker.core.pace import Pace


class Steps:
    """A node's count of decode steps. Starts above any answer's length, so that for a migrated request the step at
    which it would have begun decoding here is positive."""

    __slots__ = ("made",)

    def __init__(self) -> None:
        self.made = 1 << 30


@dataclass(slots=True, eq=False)
class Running:
    """See the module. decoding_from: step of its first token; negative: not decoding yet."""

    request: Request
    arrival: int
    arrival_s: float
    steps: Steps
    max_tokens: int
    need_bytes: float
    #: Prompt tokens computed or cached so far; chunks cached or being fetched.
    prefilled: int = 0
    found: int | None = None
    kept: int = 0
    decoding_from: int = -1
    last_chosen: int = 0
    #: Number of fetches that it waits for; whether it has room in HBM.
    awaits: int = 0
    admitted: bool = False
    load_tokens: int = 0

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return 0 if self.decoding_from < 0 else 1 + self.steps.made - self.decoding_from

    @property
    def tokens(self) -> range:
        """Stands for its tokens; only the length matters."""
        return range(self.request.prompt_tokens + self.generated)

    @property
    def computed(self) -> int:
        """Number of tokens with KV."""
        return self.prefilled if self.decoding_from < 0 else self.request.prompt_tokens + self.generated - 1

    @property
    def pending(self) -> int:
        """Tokens to run before the next can be sampled."""
        return self.request.prompt_tokens - self.prefilled if self.decoding_from < 0 else 1

    @property
    def context_tokens(self) -> int:
        """Tokens that its next decode step reads."""
        return self.request.prompt_tokens + self.generated

    def order(self, kept_tokens: int, pace: Pace, hbm_tokens: int, running: int) -> tuple[int, float, int]:
        """Admission order, smaller first: as in our engine, but fixed at arrival. kept_tokens: cached prompt tokens."""
        alone_s = pace.device_s(
            self, self.request.prompt_tokens - kept_tokens, hbm_tokens, pace.decode_s(max(running, 1))
        )
        return (self.request.priority, due_s(self, alone_s), self.arrival)
