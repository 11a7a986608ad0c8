"""Executes an engine core's instructions: on its pages, its copy threads and its store.

Used on the engine's thread only; the load table, StoreLink and KvLoader say which of their calls are thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from contracts.convert import layers_to_bitmap, manifest_to_wire, session_to_wire
from contracts.kv import KvShape
from contracts.v1 import common_pb2, kvstore_pb2
from runtime import telemetry
from runtime.clock import Clock
from runtime.sections import KvSection
from storelink.link import StoreLink
from worker.core import instructions as do
from worker.core.hbm import HbmCache
from worker.engine.turn_traces import TurnTraces
from worker.link.kv_loader import KvLoader
from worker.link.loads import LoadTable, SaveOffer, StepProgress, Transfer
from worker.memory.paged_kv import PagedKv

log = telemetry.logger("worker.engine.executor")


@dataclass(slots=True)
class Executor:
    """One engine's pages and store. salt_of: a tenant's chunk-key salt. make_way: unmaps what other models of the
    device have given up."""

    shape: KvShape
    kv: PagedKv
    cache: HbmCache
    table: LoadTable
    loader: KvLoader
    clock: Clock
    settings: KvSection
    salt_of: Callable[[str], bytes]
    link: StoreLink | None = None
    make_way: Callable[[], None] = lambda: None
    #: How often pages have moved.
    moves: int = 0
    #: Progress of the next step.
    progress: StepProgress = field(default_factory=StepProgress)
    #: None while traces are off.
    traces: TurnTraces | None = None

    def execute(self, instruction: do.Instruction) -> None:
        """Execute an instruction, except those about clients (`NativeEngine`)."""
        match instruction:
            case do.OpenLoad():
                self._open(instruction)
            case do.HaltLoad(load_id):
                self.loader.halt(self.table.open.pop(load_id))
                self._send(cancel=kvstore_pb2.LoadCancel(load_id=load_id))
            case do.CloseLoad(load_id):
                self.loader.cancel(self.table.open[load_id])
            case do.OfferSave():
                self._offer(instruction)
            case do.WithdrawSave(save_id):
                self.loader.withdraw(save_id)
            case do.WithdrawAllSaves():
                self.loader.store_gone()
            case do.Saved(save_id, ok, aborted):
                self._send(saved=kvstore_pb2.SaveDone(save_id=save_id, ok=ok, aborted=aborted))
            case do.TurnEnded(manifest, ended_s):
                manifest.last_use_s = self.clock.wall() - (self.clock.now() - ended_s)
                self._send(turn=kvstore_pb2.Turn(manifest=manifest_to_wire(manifest)))
            case do.MovePages(sources, targets):
                self.loader.move(sources, targets)
                self.moves += 1
            case do.MapSlabs(slabs):
                self.make_way()
                for slab in slabs:
                    self.kv.map_slab(slab)
            case do.UnmapSlabs(slabs):
                for slab in slabs:
                    self.kv.unmap_slab(slab, keep=True)
            case do.HbmHolds():
                self._holds(instruction)
            case do.Note(text, fields, bad):
                (log.warning if bad else log.info)(text, **fields)

    def _send(self, **kind: object) -> None:
        if self.link is not None:
            self.link.send(kvstore_pb2.WorkerToStore(**kind))  # type: ignore[arg-type]

    def _open(self, load: do.OpenLoad) -> None:
        self.table.open[load.load_id] = Transfer.of(load.load_id, load.pages, load.hint)
        wants = [
            kvstore_pb2.ChunkWant(key=key, layers=layers_to_bitmap(wanted, self.shape.layers))
            for key, wanted in zip(load.keys, load.layers, strict=True)
        ]
        request = kvstore_pb2.LoadRequest(
            load_id=load.load_id,
            load_class=kvstore_pb2.PREFETCH if load.hint else kvstore_pb2.DEMAND,
            session=session_to_wire(load.session),
            fingerprint=self.shape.fingerprint,
            chunks=wants,
            source_nodes=load.source_nodes,
            priority=load.priority,
            request_id=load.request_id,
            trace=self.traces.wire(load.request_id) if self.traces is not None else "",
        )
        self._send(load=request)

    def _offer(self, save: do.OfferSave) -> None:
        self.loader.offer(SaveOffer(save.save_id, save.pages, self.progress if save.ahead else None))
        trace = ""
        if self.traces is not None:
            trace = self.traces.saving(save.save_id, save.request_id, len(save.keys), self.clock.now())
        request = kvstore_pb2.SaveRequest(
            save_id=save.save_id,
            session=session_to_wire(save.session),
            fingerprint=self.shape.fingerprint,
            keys=save.keys,
            request_id=save.request_id,
            trace=trace,
        )
        self._send(save=request)

    def _holds(self, holds: do.HbmHolds) -> None:
        hbm = common_pb2.TierResidency(
            tier="hbm", layer_chunks=holds.layer_chunks, tokens=holds.tokens, bytes=holds.bytes_
        )
        self._send(hbm=kvstore_pb2.HbmResidency(query_id=holds.query_id, hbm=hbm))
