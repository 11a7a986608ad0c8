"""The copy threads between HBM pages and the arena: one for loads, one for saves, both beside the engine's compute.

The copies are plain `memmove`s without the interpreter lock. On a load, a piece's `ready` flag is set after its bytes are
there, and the engine waits for flags layer by layer (SYMPHONY, section 3.4, layer-wise asynchronous reads). What may be
copied where is decided by the engine; nothing is decided here.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from contracts.v1 import kvstore_pb2
from runtime import telemetry
from worker.core.hbm import NO_PAGE, Block
from worker.loads import Load, LoadClosed, LoadTable, PiecesCame, SaveCopied
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

    def __init__(self, kv: PagedKv, table: LoadTable, to_engine: Callable[[object], None]) -> None:
        self.kv, self.table, self._to_engine = kv, table, to_engine
        self.link: StoreLink | None = None
        #: Pages copied, for requests and for hints, and pages copied down. Each has one writer.
        self.loaded = {"demand": 0, "hint": 0}
        self.saved = 0
        self._copying = threading.Lock()
        self._loads: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[_Save | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._load_forever, name="kv-loads", daemon=True),
            threading.Thread(target=self._save_forever, name="kv-saves", daemon=True),
        ]

    def start(self) -> None:
        """Start both threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End both threads after what is queued."""
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
        with self._copying, self.table.progress:
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
                    self._close(load)
            elif isinstance(work, _Cancel):
                self._close(work.load)

    def _take(self, pieces: kvstore_pb2.LoadPieces) -> None:
        load, link = self.table.open.get(pieces.load_id), self.link
        arena = link.arena if link else None
        if load is None or load.closed or link is None or arena is None:
            return  # cancelled meanwhile: the store drops the leases by itself
        wanted = [set(layers) for layers in load.layers]
        size, base = self.kv.page_bytes, arena.ctypes.data
        for chunk, layer, offset in zip(pieces.chunks, pieces.layers, pieces.offsets, strict=True):
            if chunk >= len(load.blocks) or layer not in wanted[chunk] or offset + size > arena.nbytes:
                log.error("unasked piece", load=load.load_id, chunk=chunk, layer=layer, offset=offset)
                continue
            block = load.blocks[chunk]
            with self._copying:
                if load.closed:
                    return
                page = int(block.pages[layer])
                if page != NO_PAGE:
                    ctypes.memmove(self.kv.page_bytes_view(page).ctypes.data, base + offset, size)
                    block.ready[layer] = True
                    self.loaded["hint" if load.hint else "demand"] += 1
        with self.table.progress:
            self.table.progress.notify_all()
        taken = kvstore_pb2.LoadTaken(load_id=load.load_id, chunks=pieces.chunks, layers=pieces.layers)
        link.send(kvstore_pb2.WorkerToStore(taken=taken))
        self._to_engine(PiecesCame(load.load_id))

    def _close(self, load: Load) -> None:
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
            size, base = self.kv.page_bytes, work.arena.ctypes.data
            layers = len(work.blocks[0][1].pages) if work.blocks else 0
            for n, (index, block) in enumerate(work.blocks):
                offsets = work.offsets[n * layers : (n + 1) * layers]
                if len(offsets) < layers or max(offsets) + size > work.arena.nbytes:
                    failed.append(index)
                    continue
                for page, offset in zip(block.pages, offsets, strict=True):
                    ctypes.memmove(base + offset, self.kv.page_bytes_view(int(page)).ctypes.data, size)
                self.saved += layers
                ok.append(index)
            self._to_engine(SaveCopied(work.save_id, ok, failed))
