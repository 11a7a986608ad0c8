"""An engine's stream to its node's store: keeps it attached, maps the arena, and dispatches messages by model.

When the stream breaks, each end gets `ArenaGone`. The arena's lock is released, so that the store may reuse granted
slots, once all copies of all ends have finished. Ends get events of the next arena only after `ArenaGone`.

Runs on an event loop; `send` may be called from any thread. A broken stream is reopened forever, and the engine is told
(`End.attached`). Without a store it still serves, without loads and saves.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from contracts import identity
from contracts.convert import shape_to_wire
from contracts.v1 import kvstore_pb2, kvstore_pb2_grpc
from storelink import fleet
from storelink.arena_file import HugePages
from storelink.arena_sharing import SharedArena
from storelink.channel import channel
from storelink.ends import ArenaGone, ArenaHere, End
from storelink.log import Log

RETRY_S = 0.25


class StoreLink:
    """One worker's attachment to `address`, for all of its models.

    Of n models, the i-th (from 0) numbers its loads and saves i + 1 modulo n, so numbers identify the model. hugepages:
    `kv.hugepages`, the store's setting too. device: the worker's device number on the node. node: its name, which the
    store must have in its certificate.
    """

    def __init__(
        self,
        address: str,
        worker_id: str,
        ends: Sequence[End],
        log: Log,
        hugepages: HugePages = "auto",
        device: int = 0,
        node: str = "",
    ) -> None:
        """Must be called on the event loop that `run` will run on."""
        self.address, self.worker_id, self._ends = address, worker_id, tuple(ends)
        self._log, self._hugepages, self._device, self._node = log, hugepages, device, node
        self._outgoing: asyncio.Queue[kvstore_pb2.WorkerToStore] | None = None
        self._welcomed = False
        #: Queries that every model must answer: number of answers still missing.
        self._asked_of_all: dict[int, int] = {}
        self._loop = asyncio.get_running_loop()

    def send(self, message: kvstore_pb2.WorkerToStore) -> None:
        """Queue a message; dropped when no store is attached."""
        self._loop.call_soon_threadsafe(self._put, message)

    def _put(self, message: kvstore_pb2.WorkerToStore) -> None:
        if message.WhichOneof("kind") == "hbm" and (left := self._asked_of_all.pop(message.hbm.query_id, 1) - 1):
            self._asked_of_all[message.hbm.query_id] = left
        elif self._outgoing is not None:
            self._outgoing.put_nowait(message)

    async def run(self) -> None:
        """Stay attached until cancelled. Raises SecretDiffers if the store has another cluster secret when it first
        answers."""
        opened = channel(self.address, identity.node(self._node))
        stub: Any = kvstore_pb2_grpc.KvStoreStub(opened)  # type: ignore[no-untyped-call]
        warned = ""
        try:
            while True:
                try:
                    await self._attached(stub)
                except grpc.aio.AioRpcError as e:
                    if not self._welcomed and (differs := fleet.refusal(e)) is not None:
                        raise differs from None
                    self._log.debug("store not attached", address=self.address, reason=e.details())
                except OSError as e:
                    # The store answers, but its arena cannot be mapped. This persists if containers share no shm_dir,
                    # so each reason is a warning once.
                    log = self._log.debug if str(e) == warned else self._log.warning
                    log("arena not mapped", store=self.address, reason=str(e))
                    warned = str(e)
                await asyncio.sleep(RETRY_S)
        finally:
            await opened.close(None)

    async def _attached(self, stub: Any) -> None:
        outgoing: asyncio.Queue[kvstore_pb2.WorkerToStore] = asyncio.Queue()
        shapes = [shape_to_wire(end.shape) for end in self._ends]
        hello = kvstore_pb2.AttachHello(worker_id=self.worker_id, shapes=shapes, device=self._device)
        outgoing.put_nowait(kvstore_pb2.WorkerToStore(hello=hello))

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
                    shared = SharedArena(
                        Path(welcome.arena_path),
                        welcome.arena_bytes,
                        welcome.nonce,
                        welcome.attachment,
                        self._hugepages,
                    )
                    self._outgoing, self._welcomed = outgoing, True
                    arena = memoryview(shared.mapped)[: welcome.arena_bytes]
                    for end in self._ends:
                        end.move(ArenaHere(arena, shared.file))
                    self._log.info("attached", store=self.address, arena_bytes=welcome.arena_bytes)
                    self._say_attached(True)
                else:
                    self._pass_on(kind, message)
        finally:
            if shared is not None:
                self._outgoing = None
                self._asked_of_all.clear()
                left = _last_of(2 * len(self._ends), shared.leave)
                for end in self._ends:
                    end.move(ArenaGone(left))
                self._log.warning("store gone", store=self.address)
                self._say_attached(False)

    def _say_attached(self, here: bool) -> None:
        for end in self._ends:
            end.attached(here)

    def _tell_all(self, message: kvstore_pb2.StoreToWorker) -> None:
        for end in self._ends:
            end.hear(message)

    def _pass_on(self, kind: str | None, message: kvstore_pb2.StoreToWorker) -> None:
        """Dispatches to the model that a message concerns; messages about sessions and unknown ones go to all."""
        match kind:
            case "pieces":
                self._of(message.pieces.load_id).move(message.pieces)
            case "end":
                self._of(message.end.load_id).move(message.end)
            case "grant":
                self._of(message.grant.save_id).move(message.grant)
            case "found":
                self._of(message.found.load_id).hear(message)
            case "offer":
                self._tell_model(message.offer.fingerprint, message)
            case "hbm_query" if message.hbm_query.fingerprint:
                self._tell_model(message.hbm_query.fingerprint, message)
            case "hbm_query":  # answered when every model has processed the messages before it
                self._asked_of_all[message.hbm_query.query_id] = len(self._ends)
                self._tell_all(message)
            case _:
                self._tell_all(message)

    def _of(self, number: int) -> End:
        return self._ends[(number - 1) % len(self._ends)]

    def _tell_model(self, fingerprint: bytes, message: kvstore_pb2.StoreToWorker) -> None:
        for end in self._ends:
            if end.shape.fingerprint == fingerprint:
                end.hear(message)


def _last_of(calls: int, then: Callable[[], None]) -> Callable[[], None]:
    """A function that calls `then` on its `calls`-th call; any thread."""
    left, lock = [calls], threading.Lock()

    def call() -> None:
        with lock:
            left[0] -= 1
            last = not left[0]
        if last:
            then()

    return call
