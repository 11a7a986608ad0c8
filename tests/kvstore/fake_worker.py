"""A worker without a model: it speaks Attach like the real one, maps the arena, writes and reads real bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import grpc
import numpy as np

from contracts import identity
from contracts.convert import layers_to_bitmap, manifest_to_wire, session_to_wire, shape_to_wire
from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from contracts.v1 import common_pb2
from contracts.v1 import kvstore_pb2 as pb
from contracts.v1.kvstore_pb2_grpc import KvStoreStub
from runtime import rpc
from storelink import credentials
from storelink.arena_sharing import SharedArena

LIMIT_S = 30.0


@dataclass
class Loaded:
    """What one load brought."""

    found: int = -1
    near: bool = False
    usable: int = -1
    pieces: dict[tuple[int, int], bytes] = field(default_factory=dict)
    order: list[tuple[int, int]] = field(default_factory=list)  #: (chunk, layer) as they came


class FakeWorker:
    """One attachment. Use as an async context manager."""

    def __init__(
        self,
        address: str,
        shapes: Sequence[KvShape],
        worker_id: str = "fake",
        device: int = 0,
        certificate: Path | None = None,
    ) -> None:
        """certificate: its node's directory, where the store asks for one."""
        self._address = address
        self._shapes = shapes
        self._worker_id, self._device, self._certificate = worker_id, device, certificate
        self._outgoing: asyncio.Queue[pb.WorkerToStore | None] = asyncio.Queue()
        self._ids = 0
        self._welcome: asyncio.Future[pb.AttachWelcome] = asyncio.get_running_loop().create_future()
        self._loads: dict[int, asyncio.Queue[pb.StoreToWorker | grpc.aio.AioRpcError]] = {}
        self._grants: dict[int, asyncio.Future[pb.SaveGrant]] = {}
        self.offers: asyncio.Queue[pb.PrefetchOffer] = asyncio.Queue()
        self.invalidated: asyncio.Queue[SessionKey] = asyncio.Queue()
        self.erased: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self.is_slow = False  #: it answers only when it is told to
        self._queries: list[int] = []
        self.hbm_answer = common_pb2.TierResidency(tier="hbm", tokens=0)

    async def __aenter__(self) -> FakeWorker:
        credentials.use(self._certificate)
        self.channel = rpc.channel(self._address, identity.node(self._certificate.name if self._certificate else ""))
        self.stub = KvStoreStub(self.channel)
        self._reading = asyncio.ensure_future(self._read())
        hello = pb.AttachHello(
            worker_id=self._worker_id, shapes=[shape_to_wire(s) for s in self._shapes], device=self._device
        )
        self._outgoing.put_nowait(pb.WorkerToStore(hello=hello))
        async with asyncio.timeout(LIMIT_S):
            welcome = await self._welcome
        self.node, self.arena_bytes = welcome.node, welcome.arena_bytes
        self.welcome = welcome
        self.shared = SharedArena(
            Path(welcome.arena_path), welcome.arena_bytes, welcome.nonce, welcome.attachment, "auto"
        )
        self.arena = self.shared.mapped
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._outgoing.put_nowait(None)
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._reading
        self.shared.leave()
        await self.channel.close(None)

    async def _read(self) -> None:
        async def requests():  # type: ignore[no-untyped-def]
            while (message := await self._outgoing.get()) is not None:
                yield message

        try:
            async for m in self.stub.Attach(requests(), wait_for_ready=True):
                self._heard(m)
        except grpc.aio.AioRpcError as e:
            self._lost(e)
            raise

    def _lost(self, error: grpc.aio.AioRpcError) -> None:
        """Nobody answers any more: whoever waits is told so."""
        for queue in self._loads.values():
            queue.put_nowait(error)
        for future in (self._welcome, *self._grants.values()):
            if not future.done():
                future.set_exception(error)

    def _heard(self, m: pb.StoreToWorker) -> None:
        kind = m.WhichOneof("kind")
        if kind == "welcome" and not self._welcome.done():
            self._welcome.set_result(m.welcome)
        elif kind in ("found", "pieces", "end"):
            queue = self._loads.get(getattr(m, kind).load_id)
            if queue is not None:
                queue.put_nowait(m)
        elif kind == "grant":
            self._grants.pop(m.grant.save_id).set_result(m.grant)
        elif kind == "offer":
            self.offers.put_nowait(m.offer)
        elif kind == "invalidate":
            self.invalidated.put_nowait(SessionKey(m.invalidate.tenant, m.invalidate.session_id))
        elif kind == "erase":
            self.erased.put_nowait(list(m.erase.keys))
        elif kind == "hbm_query":
            self._queries.append(m.hbm_query.query_id)
            if not self.is_slow:
                self.answer()

    def answer(self) -> None:
        """Say what is in HBM to whatever was asked; what is sent later is later for the store, too."""
        queries, self._queries = self._queries, []
        for query in queries:
            self.send(hbm=pb.HbmResidency(query_id=query, hbm=self.hbm_answer))

    def send(self, **kind: object) -> None:
        """Any message, for tests that misbehave."""
        self._outgoing.put_nowait(pb.WorkerToStore(**kind))  # type: ignore[arg-type]

    def _next(self) -> int:
        self._ids += 1
        return self._ids

    # ---- saving

    async def grant(
        self, session: SessionKey, shape: KvShape, keys: Sequence[bytes], request_id: str = "", trace: str = ""
    ) -> tuple[int, pb.SaveGrant]:
        """Ask for room; (save id, answer)."""
        save_id = self._next()
        future = self._grants[save_id] = asyncio.get_running_loop().create_future()
        request = pb.SaveRequest(
            save_id=save_id,
            session=session_to_wire(session),
            fingerprint=shape.fingerprint,
            keys=keys,
            request_id=request_id,
            trace=trace,
        )
        self.send(save=request)
        async with asyncio.timeout(LIMIT_S):  # not wait_for, which in Python 3.11 may swallow a cancellation
            return save_id, await future

    async def save(
        self,
        session: SessionKey,
        shape: KvShape,
        chunks: dict[bytes, list[bytes]],
        request_id: str = "",
        trace: str = "",
    ) -> pb.SaveGrant:
        """Write the chunks' pieces where room is granted and say so."""
        keys = list(chunks)
        save_id, grant = await self.grant(session, shape, keys, request_id, trace)
        offsets = iter(grant.offsets)
        for i in grant.indices:
            for piece in chunks[keys[i]]:
                offset = next(offsets)
                self.arena[offset : offset + shape.piece_bytes] = piece
        self.send(saved=pb.SaveDone(save_id=save_id, ok=list(grant.indices)))
        return grant

    def turn(self, manifest: Manifest) -> None:
        """The session's turn ended."""
        self.send(turn=pb.Turn(manifest=manifest_to_wire(manifest)))

    async def flush(self, timeout_s: float = LIMIT_S) -> pb.FlushReply:
        """Wait for write-back."""
        return await self.stub.Flush(pb.FlushRequest(timeout_s=timeout_s))

    async def residency(self, session: SessionKey, *, local: bool = False) -> pb.ResidencyReply:
        """What each tier holds."""
        return await self.stub.Residency(pb.ResidencyRequest(session=session_to_wire(session), local=local))

    # ---- loading

    async def load(
        self,
        shape: KvShape,
        keys: Sequence[bytes],
        *,
        session: SessionKey | None = None,
        sources: Sequence[str] = (),
        layers: Sequence[int] | None = None,
        prefetch: bool = False,
        take: bool = True,
        limit_s: float = LIMIT_S,
        request_id: str = "",
        trace: str = "",
    ) -> Loaded:
        """Load chunks to the end, copying each piece as it comes. `take` False leaves the leases. Raises AioRpcError
        without a store."""
        if self._reading.done():
            self._reading.result()
        load_id = self._next()
        queue = self._loads[load_id] = asyncio.Queue()
        bitmap = b"" if layers is None else layers_to_bitmap(layers, shape.layers)
        self.send(
            load=pb.LoadRequest(
                load_id=load_id,
                load_class=pb.PREFETCH if prefetch else pb.DEMAND,
                session=session_to_wire(session) if session else None,
                fingerprint=shape.fingerprint,
                chunks=[pb.ChunkWant(key=key, layers=bitmap) for key in keys],
                source_nodes=sources,
                request_id=request_id,
                trace=trace,
            )
        )
        loaded = Loaded()
        async with asyncio.timeout(limit_s):
            while loaded.usable < 0:
                message = await queue.get()
                if isinstance(message, grpc.aio.AioRpcError):
                    raise message
                self._step(loaded, message, shape, load_id, take)
        return loaded

    def _step(self, loaded: Loaded, m: pb.StoreToWorker, shape: KvShape, load_id: int, take: bool) -> None:
        kind = m.WhichOneof("kind")
        if kind == "found":
            loaded.found, loaded.near = m.found.chunks, m.found.near
        elif kind == "end":
            loaded.usable = m.end.usable
        else:
            assert loaded.found >= 0, "pieces before LoadFound"
            for chunk, layer, offset in zip(m.pieces.chunks, m.pieces.layers, m.pieces.offsets, strict=True):
                loaded.pieces[chunk, layer] = bytes(self.arena[offset : offset + shape.piece_bytes])
                loaded.order.append((chunk, layer))
            if take:
                self.send(taken=pb.LoadTaken(load_id=load_id, chunks=m.pieces.chunks, layers=m.pieces.layers))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that no message tells of."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - files and other processes set no events
            await asyncio.sleep(0.02)


