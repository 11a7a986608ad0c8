"""Write-back: full chunks go down to the store, and a turn's manifest follows its last chunk.

Two phases: offer -> grant -> copied (ok | aborted). A chunk of a prompt that a step is about to complete is offered before it, so that its
layers are copied while later ones compute; whether what was computed is good is known after the step, and nothing is told to the
store before that. Chunks that the store refuses stay usable in HBM, are dropped first, and are offered again with the session's
next turn (DESIGN section 6: no page may become unfreeable). Nothing here is waited for by a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from contracts.ids import SessionKey
from contracts.kv import Manifest, chunk_keys, leading
from worker.core import instructions as do
from worker.core.events import SaveCopied
from worker.core.hbm import Block, Save
from worker.core.sequence import Sequence
from worker.core.state import CoreState

#: A save that the store has not answered after this long is taken for refused, in seconds.
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
        #: Saves whose store went away meanwhile: nobody will know of the copies.
        self._orphans: set[int] = set()
        self._turns: list[_Turn] = []
        #: Chunks that went down, and chunks that the store would not take.
        self.saved = self.refused = 0

    @property
    def blocks(self) -> list[Block]:
        """On their way down."""
        return [block for offered in self._saves.values() for block in offered.blocks]

    @property
    def busy(self) -> bool:
        """Something is on its way down."""
        return bool(self._saves or self._turns)

    def ahead_of(self, batch: Iterable[tuple[Sequence, int]]) -> bool:
        """Offer the chunks of prompts that a step of so many tokens of each sequence completes, so that their layers go down while later
        ones compute. A chunk that is completed by decoding is offered after the step: it is one of many steps, and short.

        False when there are none, as far as is known now, or no store, or with `kv.layerwise` off.
        """
        d, offered = self.state, False
        if not (d.policy.cache and d.policy.layerwise and d.store_here):
            return False
        for s, count in batch:
            if count == 1:
                continue
            first, full = self._completed(s, s.computed, s.computed + count)
            chunks = list(zip(s.blocks[first:full], s.keys[first:full], strict=True))
            fresh = [(b, key) for b, key in chunks if b.save is Save.NONE and key not in d.cache.index and key not in self._keys]
            if fresh:
                self._offer(s.request.session, [b for b, _ in fresh], [key for _, key in fresh], ahead=True)
                offered = True
        return offered

    def keep_full_chunks(self, s: Sequence, before: int) -> None:
        """Name the chunks of a running sequence that are full now and were not at `before` tokens, and offer those that were not yet.

        Nothing with the cache off.
        """
        size = self.state.shape.chunk_tokens
        if not self.state.policy.cache or before // size == s.computed // size:
            return
        first, full = self._completed(s, before, s.computed)
        fresh = []
        for block, key in zip(s.blocks[first:full], s.keys[first:full], strict=True):
            block.ready[:] = True
            entered = self.state.cache.enter(block, key)
            if block.save is not Save.NONE:
                continue  # offered ahead of the step
            if entered:
                fresh.append(block)
            else:
                self.state.cache.mark(block, Save.BELOW)  # an equal block is cached already, and is the one that goes down
        self.offer(s.request.session, fresh)

    def _completed(self, s: Sequence, before: int, after: int) -> tuple[int, int]:
        """The sequence's chunks, from and to, that are completed between so many tokens; their keys are known afterwards."""
        d, size = self.state, self.state.shape.chunk_tokens
        first, full = max(before // size, s.found or 0), after // size
        if full > len(s.keys):
            s.keys = chunk_keys(d.salt_of(s.request.tenant), d.shape, s.tokens[: full * size], s.keys)
        return min(first, full), full

    def offer(self, session: SessionKey, blocks: list[Block]) -> None:
        """Offer full, keyed blocks to the store; without a store they count as refused."""
        if not blocks:
            return
        if not self.state.store_here:
            for block in blocks:
                self.state.cache.mark(block, Save.REFUSED)
            self.refused += len(blocks)
            return
        self._offer(session, blocks, [block.key for block in blocks if block.key is not None], ahead=False)

    def _offer(self, session: SessionKey, blocks: list[Block], keys: list[bytes], *, ahead: bool) -> None:
        d, save_id = self.state, self.state.next_id()
        for block in blocks:
            d.cache.mark(block, Save.WAITING)
            d.cache.pin(block)
        self._saves[save_id] = _Offered(blocks, keys, d.now)
        self._keys.update(keys)
        d.out.append(do.OfferSave(save_id, session, keys, np.stack([b.pages for b in blocks]), ahead))

    def keep(self, s: Sequence) -> int:
        """The sequence leaves the device: what was refused is offered once more.

        Returns how many of its leading tokens are below or on their way there.
        """
        full = s.blocks[: s.computed // self.state.shape.chunk_tokens]
        if self.state.store_here:
            self.offer(s.request.session, [b for b in full if b.save is Save.REFUSED and b.complete and not b.lost and b.key])
        return leading(b.save in (Save.BELOW, Save.WAITING) for b in full) * self.state.shape.chunk_tokens

    @property
    def expires_in_s(self) -> float:
        """Seconds until the oldest save that was not answered is given up; infinite: there is none."""
        waiting = (offered.asked_s for offered in self._saves.values() if not offered.withdrawn)
        return next(waiting, math.inf) + ANSWER_TIMEOUT_S - self.state.now

    def expire(self) -> None:
        """Saves that the store has not answered for long are given up: no page waits for ever. A late answer is declined."""
        now = self.state.now
        for save_id, offered in self._saves.items():
            if now - offered.asked_s < ANSWER_TIMEOUT_S:
                break
            if not offered.withdrawn:
                offered.withdrawn = True
                self.state.fell_silent()
                self.state.out.append(do.WithdrawSave(save_id))

    def copied(self, done: SaveCopied) -> None:
        """The save is over as far as this side goes: tell the store which copies hold, and let go of the blocks."""
        offered = self._saves.pop(done.save_id)
        known = done.save_id not in self._orphans
        self._orphans.discard(done.save_id)
        self._keys.difference_update(offered.keys)
        blocks = offered.blocks
        # A step that was void, or a sequence that ended before the chunk was whole, leaves copies that nobody may have.
        good = [index for index in done.ok if known and blocks[index].complete and blocks[index].save is Save.WAITING]
        bad = [index for index in [*done.ok, *done.failed] if index not in good]
        if good or bad:
            self.state.out.append(do.Saved(done.save_id, good, bad))
        below = {*good, *(done.held if known else [])}
        for index, block in enumerate(blocks):
            self.state.cache.unpin(block)
            if not block.complete:
                self._settle(block, Save.NONE)
            else:
                self._settle(block, Save.BELOW if index in below else Save.REFUSED)
        self._send_turns()

    def turn_ended(self, manifest: Manifest, blocks: list[Block]) -> None:
        """Send the manifest once its blocks are below; blocks that were refused before are offered once more."""
        self.offer(manifest.session, [b for b in blocks if b.save is Save.REFUSED and b.complete and not b.lost and b.key])
        self._turns.append(_Turn(manifest, blocks, self.state.now))
        self._send_turns()

    def store_down(self) -> None:
        """Nothing offered will be granted. Copies under way end by themselves, into memory nobody reads."""
        self._orphans = set(self._saves)
        self.state.out.append(do.WithdrawAllSaves())

    def _settle(self, block: Block, save: Save) -> None:
        if save is Save.REFUSED:
            self.refused += 1
        elif save is Save.BELOW:
            self.saved += 1
        self.state.cache.mark(block, save)
        self.state.cache.settle(block)

    def _send_turns(self) -> None:
        waiting = []
        for turn in self._turns:
            if any(b.save is Save.WAITING for b in turn.blocks):
                waiting.append(turn)
                continue
            below = next((i for i, b in enumerate(turn.blocks) if b.save is not Save.BELOW), len(turn.blocks))
            turn.manifest.keys = turn.manifest.keys[:below]
            turn.manifest.tokens = below * self.state.shape.chunk_tokens
            if below:
                self.state.out.append(do.TurnEnded(turn.manifest, turn.ended_s))
        self._turns = waiting
