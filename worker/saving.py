"""Write-back: full chunks go to the store right after the step that filled them, off the critical path.

offer -> grant -> copy (the loader's thread) -> done, two-phase; a session's manifest follows its last chunk, so that what a
manifest names can be found. Never waits: what the store refuses is dropped first and recomputed when wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

from contracts.convert import manifest_to_wire, session_to_wire
from contracts.ids import SessionKey
from contracts.kv import Manifest, chunk_keys, leading
from contracts.v1 import kvstore_pb2
from runtime import telemetry
from worker.core.hbm import Block, Save
from worker.core.sequence import Sequence
from worker.device import Device
from worker.loads import SaveCopied

log = telemetry.logger("worker.saving")
#: A save that the store has not answered after this long is taken for refused, in seconds.
ANSWER_TIMEOUT_S = 10.0


@dataclass(slots=True)
class _Turn:
    manifest: Manifest
    blocks: list[Block]


class Saving:
    """Saves under way, and manifests that wait for them. Engine thread only."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._saves: dict[int, list[Block]] = {}
        #: When those of them were offered that the store has not answered yet, oldest first.
        self._asked_s: dict[int, float] = {}
        #: Saves whose store went away while their blocks were copied: nobody will know of the copies.
        self._orphans: set[int] = set()
        self._turns: list[_Turn] = []
        #: Chunks that went down, and chunks that the store would not take.
        self.saved = self.refused = 0

    @property
    def busy(self) -> bool:
        """Something is on its way down."""
        return bool(self._saves or self._turns)

    def keep_full_chunks(self, s: Sequence) -> None:
        """Name the chunks of a running sequence that are full now, and offer them to the store. Nothing with the cache off."""
        d = self.device
        if not d.settings.cache:
            return
        size = d.shape.chunk_tokens
        full = s.computed // size
        if full > len(s.keys):
            s.keys = chunk_keys(d.salt_of(s.request.tenant), d.shape, s.tokens[: full * size], s.keys)
        fresh = []
        for block, key in zip(s.blocks[s.found or 0 : full], s.keys[s.found or 0 : full], strict=True):
            if block.ready.all():
                continue
            block.ready[:] = True
            if d.cache.enter(block, key):
                fresh.append(block)
            else:
                block.save = Save.BELOW  # an equal block is cached already, and is the one that goes down
        self.offer(s.request.session, fresh)

    def offer(self, session: SessionKey, blocks: list[Block]) -> None:
        """Offer full, keyed blocks to the store; without a store they count as refused."""
        if not blocks:
            return
        if not self.device.store_here:
            for block in blocks:
                block.save = Save.REFUSED
            self.refused += len(blocks)
            return
        save_id = self.device.next_id()
        for block in blocks:
            block.save = Save.WAITING
        self._saves[save_id] = blocks
        self._asked_s[save_id] = self.device.clock.now()
        keys = [block.key for block in blocks if block.key is not None]
        request = kvstore_pb2.SaveRequest(
            save_id=save_id, session=session_to_wire(session), fingerprint=self.device.shape.fingerprint, keys=keys
        )
        self.device.tell(save=request)

    def keep(self, s: Sequence) -> int:
        """The sequence leaves the device: what was refused is offered once more.

        Returns how many of its leading tokens are below or on their way there.
        """
        full = s.blocks[: s.computed // self.device.shape.chunk_tokens]
        if self.device.store_here:
            self.offer(s.request.session, [b for b in full if b.save is Save.REFUSED and b.complete and not b.lost and b.key])
        return leading(b.save in (Save.BELOW, Save.WAITING) for b in full) * self.device.shape.chunk_tokens

    def expire(self) -> None:
        """Saves that the store has not answered for long are refused: no page waits for ever. Its late answer is declined."""
        now = self.device.clock.now()
        for save_id, asked_s in list(self._asked_s.items()):
            if now - asked_s < ANSWER_TIMEOUT_S:
                break
            del self._asked_s[save_id]
            for block in self._saves.pop(save_id):
                if block.save is Save.WAITING:  # not erased meanwhile
                    self._settle(block, Save.REFUSED)
            self._send_turns()

    def granted(self, grant: kvstore_pb2.SaveGrant) -> None:
        """The store made room for some, has some, and refuses some."""
        blocks = self._saves.get(grant.save_id)
        self._asked_s.pop(grant.save_id, None)
        arena = self.device.link.arena if self.device.link else None
        if blocks is None:  # asked of this store's predecessor in all but the last moment: it need not keep room for them
            if grant.indices:
                self.device.tell(saved=kvstore_pb2.SaveDone(save_id=grant.save_id, aborted=grant.indices))
            return
        for index in grant.held:
            self._settle(blocks[index], Save.BELOW)
        for index in grant.refused:
            self._settle(blocks[index], Save.REFUSED)
        chosen = [(index, blocks[index]) for index in grant.indices]
        if not chosen or arena is None:
            for _, block in chosen:
                self._settle(block, Save.REFUSED)
            del self._saves[grant.save_id]
            self._send_turns()
            return
        for _, block in chosen:
            block.moving += 1
        self.device.loader.save(grant.save_id, chosen, list(grant.offsets), arena)

    def copied(self, done: SaveCopied) -> None:
        """The loader's thread has copied a save's blocks."""
        blocks = self._saves.pop(done.save_id, None)
        known = done.save_id not in self._orphans
        self._orphans.discard(done.save_id)
        if known:
            self.device.tell(saved=kvstore_pb2.SaveDone(save_id=done.save_id, ok=done.ok, aborted=done.failed))
        if blocks is not None:
            for index in [*done.ok, *done.failed]:
                blocks[index].moving -= 1
                self._settle(blocks[index], Save.BELOW if known and index in done.ok else Save.REFUSED)
        self._send_turns()

    def turn_ended(self, manifest: Manifest, blocks: list[Block]) -> None:
        """Send the manifest once its blocks are below; blocks that were refused before are offered once more."""
        self.offer(manifest.session, [b for b in blocks if b.save is Save.REFUSED and b.complete and not b.lost and b.key])
        self._turns.append(_Turn(manifest, blocks))
        self._send_turns()

    def store_down(self) -> None:
        """Nothing offered will be granted. Copies under way end by themselves, into memory nobody reads."""
        for blocks in self._saves.values():
            for block in blocks:
                if block.save is Save.WAITING and not block.moving:
                    self._settle(block, Save.REFUSED)
        self._saves = {i: blocks for i, blocks in self._saves.items() if any(b.moving for b in blocks)}
        self._orphans = set(self._saves)
        self._asked_s.clear()
        self._send_turns()

    def _settle(self, block: Block, save: Save) -> None:
        if save is Save.REFUSED:
            self.refused += 1
        else:
            self.saved += 1
        block.save = save
        self.device.cache.settle(block)

    def _send_turns(self) -> None:
        waiting = []
        for turn in self._turns:
            if any(b.save is Save.WAITING for b in turn.blocks):
                waiting.append(turn)
                continue
            below = next((i for i, b in enumerate(turn.blocks) if b.save is not Save.BELOW), len(turn.blocks))
            turn.manifest.keys = turn.manifest.keys[:below]
            turn.manifest.tokens = below * self.device.shape.chunk_tokens
            if below:
                self.device.tell(turn=kvstore_pb2.Turn(manifest=manifest_to_wire(turn.manifest)))
        self._turns = waiting
