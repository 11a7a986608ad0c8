"""What the scheduler side knows of requests, and of their loads and saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from contracts.ids import SessionKey


@dataclass(frozen=True)
class Turn:
    """A request as far as its KV goes. salt: the tenant's. cacheable: its KV depends on nothing but tokens and
    extras. cache_salt: vLLM's. warms: it brings a hinted session into vLLM's own cache, and is no turn of it."""

    request_id: str
    session: SessionKey
    salt: bytes
    priority: int = 0
    source_nodes: tuple[str, ...] = ()
    extras: Mapping[int, bytes] = field(default_factory=dict)
    cacheable: bool = True
    cache_salt: str = ""
    warms: bool = False


@dataclass
class Load:
    """first: the first chunk, counted in the prompt. found: chunks that the store can bring, None: it has not said;
    announced: before any failed. near: all of them are in the arena. due_s: by chunk, when the store expected it there.
    answered: chunks of which vLLM was told, None: it was not. begins: the first chunk that vLLM had not, when it was
    last told. usable: of the found chunks, those that came, None: not all that will come has. gone: the store is, and
    nothing comes."""

    load_id: int
    first: int
    wanted: int
    asked_s: float
    found: int | None = None
    announced: int = 0
    near: bool = False
    sources: tuple[int, ...] = ()
    due_s: tuple[float, ...] = ()
    answered: int | None = None
    begins: int = 0
    under_way: bool = False
    found_s: float = 0.0
    usable: int | None = None
    gone: bool = False

    def settle(self) -> None:
        """What came is in the arena, and nothing else will come."""
        if self.usable is not None and self.found is not None:
            self.found, self.near, self.sources, self.due_s = min(self.found, self.usable), True, (), ()
            if self.answered is not None:
                self.answered = min(self.answered, self.found)


@dataclass
class Request:
    turn: Turn
    keys: list[bytes] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    load: Load | None = None
    #: The store was asked, and what it said was used or refused.
    asked: bool = False
    #: Leading chunks that were offered, or came from the store.
    saved: int = 0
    #: Leading chunks whose blocks are remembered.
    noted: int = 0
    computed: int = 0
    #: Tokens of the prompt.
    length: int = 0
    saves: set[int] = field(default_factory=set)
    erased: bool = False

    @property
    def computes(self) -> bool:
        """Whether it has blocks, and no load is on its way to them that a step would not wait for."""
        load = self.load
        return bool(self.blocks) and (load is None or not load.under_way or load.near)


@dataclass
class Save:
    """waits: ranks that have not copied. ok: chunks that every rank so far has copied."""

    request_id: str
    count: int
    waits: int
    ok: set[int] | None = None
    granted: bool = False
