"""Which blocks belong to which session's cache, so that an erasure costs what the session has and not all of HBM.

Invariant: of a block that is not lost, `Block.sessions` and this agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from contracts.ids import SessionKey
from worker.core.block import Block

#: Sessions that a block remembers; beyond, the earliest are forgotten.
MOST_OWNERS = 32


class Owners:
    """See the module. Only this changes `Block.sessions`."""

    def __init__(self) -> None:
        self._blocks: dict[SessionKey, dict[int, Block]] = {}  #: by session, its blocks by their `id`

    def add(self, block: Block, session: SessionKey) -> None:
        """The block belongs to this session's cache too; the session is its latest."""
        block.sessions.pop(session, None)
        block.sessions[session] = None
        if not block.lost:
            self._blocks.setdefault(session, {})[id(block)] = block
        if len(block.sessions) > MOST_OWNERS:
            self._remove(block, next(iter(block.sessions)))

    def of(self, sessions: Set[SessionKey]) -> list[Block]:
        """The blocks of any of these sessions."""
        return list({at: block for session in sessions for at, block in self._blocks.get(session, {}).items()}.values())

    def leave(self, block: Block, sessions: Set[SessionKey]) -> None:
        """The block no longer belongs to these sessions' caches."""
        for session in [session for session in block.sessions if session in sessions]:
            self._remove(block, session)

    def lost(self, block: Block) -> None:
        """The block is lost. It still knows its sessions."""
        for session in block.sessions:
            self._drop(block, session)

    def _remove(self, block: Block, session: SessionKey) -> None:
        del block.sessions[session]
        self._drop(block, session)

    def _drop(self, block: Block, session: SessionKey) -> None:
        blocks = self._blocks.get(session, {})
        blocks.pop(id(block), None)
        if not blocks:
            self._blocks.pop(session, None)

    def validate(self, blocks: Iterable[Block]) -> None:
        """Raise AssertionError when the invariant does not hold. blocks: some that are there."""
        for block in blocks:
            assert block.lost or all(id(block) in self._blocks[session] for session in block.sessions)
        for session, mine in self._blocks.items():
            assert mine and all(session in block.sessions and not block.lost for block in mine.values())
