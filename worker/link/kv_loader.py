"""The copy threads between HBM pages and the arena: one for loads, one for saves, both beside the engine's compute.

How bytes move is the copier's (`worker.memory.copier`). On a load, a piece's `ready` flag is set when its bytes are there, or
will be before anything that computes behind the copier's fence; the engine waits for flags layer by layer (SYMPHONY, section
3.4, layer-wise asynchronous reads). The store is told of a piece, and a load is closed, only when its copies have ended. On a save
a layer is copied as soon as the step has computed it. What may be copied where is decided by the engine; nothing is decided here.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from contracts.v1 import kvstore_pb2
from runtime import telemetry
from runtime.clock import Clock, RealClock
from storelink.ends import ArenaGone, ArenaHere
from storelink.link import StoreLink
from worker.core.events import LoadClosed, PiecesCame, SaveCopied
from worker.core.hbm import NO_PAGE
from worker.core.pages import Pages
from worker.link.loads import LoadTable, Save, Transfer, Wake
from worker.memory.copier import Arena, Copier, HostCopier, UnderWay
from worker.memory.paged_kv import PagedKv

log = telemetry.logger("worker.link.kv_loader")
#: Pieces are copied in runs of about so many bytes: a run holds up whoever halts the load, and flags are set a run at a time.
RUN_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class _Cancel:
    load: Transfer


@dataclass(frozen=True, slots=True)
class _Withdraw:
    save_id: int


class _StoreGone:
    """No offer made so far will be granted."""


class KvLoader:
    """Copies pieces; reports to the engine through `to_engine`. Every offer of a save is answered by one SaveCopied."""

    def __init__(
        self,
        kv: PagedKv,
        table: LoadTable,
        to_engine: Callable[[object], None],
        copier: Copier | None = None,
        clock: Clock | None = None,
    ) -> None:
        """copier: plain copies within host memory unless another is given."""
        self.kv, self.table, self._to_engine = kv, table, to_engine
        self._clock = clock or RealClock()
        self._run = max(1, RUN_BYTES // kv.page_bytes)
        self.copier: Copier = copier or HostCopier(kv)
        self.link: StoreLink | None = None
        #: Pages copied, for requests and for hints, and pages copied down. Each has one writer.
        self.loaded = {"demand": 0, "hint": 0}
        self.saved = 0
        self._copying = threading.Lock()
        self._leaving: set[int] = set()
        self._begun = self._ended = 0  # entries of `_under_way`; the loading thread counts the first, the ending one the second
        self._loads: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[object] = queue.SimpleQueue()
        #: Copies under way and what follows their end, in the order in which they were begun.
        self._under_way: queue.SimpleQueue[tuple[UnderWay | None, Callable[[], None]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._load_forever, name="kv-loads", daemon=True),
            threading.Thread(target=self._save_forever, name="kv-saves", daemon=True),
            threading.Thread(target=self._end_forever, name="kv-copied", daemon=True),
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads after what is queued."""
        self._loads.put(None)
        self._saves.put(None)

    def from_store(self, message: object) -> None:
        """A LoadPieces, LoadEnd or SaveGrant of the store, or which arena those that follow are about; any thread, in their order."""
        if not isinstance(message, kvstore_pb2.SaveGrant):
            self._loads.put(message)
        if isinstance(message, kvstore_pb2.SaveGrant | ArenaHere | ArenaGone):
            self._saves.put(message)

    def cancel(self, load: Transfer) -> None:
        """Close the load without its remaining pieces; LoadClosed follows. Any thread."""
        self._loads.put(_Cancel(load))

    def halt(self, load: Transfer) -> None:
        """Close the load at once: when this returns, its pages are touched no more. No LoadClosed follows. Any thread."""
        with self._copying:
            self.copier.settle()
            with self.table.progress:
                load.closed = True
                self.table.progress.notify_all()

    def offer(self, save: Save) -> None:
        """Copy the save's chunks once the store grants it room; told before the store is asked. Its pages must not move meanwhile."""
        self._saves.put(save)

    def withdraw(self, save_id: int) -> None:
        """Refuse this offer unless a grant has come for it. Any thread."""
        self._saves.put(_Withdraw(save_id))

    def store_gone(self) -> None:
        """Offers that no grant has come for are refused. Any thread, after the last grant of that store."""
        self._saves.put(_StoreGone())

    # ---- loads -------------------------------------------------------------------------------------------------
    def _load_forever(self) -> None:
        arena: Arena | None = None
        while (work := self._loads.get()) is not None:
            if isinstance(work, kvstore_pb2.LoadPieces):
                if arena is not None:
                    self._take(work, arena)
            elif isinstance(work, kvstore_pb2.LoadEnd):
                load = self.table.open.get(work.load_id)
                if load is not None:
                    self._leave(load)
            elif isinstance(work, _Cancel):
                self._leave(work.load)
            elif isinstance(work, ArenaHere):
                arena = _bytes_of(work.arena)
                self.copier.adopt(arena)
            elif isinstance(work, ArenaGone):
                arena = None
                self._after(None, work.left)
        self._under_way.put(None)

    def _after(self, copies: UnderWay | None, then: Callable[[], None]) -> None:
        """`then` once the copies have ended, and after whatever waits for earlier ones."""
        if copies is None and self._ended == self._begun:
            then()
            return
        self._begun += 1
        self._under_way.put((copies, then))

    def _end_forever(self) -> None:
        while (work := self._under_way.get()) is not None:
            copies, then = work
            if copies is not None:
                copies.wait()
            then()
            self._ended += 1

    def _take(self, pieces: kvstore_pb2.LoadPieces, arena: Arena) -> None:
        load, link = self.table.open.get(pieces.load_id), self.link
        if load is None or load.closed or link is None:
            return  # cancelled meanwhile: the store drops the leases by itself
        if load.load_id in self._leaving:
            return
        load.first_s = load.first_s or self._clock.now()
        chunks, layers, offsets = self._sound(load, pieces, arena.nbytes)
        pages = load.pages[chunks, layers]
        copies: UnderWay | None = None
        for at in range(0, len(chunks), self._run):
            run = slice(at, at + self._run)
            self._after(copies, _nothing) if copies else None
            with self._copying:
                if load.closed:
                    return
                copies = self.copier.load(arena, offsets[run], pages[run])
                with self.table.progress:
                    load.ready[chunks[run], layers[run]] = True
                    self.table.arrived.append(PiecesCame(load.load_id, chunks[run], layers[run]))
                    self.table.progress.notify_all()
            if not load.hint:
                self._to_engine(Wake())
        self.loaded["hint" if load.hint else "demand"] += len(chunks)

        def taken() -> None:
            load.last_s = self._clock.now()
            load.came += len(chunks)
            done = kvstore_pb2.LoadTaken(load_id=load.load_id, chunks=pieces.chunks, layers=pieces.layers)
            link.send(kvstore_pb2.WorkerToStore(taken=done))

        self._after(copies, taken)

    def _sound(self, load: Transfer, pieces: kvstore_pb2.LoadPieces, arena_bytes: int) -> tuple[Pages, Pages, Pages]:
        """Chunks, layers and offsets of the pieces that were asked for and lie in the arena: a message is checked before it is believed."""
        chunks, layers, offsets = (np.array(x, np.int64) for x in (pieces.chunks, pieces.layers, pieces.offsets))
        count = min(map(len, (chunks, layers, offsets)))
        chunks, layers, offsets = chunks[:count], layers[:count], offsets[:count]
        rows, columns = load.pages.shape
        sound = (chunks < rows) & (layers < columns) & (offsets <= arena_bytes - self.kv.page_bytes)
        sound[sound] = load.pages[chunks[sound], layers[sound]] != NO_PAGE
        if len(pieces.chunks) > sound.sum():
            log.error("unasked pieces", load=load.load_id, pieces=len(pieces.chunks) - int(sound.sum()))
        return chunks[sound], layers[sound], offsets[sound]

    def _leave(self, load: Transfer) -> None:
        """Begin no further copies for this load, and close it when those under way have ended."""
        self._leaving.add(load.load_id)
        self._after(None, lambda: self._close(load))

    def _close(self, load: Transfer) -> None:
        self._leaving.discard(load.load_id)
        if load.closed:
            return
        with self.table.progress:
            load.closed = True
            self.table.progress.notify_all()
        self._to_engine(LoadClosed(load.load_id, load.came, load.first_s, load.last_s))

    # ---- saves -------------------------------------------------------------------------------------------------
    def _save_forever(self) -> None:
        offered: dict[int, Save] = {}
        arena: Arena | None = None
        while (work := self._saves.get()) is not None:
            if isinstance(work, Save):
                offered[work.save_id] = work
            elif isinstance(work, kvstore_pb2.SaveGrant):
                self._granted(offered.pop(work.save_id, None), work, arena)
            elif isinstance(work, ArenaHere):
                arena = _bytes_of(work.arena)
            elif isinstance(work, ArenaGone):
                arena = None
                work.left()
            elif isinstance(work, _Withdraw | _StoreGone):
                for save_id in [work.save_id] if isinstance(work, _Withdraw) else list(offered):
                    if (save := offered.pop(save_id, None)) is not None:
                        self._to_engine(SaveCopied(save_id, [], [], [], list(range(len(save.pages)))))

    def _granted(self, save: Save | None, grant: kvstore_pb2.SaveGrant, arena: Arena | None) -> None:
        link = self.link
        if save is None:  # asked of this store's predecessor in all but the last moment: it need not keep room for it
            if link is not None and grant.indices:
                link.send(kvstore_pb2.WorkerToStore(saved=kvstore_pb2.SaveDone(save_id=grant.save_id, aborted=grant.indices)))
            return
        indices, held, refused = list(grant.indices), list(grant.held), list(grant.refused)
        count, layers = save.pages.shape
        offsets = np.array(grant.offsets, np.int64)
        if arena is None or len(offsets) != len(indices) * layers or max(indices, default=0) >= count:
            self._to_engine(SaveCopied(save.save_id, [], [i for i in indices if i < count], held, refused))
            return
        offsets = offsets.reshape(len(indices), layers)
        inside = np.flatnonzero((offsets <= arena.nbytes - self.kv.page_bytes).all(axis=1))
        ok = [indices[i] for i in inside.tolist()]
        offsets, pages = offsets[inside], save.pages[ok]
        for layer in range(layers if ok else 0):
            if save.progress is not None:
                save.progress.wait_for(layer + 1)
            self.copier.save(arena, offsets[:, layer], pages[:, layer])
        self.saved += len(ok) * layers
        self._to_engine(SaveCopied(save.save_id, ok, sorted(set(indices) - set(ok)), held, refused))


def _bytes_of(arena: memoryview) -> Arena:
    return np.frombuffer(arena, np.uint8)


def _nothing() -> None:
    """What follows a run of copies that is not the last of its message."""
