"""A request on a node of another system, with the names that the worker's cores know."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.simulate.request import Request
from worker.core.batching import due_s
from worker.core.pace import Pace


class Steps:
    """How many steps of decoding a node has made, from a number on that no answer is as long as: one that came from another node has
    decoded here, as it were, since before the first."""

    __slots__ = ("made",)

    def __init__(self) -> None:
        self.made = 1 << 30


@dataclass(slots=True, eq=False)
class Running:
    """See the module. Decodes once `decoding_from` is not negative."""

    request: Request
    arrival: int
    arrival_s: float
    steps: Steps
    max_tokens: int
    need_bytes: float
    #: Of the prompt: computed here so far or found; chunks that are found or coming, which is known when it comes.
    prefilled: int = 0
    found: int | None = None
    kept: int = 0
    decoding_from: int = -1
    last_chosen: int = 0
    #: Ways that still bring what it waits for; and whether it has room in HBM.
    awaits: int = 0
    admitted: bool = False
    load_tokens: int = 0

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return 0 if self.decoding_from < 0 else 1 + self.steps.made - self.decoding_from

    @property
    def tokens(self) -> range:
        """As many as it has."""
        return range(self.request.prompt_tokens + self.generated)

    @property
    def computed(self) -> int:
        """Tokens whose KV is there."""
        return self.prefilled if self.decoding_from < 0 else self.request.prompt_tokens + self.generated - 1

    @property
    def pending(self) -> int:
        """Tokens to run before the next can be sampled."""
        return self.request.prompt_tokens - self.prefilled if self.decoding_from < 0 else 1

    @property
    def context_tokens(self) -> int:
        """Tokens that its next step of decoding reads."""
        return self.request.prompt_tokens + self.generated

    def order(self, kept_tokens: int, pace: Pace, hbm_tokens: int, running: int) -> tuple[int, float, int]:
        """Smaller is admitted first, as the engine does it, but decided once, when it comes. kept_tokens: of its prompt, cached."""
        alone_s = pace.device_s(self, self.request.prompt_tokens - kept_tokens, hbm_tokens, pace.decode_s(max(running, 1)))
        return (self.request.priority, due_s(self, alone_s), self.arrival)
