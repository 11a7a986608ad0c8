"""Write-back: full chunks are copied to the store, and a turn's manifest follows its last chunk.

Phases: offer -> grant -> copied (ok | aborted). A prompt's chunk that a step is about to complete is offered before the
step, so that its layers are copied while later ones compute. The store is told only after the step, when the result is
known to be valid. Refused chunks stay usable in HBM, are evicted first, and are offered again with the session's next
turn (no page may become unfreeable). No step waits for a save.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from contracts.ids import SessionKey
from contracts.kv import Manifest, leading
from worker.core import instructions as do
from worker.core.block import Block, SaveState
from worker.core.events import SaveCopied
from worker.core.sequence import Sequence
from worker.core.state import CoreState

#: A save without an answer after this long counts as refused, in seconds.
ANSWER_TIMEOUT_S = 10.0


@dataclass(slots=True)
class _Turn:
    manifest: Manifest
    blocks: list[Block]
    ended_s: float


@dataclass(slots=True)
class _Offered:
    blocks: list[Block]
    keys: list[bytes]
    asked_s: float
    withdrawn: bool = False


class Saving:
    """Saves under way, and manifests that wait for them.

    Invariant: a block of a save under way is WAITING (or was erased meanwhile) and pinned, until its SaveCopied.
    """

    def __init__(self, state: CoreState) -> None:
        self.state = state
        self._saves: dict[int, _Offered] = {}
        self._keys: set[bytes] = set()
        #: Saves whose store is gone: their copies do not count.
        self._orphans: set[int] = set()
        self._turns: list[_Turn] = []
        #: Number of chunks saved, and refused.
        self.saved = self.refused = 0

    @property
    def blocks(self) -> list[Block]:
        """Blocks being saved."""
        return [block for offered in self._saves.values() for block in offered.blocks]

    @property
    def busy(self) -> bool:
        """Whether a save or a manifest is pending."""
        return bool(self._saves or self._turns)

    def ahead_of(self, batch: Iterable[tuple[Sequence, int]]) -> bool:
        """Offer the prompt chunks that this step will complete, so that their layers are copied while later ones
        compute. A chunk completed by decoding is offered after the step.

        Returns whether any were offered: False also without a store or with `kv.layerwise` off.
        """
        d, offered = self.state, False
        if not (d.policy.cache and d.policy.layerwise and d.store_here):
            return False
        for s, count in batch:
            if count == 1:
                continue
            first, full = self._completed(s, s.computed, s.computed + count)
            chunks = list(zip(s.blocks[first:full], s.keys[first:full], strict=True))
            fresh = [
                (b, key)
                for b, key in chunks
                if b.save is SaveState.NONE and key not in d.cache.index and key not in self._keys
            ]
            if fresh:
                keys = [key for _, key in fresh]
                self._offer(s.request.session, [b for b, _ in fresh], keys, s.request.request_id, ahead=True)
                offered = True
        return offered

    def keep_full_chunks(self, s: Sequence, before: int) -> None:
        """Index and offer the chunks that a running sequence has filled since `before` tokens. Does nothing with the
        cache off."""
        size = self.state.shape.chunk_tokens
        if not self.state.policy.cache or before // size == s.computed // size:
            return
        first, full = self._completed(s, before, s.computed)
        fresh = []
        for block, key in zip(s.blocks[first:full], s.keys[first:full], strict=True):
            block.ready[:] = True
            entered = self.state.cache.enter(block, key)
            if block.save is not SaveState.NONE:
                continue  # offered ahead of the step
            if entered:
                fresh.append(block)
            else:
                # an equal block is cached already; that one is saved
                self.state.cache.mark(block, SaveState.BELOW)
        self.offer(s.request.session, fresh, s.request.request_id)

    def _completed(self, s: Sequence, before: int, after: int) -> tuple[int, int]:
        """The range of chunks completed between `before` and `after` tokens. Extends `s.keys` to cover them."""
        d, size = self.state, self.state.shape.chunk_tokens
        first, full = max(before // size, s.found or 0), after // size
        if full > len(s.keys):
            s.extend_keys(d.salt_of(s.request.tenant), d.shape, full)
        return min(first, full), full

    def offer(self, session: SessionKey, blocks: list[Block], request_id: str = "") -> None:
        """Offer full blocks with keys to the store; without a store they count as refused. request_id: that computed
        them."""
        if not blocks:
            return
        if not self.state.store_here:
            for block in blocks:
                self.state.cache.mark(block, SaveState.REFUSED)
            self.refused += len(blocks)
            return
        keys = [block.key for block in blocks if block.key is not None]
        self._offer(session, blocks, keys, request_id, ahead=False)

    def _offer(
        self, session: SessionKey, blocks: list[Block], keys: list[bytes], request_id: str, *, ahead: bool
    ) -> None:
        d, save_id = self.state, self.state.next_id()
        for block in blocks:
            d.cache.mark(block, SaveState.WAITING)
            d.cache.pin(block)
        self._saves[save_id] = _Offered(blocks, keys, d.now)
        self._keys.update(keys)
        pages = np.stack([b.pages for b in blocks])
        d.out.append(do.OfferSave(save_id, session, keys, pages, ahead, request_id))

    def keep(self, s: Sequence) -> int:
        """The sequence leaves the device: offer refused chunks once more.

        Returns the number of leading tokens that are saved or being saved.
        """
        full = s.blocks[: s.computed // self.state.shape.chunk_tokens]
        if self.state.store_here:
            self.offer(
                s.request.session,
                [b for b in full if b.save is SaveState.REFUSED and b.complete and not b.lost and b.key],
                s.request.request_id,
            )
        return leading(b.save in (SaveState.BELOW, SaveState.WAITING) for b in full) * self.state.shape.chunk_tokens

    @property
    def expires_in_s(self) -> float:
        """Seconds until the oldest unanswered save is given up; infinite if there is none."""
        waiting = (offered.asked_s for offered in self._saves.values() if not offered.withdrawn)
        return next(waiting, math.inf) + ANSWER_TIMEOUT_S - self.state.now

    def expire(self) -> None:
        """Give up saves without an answer in time, so that no page stays pinned. Late grants are declined."""
        now = self.state.now
        for save_id, offered in self._saves.items():
            if now - offered.asked_s < ANSWER_TIMEOUT_S:
                break
            if not offered.withdrawn:
                offered.withdrawn = True
                self.state.fell_silent()
                self.state.out.append(do.WithdrawSave(save_id))

    def copied(self, done: SaveCopied) -> None:
        """A save's copies have ended: tell the store which are valid, and unpin the blocks."""
        offered = self._saves.pop(done.save_id)
        known = done.save_id not in self._orphans
        self._orphans.discard(done.save_id)
        self._keys.difference_update(offered.keys)
        blocks = offered.blocks
        # A void step, or a sequence that ended before the chunk was full, leaves invalid copies.
        good = dict.fromkeys(
            index for index in done.ok if known and blocks[index].complete and blocks[index].save is SaveState.WAITING
        )
        bad = [index for index in [*done.ok, *done.failed] if index not in good]
        if good or bad:
            self.state.out.append(do.Saved(done.save_id, list(good), bad))
        below = {*good, *(done.held if known else [])}
        for index, block in enumerate(blocks):
            self.state.cache.unpin(block)
            if not block.complete:
                self._settle(block, SaveState.NONE)
            else:
                self._settle(block, SaveState.BELOW if index in below else SaveState.REFUSED)
        self._send_turns()

    def turn_ended(self, manifest: Manifest, blocks: list[Block], request_id: str = "") -> None:
        """Send the manifest once its blocks are saved; blocks refused before are offered once more."""
        refused = [b for b in blocks if b.save is SaveState.REFUSED and b.complete and not b.lost and b.key]
        self.offer(manifest.session, refused, request_id)
        self._turns.append(_Turn(manifest, blocks, self.state.now))
        self._send_turns()

    def store_down(self) -> None:
        """The store is gone: no offer will be granted. Copies under way finish into memory that is no longer read."""
        self._orphans = set(self._saves)
        self.state.out.append(do.WithdrawAllSaves())

    def _settle(self, block: Block, save: SaveState) -> None:
        if save is SaveState.REFUSED:
            self.refused += 1
        elif save is SaveState.BELOW:
            self.saved += 1
        self.state.cache.mark(block, save)
        self.state.cache.settle(block)

    def _send_turns(self) -> None:
        waiting = []
        for turn in self._turns:
            if any(b.save is SaveState.WAITING for b in turn.blocks):
                waiting.append(turn)
                continue
            below = next((i for i, b in enumerate(turn.blocks) if b.save is not SaveState.BELOW), len(turn.blocks))
            turn.manifest.keys = turn.manifest.keys[:below]
            turn.manifest.tokens = below * self.state.shape.chunk_tokens
            if below:
                self.state.out.append(do.TurnEnded(turn.manifest, turn.ended_s))
        self._turns = waiting
