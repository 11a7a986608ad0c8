"""The worker's stream to its node's store: keeps it attached, maps the arena, and sorts what comes in.

Runs on the event loop; `send` may be called from any thread. When the stream breaks it is opened again, for ever, and the
engine is told of both (`StoreDown`, `StoreUp`): without a store the worker serves on, it only saves and loads nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from contracts.convert import shape_to_wire
from contracts.kv import KvShape
from contracts.v1 import kvstore_pb2, kvstore_pb2_grpc
from runtime import rpc, telemetry
from runtime.arena_file import HugePages, map_file
from worker.loads import FromStore, StoreDown, StoreUp

log = telemetry.logger("worker.store_link")
RETRY_S = 0.25

Arena = npt.NDArray[np.uint8]


class StoreLink:
    """One worker's attachment to `address`.

    to_engine: called with StoreUp, StoreDown and FromStore. to_loader: called with each LoadPieces, LoadEnd and SaveGrant.
    hugepages: `kv.hugepages`, which the store was told too. arena: uint8 `[arena_bytes]` over the shared memory while attached, else None.
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
        self.arena: Arena | None = None
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
        try:
            while True:
                try:
                    await self._attached(stub)
                except (grpc.aio.AioRpcError, OSError) as e:
                    reason = e.details() if isinstance(e, grpc.aio.AioRpcError) else str(e)
                    log.debug("store not attached", address=self.address, reason=reason)
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

        up = False
        try:
            async for message in stub.Attach(messages()):
                kind = message.WhichOneof("kind")
                if kind == "welcome":
                    mapped = map_file(Path(message.welcome.arena_path), message.welcome.arena_bytes, self._hugepages)
                    self.arena = np.frombuffer(mapped, dtype=np.uint8)
                    self._outgoing, up = outgoing, True
                    self._to_loader(self.arena)
                    log.info("attached", store=self.address, arena_bytes=message.welcome.arena_bytes)
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
            if up:
                self._outgoing, self.arena = None, None
                log.warning("store gone", store=self.address)
                self._to_engine(StoreDown())