def make_shape(
    layers: int = 6, *, tag: str = "model", kv_heads: int = 2, head_dim: int = 32, chunk_tokens: int = 64
) -> KvShape:
    """A small model's shape; its fingerprint follows from `tag`."""
    return KvShape.of_heads(tag.encode().ljust(32, b"."), layers, kv_heads, head_dim, chunk_tokens, "float32")


def make_chunks(shape: KvShape, count: int, seed: int = 0) -> dict[bytes, list[bytes]]:
    """Keys and random pieces of `count` chunks, the same for the same seed."""
    random = np.random.default_rng([seed, shape.layers])
    return {random.bytes(32): [random.bytes(shape.piece_bytes) for _ in range(shape.layers)] for _ in range(count)}


def make_manifest(session: SessionKey, shape: KvShape, keys: Sequence[bytes], last_use_s: float = 1.0) -> Manifest:
    """A manifest of these chunks."""
    return Manifest(session, "fake-model", shape.fingerprint, list(keys), len(keys) * shape.chunk_tokens, last_use_s)


def assert_pieces(loaded: Loaded, shape: KvShape, chunks: dict[bytes, list[bytes]]) -> None:
    """Every byte of every piece is what was saved."""
    assert loaded.usable == len(chunks), (loaded.found, loaded.usable)
    for i, pieces in enumerate(chunks.values()):
        for layer in range(shape.layers):
            assert loaded.pieces[i, layer] == pieces[layer], (i, layer)
