"""A loader and a store in virtual time; see virtual_engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from contracts.convert import layers_from_bitmap, session_to_wire
from contracts.ids import SessionKey
from contracts.kv import leading
from contracts.v1 import kvstore_pb2
from tests.worker.virtual_model import LAYERS, SHAPE, Pages, World
from worker.core.events import LoadClosed, PiecesCame, SaveCopied, StoreDown, StoreUp
from worker.link.loads import FromStore, LoadTable, SaveOffer, Transfer, Wake


class VirtualLoader:
    """Copies between pages and arena when their time has come."""

    def __init__(self, pages: Pages, table: LoadTable, world: World) -> None:
        self.pages, self.table, self.world = pages, table, world
        self.to_engine: Callable[[object], None] = lambda event: None
        self.copy_s = 0.001
        self.loaded, self.saved, self.moved = {"demand": 0, "hint": 0}, 0, 0
        self._offered: dict[int, SaveOffer] = {}

    def pieces(self, message: kvstore_pb2.LoadPieces, arena: dict[int, np.ndarray]) -> None:
        load = self.table.open.get(message.load_id)
        if load is None or load.closed:
            return
        load.first_s = load.first_s or self.world.now()
        for chunk, layer, offset in zip(message.chunks, message.layers, message.offsets, strict=True):
            page = int(load.pages[chunk, layer])
            if page >= 0:
                self.pages.numbers[page] = arena[offset]
                load.ready[chunk, layer] = True
                self.table.arrived.append(PiecesCame(load.load_id, np.array([chunk]), np.array([layer])))
                self.loaded["hint" if load.hint else "demand"] += 1
                load.came += 1
        load.last_s = self.world.now()
        self.to_engine(Wake())

    def end(self, load_id: int) -> None:
        if (load := self.table.open.get(load_id)) is not None:
            self._close(load)

    def _close(self, load: Transfer) -> None:
        if not load.closed:
            load.closed = True
            self.to_engine(LoadClosed(load.load_id, load.came, load.first_s, load.last_s))

    def cancel(self, load: Transfer) -> None:
        self.world.at(self.copy_s, lambda: self._close(load))

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        assert not set(sources.tolist()) & set(targets.tolist())
        assert {int(page) // LAYERS for page in (*sources, *targets)} <= self.pages.slabs, "a page is not mapped"
        self.pages.numbers[targets] = self.pages.numbers[sources]
        self.moved += len(sources)

    def halt(self, load: Transfer) -> None:
        load.closed = True

    def offer(self, save: SaveOffer) -> None:
        self._offered[save.save_id] = save

    def withdraw(self, save_id: int) -> None:
        if (save := self._offered.pop(save_id, None)) is not None:
            self.to_engine(SaveCopied(save_id, [], [], [], list(range(len(save.pages)))))

    def store_gone(self) -> None:
        for save_id in list(self._offered):
            self.withdraw(save_id)

    def grant(self, grant: kvstore_pb2.SaveGrant, arena: dict[int, np.ndarray], store: VirtualStore) -> None:
        save = self._offered.pop(grant.save_id, None)
        if save is None:
            store.send(
                kvstore_pb2.WorkerToStore(saved=kvstore_pb2.SaveDone(save_id=grant.save_id, aborted=grant.indices))
            )
            return
        done = SaveCopied(save.save_id, list(grant.indices), [], list(grant.held), list(grant.refused))

        def copy(layer: int) -> None:
            if layer == LAYERS:
                self.saved += len(done.ok) * LAYERS
                self.to_engine(done)
            elif save.progress is not None and save.progress._computed <= layer:
                self.world.at(0.0005, lambda: copy(layer))
            else:
                for n, index in enumerate(done.ok):
                    arena[grant.offsets[n * LAYERS + layer]] = self.pages.numbers[save.pages[index, layer]].copy()
                self.world.at(self.copy_s * len(done.ok) / LAYERS, lambda: copy(layer + 1))

        copy(0)


class VirtualStore:
    """A store that is a dictionary. Everything it does takes `latency()` seconds; while it hangs nothing is done.

    Arena slots are never reused, so a load that the store forgot when it died still copies the offered bytes.
    """

    def __init__(self, world: World, loader: VirtualLoader) -> None:
        self.world, self.loader = world, loader
        self.to_engine: Callable[[object], None] = lambda event: None
        #: None while it is down. Numbers of a piece by its offset.
        self.arena: dict[int, np.ndarray] | None = None
        self.chunks: dict[bytes, list[int]] = {}
        self.latency: Callable[[], float] = lambda: 0.002
        self.fault: Callable[[bytes, int], bool] = lambda key, layer: False
        self.refuse: Callable[[bytes], bool] = lambda key: False
        self.hangs_until_s = 0.0
        #: What it says of where chunks come from.
        self.source = 0
        self.asked: list[kvstore_pb2.LoadRequest] = []
        self._memory: dict[int, np.ndarray] = {}
        self._life = self._next = 0
        self._grants: dict[int, tuple[list[bytes], dict[int, list[int]]]] = {}
        self._cancelled: set[int] = set()

    def up(self) -> None:
        """It is attached, with what it had."""
        self.arena = self._memory
        self.to_engine(StoreUp())

    def down(self) -> None:
        """It dies, and whatever it was about to do."""
        self._life += 1
        self.arena, self._grants = None, {}
        self.to_engine(StoreDown())

    def hint(self, session: str, keys: list[bytes], expires_s: float, arrival_s: float = 0.0) -> None:
        """This session is about to speak, in `arrival_s`."""
        wire = session_to_wire(SessionKey("t", session))
        self._tell(
            offer=kvstore_pb2.PrefetchOffer(
                session=wire, fingerprint=SHAPE.fingerprint, keys=keys, expires_s=expires_s, arrival_s=arrival_s
            )
        )

    def send(self, message: kvstore_pb2.WorkerToStore) -> None:
        """From the engine."""
        self._later(lambda: self._on(message))

    def _later(self, then: Callable[[], None]) -> None:
        life = self._life

        def when_due() -> None:
            if life != self._life or self.arena is None:
                return
            if self.world.now() < self.hangs_until_s:
                self.world.at(self.hangs_until_s - self.world.now(), when_due)
            else:
                then()

        self.world.at(self.latency(), when_due)

    def _tell(self, **kind: Any) -> None:
        self.to_engine(FromStore(kvstore_pb2.StoreToWorker(**kind)))

    def _on(self, message: kvstore_pb2.WorkerToStore) -> None:
        match message.WhichOneof("kind"):
            case "load":
                self.asked.append(message.load)
                self._load(message.load)
            case "cancel":
                self._cancelled.add(message.cancel.load_id)
            case "save":
                self._save(message.save)
            case "saved":
                keys, slots = self._grants.pop(message.saved.save_id, ([], {}))  # else it was its predecessor's
                self.chunks |= {keys[index]: slots[index] for index in message.saved.ok if slots}

    def _load(self, load: kvstore_pb2.LoadRequest) -> None:
        found = leading(c.key in self.chunks for c in load.chunks)
        slots = [self.chunks[c.key] for c in load.chunks[:found]]
        self._tell(found=kvstore_pb2.LoadFound(load_id=load.load_id, chunks=found, sources=[self.source] * found))
        self._layer(load, slots, 0, set())

    def _layer(self, load: kvstore_pb2.LoadRequest, slots: list[list[int]], layer: int, bad: set[int]) -> None:
        if load.load_id in self._cancelled or self.arena is None:
            return
        if layer == LAYERS:
            for i in bad:
                self.chunks.pop(load.chunks[i].key, None)
            self.loader.end(load.load_id)
            return
        pieces = kvstore_pb2.LoadPieces(load_id=load.load_id)
        for i, chunk in enumerate(load.chunks[: len(slots)]):
            if layer in layers_from_bitmap(chunk.layers, LAYERS):
                if self.fault(chunk.key, layer):
                    bad.add(i)
                else:
                    pieces.chunks.append(i)
                    pieces.layers.append(layer)
                    pieces.offsets.append(slots[i][layer])
        if pieces.chunks:
            self.loader.pieces(pieces, self.arena)
        self._later(lambda: self._layer(load, slots, layer + 1, bad))

    def _save(self, save: kvstore_pb2.SaveRequest) -> None:
        grant = kvstore_pb2.SaveGrant(save_id=save.save_id)
        slots: dict[int, list[int]] = {}
        for index, key in enumerate(save.keys):
            if key in self.chunks:
                grant.held.append(index)
            elif self.refuse(key):
                grant.refused.append(index)
            else:
                slots[index] = list(range(self._next, self._next + LAYERS))
                self._next += LAYERS
                grant.indices.append(index)
                grant.offsets.extend(slots[index])
        self._grants[save.save_id] = (list(save.keys), slots)
        assert self.arena is not None
        self.loader.grant(grant, self.arena, self)
