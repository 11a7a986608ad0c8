"""The worker's stream to its node's store: keeps it attached, maps the arena, and sorts what comes in.

The arena is let go of, so that the store may give away what it had granted, when the loader has done with everything that it was told
of it (`ArenaGone`); and nothing is told of the next one before that.

Runs on the event loop; `send` may be called from any thread. When the stream breaks it is opened again, for ever, and the
engine is told of both (`StoreDown`, `StoreUp`): without a store the worker serves on, it only saves and loads nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from contracts.convert import shape_to_wire
from contracts.kv import KvShape
from contracts.v1 import kvstore_pb2, kvstore_pb2_grpc
from runtime import rpc, telemetry
from runtime.arena_file import HugePages
from runtime.arena_sharing import SharedArena
from worker.core.events import StoreDown, StoreUp
from worker.link.loads import ArenaGone, ArenaHere, FromStore

log = telemetry.logger("worker.link.store_link")
RETRY_S = 0.25


class StoreLink:
    """One worker's attachment to `address`.

    to_engine: called with StoreUp, StoreDown and FromStore. to_loader: called with ArenaHere, then each LoadPieces, LoadEnd and SaveGrant,
    then ArenaGone. hugepages: `kv.hugepages`, which the store was told too.
    """

    def __init__(
        self,
        address: str,
        worker_id: str,
        shape: KvShape,
        to_engine: Callable[[object], None],
        to_loader: Callable[[object], None],
        hugepages: HugePages = "auto",
    ) -> None:
        self.address, self.worker_id, self.shape = address, worker_id, shape
        self._to_engine, self._to_loader = to_engine, to_loader
        self._hugepages = hugepages
        self._outgoing: asyncio.Queue[kvstore_pb2.WorkerToStore] | None = None
        self._loop = asyncio.get_running_loop()

    def send(self, message: kvstore_pb2.WorkerToStore) -> None:
        """Queue a message; dropped when no store is attached (the engine hears of that by StoreDown)."""
        self._loop.call_soon_threadsafe(self._put, message)

    def _put(self, message: kvstore_pb2.WorkerToStore) -> None:
        if self._outgoing is not None:
            self._outgoing.put_nowait(message)

    async def run(self) -> None:
        """Stay attached until cancelled."""
        channel = rpc.channel(self.address)
        stub: Any = kvstore_pb2_grpc.KvStoreStub(channel)  # type: ignore[no-untyped-call]
        told = ""
        try:
            while True:
                try:
                    await self._attached(stub)
                except grpc.aio.AioRpcError as e:
                    log.debug("store not attached", address=self.address, reason=e.details())
                except OSError as e:
                    # It answers, and its arena cannot be had: that does not pass by itself where containers share no shm_dir.
                    say = log.debug if str(e) == told else log.warning
                    say("arena not mapped", store=self.address, reason=str(e))
                    told = str(e)
                await asyncio.sleep(RETRY_S)
        finally:
            await channel.close(None)

    async def _attached(self, stub: Any) -> None:
        outgoing: asyncio.Queue[kvstore_pb2.WorkerToStore] = asyncio.Queue()
        outgoing.put_nowait(
            kvstore_pb2.WorkerToStore(hello=kvstore_pb2.AttachHello(worker_id=self.worker_id, shapes=[shape_to_wire(self.shape)]))
        )

        async def messages() -> AsyncIterator[kvstore_pb2.WorkerToStore]:
            while True:
                yield await outgoing.get()

        shared: SharedArena | None = None
        try:
            async for message in stub.Attach(messages()):
                kind = message.WhichOneof("kind")
                if kind == "welcome":
                    if shared is not None:
                        break
                    welcome = message.welcome
                    shared = SharedArena(Path(welcome.arena_path), welcome.arena_bytes, welcome.nonce, welcome.attachment, self._hugepages)
                    self._outgoing = outgoing
                    self._to_loader(ArenaHere(np.frombuffer(shared.mapped, dtype=np.uint8, count=welcome.arena_bytes)))
                    log.info("attached", store=self.address, arena_bytes=welcome.arena_bytes)
                    self._to_engine(StoreUp())
                elif kind == "pieces":
                    self._to_loader(message.pieces)
                elif kind == "end":
                    self._to_loader(message.end)
                elif kind == "grant":
                    self._to_loader(message.grant)
                else:
                    self._to_engine(FromStore(message))
        finally:
            if shared is not None:
                self._outgoing = None
                self._to_loader(ArenaGone(_last_of(2, shared.leave)))
                log.warning("store gone", store=self.address)
                self._to_engine(StoreDown())


def _last_of(calls: int, then: Callable[[], None]) -> Callable[[], None]:
    """What calls `then` when it is called for the `calls`-th time; any thread."""
    left, lock = [calls], threading.Lock()

    def call() -> None:
        with lock:
            left[0] -= 1
            last = not left[0]
        if last:
            then()

    return call
