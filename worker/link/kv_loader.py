"""The threads that copy between HBM pages and the arena while the engine computes: one for loads, one for saves, and
one that waits for loads' copies to end.

`worker.memory.copier` moves the bytes. On a load, a piece's `ready` flag is set when its bytes are in the page, or will
be before any compute after the copier's fence; the engine waits for flags layer by layer (SYMPHONY, section 3.4,
layer-wise asynchronous reads). A piece is acknowledged to the store, and a load is closed, only when its copies have
ended. On a save, a layer is copied as soon as the step has computed it. The engine decides what is copied where.
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
from worker.core.block import NO_PAGE
from worker.core.events import LoadClosed, PiecesCame, SaveCopied
from worker.core.pages import Pages
from worker.link.loads import LoadTable, SaveOffer, Transfer, Wake
from worker.memory.copier import Arena, Copier, HostCopier, UnderWay
from worker.memory.paged_kv import PagedKv

log = telemetry.logger("worker.link.kv_loader")


@dataclass(frozen=True, slots=True)
class _Cancel:
    load: Transfer


@dataclass(frozen=True, slots=True)
class _Withdraw:
    save_id: int


class _StoreGone:
    """The store is gone: no earlier offer will be granted."""


class KvLoader:
    """Copies pieces; reports to the engine through `to_engine`. Answers every save offer with one SaveCopied."""

    def __init__(
        self,
        kv: PagedKv,
        table: LoadTable,
        to_engine: Callable[[object], None],
        copier: Copier | None = None,
        clock: Clock | None = None,
    ) -> None:
        """copier: default: copies within host memory."""
        self.kv, self.table, self._to_engine = kv, table, to_engine
        self._clock = clock or RealClock()
        self.copier: Copier = copier or HostCopier(kv)
        #: Pieces of a run of copies. `halt` waits for a run, and flags are set per run.
        self._run = max(1, self.copier.run_bytes // kv.page_bytes)
        self.link: StoreLink | None = None
        #: Called with the exception that ended a thread: the worker cannot go on without it.
        self.on_crash: Callable[[BaseException], None] = lambda error: None
        #: Number of pages loaded, by demand or hint, and of pages saved. Each has one writer.
        self.loaded = {"demand": 0, "hint": 0}
        self.saved = 0
        self._copying = threading.Lock()
        self._finishing: set[int] = set()
        # entries of `_under_way` that were added (by the loading thread) and finished (by the waiting thread)
        self._begun = self._ended = 0
        self._loads: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[object] = queue.SimpleQueue()
        #: Copies under way, each with the call that follows its end, in order.
        self._under_way: queue.SimpleQueue[tuple[UnderWay | None, Callable[[], None]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run_thread, args=(work,), name=name, daemon=True)
            for work, name in (
                (self._load_forever, "kv-loads"),
                (self._save_forever, "kv-saves"),
                (self._finish_forever, "kv-copied"),
            )
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads after what is queued."""
        self._loads.put(None)
        self._saves.put(None)

    def _run_thread(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            log.exception("a thread that copies KV died")
            self.on_crash(error)

    def from_store(self, message: object) -> None:
        """Take a LoadPieces, LoadEnd or SaveGrant, or the arena that later messages refer to. Any thread, in order."""
        if not isinstance(message, kvstore_pb2.SaveGrant):
            self._loads.put(message)
        if isinstance(message, kvstore_pb2.SaveGrant | ArenaHere | ArenaGone):
            self._saves.put(message)

    def cancel(self, load: Transfer) -> None:
        """End the load without its remaining pieces; LoadClosed follows. Any thread."""
        self._loads.put(_Cancel(load))

    def halt(self, load: Transfer) -> None:
        """Abort the load: when this returns, its pages are no longer written. No LoadClosed follows. Any thread."""
        with self._copying:
            self.copier.settle()
            with self.table.progress:
                load.closed = True
                self.table.progress.notify_all()

    def move(self, sources: Pages, targets: Pages) -> None:
        """See `Copier.move`."""
        self.copier.move(sources, targets)

    def offer(self, save: SaveOffer) -> None:
        """Copy the save's chunks when the store grants room. Call before asking the store. The pages stay pinned."""
        self._saves.put(save)

    def withdraw(self, save_id: int) -> None:
        """Refuse this offer unless it was granted already. Any thread."""
        self._saves.put(_Withdraw(save_id))

    def store_gone(self) -> None:
        """Refuse all offers not granted. Any thread, after the last grant of that store."""
        self._saves.put(_StoreGone())

    # ---- loads -------------------------------------------------------------------------------------------------
    def _load_forever(self) -> None:
        arena: Arena | None = None
        while (work := self._loads.get()) is not None:
            if isinstance(work, kvstore_pb2.LoadPieces):
                if arena is not None:
                    self._copy_in(work, arena)
            elif isinstance(work, kvstore_pb2.LoadEnd):
                load = self.table.open.get(work.load_id)
                if load is not None:
                    self._finish(load)
            elif isinstance(work, _Cancel):
                self._finish(work.load)
            elif isinstance(work, ArenaHere):
                arena = _bytes_of(work.arena)
                self.copier.adopt(arena)
            elif isinstance(work, ArenaGone):
                arena = None
                self._after(None, work.left)
        self._under_way.put(None)

    def _after(self, copies: UnderWay | None, then: Callable[[], None]) -> None:
        """Call `then` when the copies have ended, after the calls of earlier ones."""
        if copies is None and self._ended == self._begun:
            then()
            return
        self._begun += 1
        self._under_way.put((copies, then))

    def _finish_forever(self) -> None:
        while (work := self._under_way.get()) is not None:
            copies, then = work
            if copies is not None:
                copies.wait()
            then()
            self._ended += 1

    def _copy_in(self, pieces: kvstore_pb2.LoadPieces, arena: Arena) -> None:
        load, link = self.table.open.get(pieces.load_id), self.link
        if load is None or load.closed or link is None:
            return  # aborted meanwhile: the store drops the leases itself
        if load.load_id in self._finishing:
            return
        load.first_s = load.first_s or self._clock.now()
        chunks, layers, offsets = self._checked(load, pieces, arena.nbytes)
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

    def _checked(self, load: Transfer, pieces: kvstore_pb2.LoadPieces, arena_bytes: int) -> tuple[Pages, Pages, Pages]:
        """Chunks, layers and offsets, int64 `[n]`, of the pieces that were requested and lie in the arena. Invalid ones
        are logged and skipped."""
        chunks, layers, offsets = (np.array(x, np.int64) for x in (pieces.chunks, pieces.layers, pieces.offsets))
        count = min(map(len, (chunks, layers, offsets)))
        chunks, layers, offsets = chunks[:count], layers[:count], offsets[:count]
        rows, columns = load.pages.shape
        sound = (chunks < rows) & (layers < columns) & (offsets <= arena_bytes - self.kv.page_bytes)
        sound[sound] = load.pages[chunks[sound], layers[sound]] != NO_PAGE
        if len(pieces.chunks) > sound.sum():
            log.error("unasked pieces", load=load.load_id, pieces=len(pieces.chunks) - int(sound.sum()))
        return chunks[sound], layers[sound], offsets[sound]

    def _finish(self, load: Transfer) -> None:
        """Start no further copies for this load; close it when those under way have ended."""
        self._finishing.add(load.load_id)
        self._after(None, lambda: self._close(load))

    def _close(self, load: Transfer) -> None:
        self._finishing.discard(load.load_id)
        if load.closed:
            return
        with self.table.progress:
            load.closed = True
            self.table.progress.notify_all()
        self._to_engine(LoadClosed(load.load_id, load.came, load.first_s, load.last_s))

    # ---- saves -------------------------------------------------------------------------------------------------
    def _save_forever(self) -> None:
        offered: dict[int, SaveOffer] = {}
        arena: Arena | None = None
        while (work := self._saves.get()) is not None:
            if isinstance(work, SaveOffer):
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

    def _granted(self, save: SaveOffer | None, grant: kvstore_pb2.SaveGrant, arena: Arena | None) -> None:
        link = self.link
        if save is None:  # withdrawn, or offered to the previous store: release the granted room
            if link is not None and grant.indices:
                link.send(
                    kvstore_pb2.WorkerToStore(saved=kvstore_pb2.SaveDone(save_id=grant.save_id, aborted=grant.indices))
                )
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
    """The call after a run that is not the last of its message."""
