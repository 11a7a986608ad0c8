"""The copy threads between HBM pages and the arena: one for loads, one for saves, both beside the engine's compute.

How bytes move is the copier's (`worker.memory.copier`). On a load, a piece's `ready` flag is set when its bytes are there, or
will be before anything that computes behind the copier's fence; the engine waits for flags layer by layer (SYMPHONY, section
3.4, layer-wise asynchronous reads). The store is told of a piece, and a load is closed, only when its copies have ended. What
may be copied where is decided by the engine; nothing is decided here.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from contracts.v1 import kvstore_pb2
from runtime import telemetry
from worker.core.hbm import NO_PAGE, Block
from worker.loads import Load, LoadClosed, LoadTable, PiecesCame, SaveCopied
from worker.memory.copier import Copier, HostCopier, UnderWay
from worker.memory.paged_kv import PagedKv
from worker.store_link import Arena, StoreLink

log = telemetry.logger("worker.kv_loader")


@dataclass(frozen=True, slots=True)
class _Cancel:
    load: Load


@dataclass(frozen=True, slots=True)
class _Save:
    save_id: int
    blocks: list[tuple[int, Block]]  # (index in the request, block)
    offsets: list[int]  # chunk-major: layers of the first block, of the second, ...
    arena: Arena


class KvLoader:
    """Copies pieces; reports to the engine through `to_engine`."""

    def __init__(self, kv: PagedKv, table: LoadTable, to_engine: Callable[[object], None], copier: Copier | None = None) -> None:
        """copier: plain copies within host memory unless another is given."""
        self.kv, self.table, self._to_engine = kv, table, to_engine
        self.copier: Copier = copier or HostCopier(kv)
        self.link: StoreLink | None = None
        #: Pages copied, for requests and for hints, and pages copied down. Each has one writer.
        self.loaded = {"demand": 0, "hint": 0}
        self.saved = 0
        self._copying = threading.Lock()
        self._leaving: set[int] = set()
        self._begun = self._ended = 0  # entries of `_under_way`; the loading thread counts the first, the ending one the second
        self._loads: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[_Save | None] = queue.SimpleQueue()
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
        """A LoadPieces or LoadEnd of the store; any thread."""
        self._loads.put(message)

    def cancel(self, load: Load) -> None:
        """Close the load without its remaining pieces; LoadClosed follows. Any thread."""
        self._loads.put(_Cancel(load))

    def halt(self, load: Load) -> None:
        """Close the load at once: when this returns, its pages are touched no more. No LoadClosed follows. Any thread."""
        with self._copying:
            self.copier.settle()
            with self.table.progress:
                load.closed = True
                self.table.progress.notify_all()

    def save(self, save_id: int, blocks: list[tuple[int, Block]], offsets: list[int], arena: Arena) -> None:
        """Copy the blocks to the arena; SaveCopied follows. The blocks must not move meanwhile. Any thread."""
        self._saves.put(_Save(save_id, blocks, offsets, arena))

    # ---- loads -------------------------------------------------------------------------------------------------
    def _load_forever(self) -> None:
        while (work := self._loads.get()) is not None:
            if isinstance(work, kvstore_pb2.LoadPieces):
                self._take(work)
            elif isinstance(work, kvstore_pb2.LoadEnd):
                load = self.table.open.get(work.load_id)
                if load is not None:
                    self._leave(load)
            elif isinstance(work, _Cancel):
                self._leave(work.load)
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

    def _take(self, pieces: kvstore_pb2.LoadPieces) -> None:
        load, link = self.table.open.get(pieces.load_id), self.link
        arena = link.arena if link else None
        if load is None or load.closed or link is None or arena is None:
            return  # cancelled meanwhile: the store drops the leases by itself
        if load.load_id in self._leaving:
            return
        with self._copying:
            if load.closed:
                return
            chosen = list(self._wanted(load, pieces, arena))
            offsets, pages = [offset for *_, offset in chosen], [int(block.pages[layer]) for block, layer, _ in chosen]
            copies = self.copier.load(arena, offsets, pages)
            for block, layer, _ in chosen:
                block.ready[layer] = True
        self.loaded["hint" if load.hint else "demand"] += len(chosen)
        with self.table.progress:
            self.table.progress.notify_all()
        self._to_engine(PiecesCame(load.load_id))
        taken = kvstore_pb2.LoadTaken(load_id=load.load_id, chunks=pieces.chunks, layers=pieces.layers)
        self._after(copies, lambda: link.send(kvstore_pb2.WorkerToStore(taken=taken)))

    def _wanted(self, load: Load, pieces: kvstore_pb2.LoadPieces, arena: Arena) -> Iterator[tuple[Block, int, int]]:
        """(block, layer, offset) of the pieces that were asked for and have a page."""
        wanted = [set(layers) for layers in load.layers]
        for chunk, layer, offset in zip(pieces.chunks, pieces.layers, pieces.offsets, strict=True):
            if chunk >= len(load.blocks) or layer not in wanted[chunk] or offset + self.kv.page_bytes > arena.nbytes:
                log.error("unasked piece", load=load.load_id, chunk=chunk, layer=layer, offset=offset)
            elif load.blocks[chunk].pages[layer] != NO_PAGE:
                yield load.blocks[chunk], layer, offset

    def _leave(self, load: Load) -> None:
        """Begin no further copies for this load, and close it when those under way have ended."""
        self._leaving.add(load.load_id)
        self._after(None, lambda: self._close(load))

    def _close(self, load: Load) -> None:
        self._leaving.discard(load.load_id)
        if load.closed:
            return
        with self.table.progress:
            load.closed = True
            self.table.progress.notify_all()
        self._to_engine(LoadClosed(load))

    # ---- saves -------------------------------------------------------------------------------------------------
    def _save_forever(self) -> None:
        while (work := self._saves.get()) is not None:
            ok: list[int] = []
            failed: list[int] = []
            size = self.kv.page_bytes
            layers = len(work.blocks[0][1].pages) if work.blocks else 0
            for n, (index, block) in enumerate(work.blocks):
                offsets = work.offsets[n * layers : (n + 1) * layers]
                if len(offsets) < layers or max(offsets) + size > work.arena.nbytes:
                    failed.append(index)
                    continue
                self.copier.save(work.arena, offsets, [int(page) for page in block.pages])
                self.saved += layers
                ok.append(index)
            self._to_engine(SaveCopied(work.save_id, ok, failed))
