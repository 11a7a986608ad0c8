"""An engine of nothing but chunks: saves what it is told to, loads it again, and says what came.

`python -m tests.storelink.plain_client ADDRESS`: two chunks whose pieces are a latent a token, with an adapter in their
keys. Exits with an error when a byte is not what was saved.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys

from contracts.convert import manifest_to_wire, session_to_wire
from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest, chunk_keys, fingerprint, tenant_salt
from contracts.v1 import kvstore_pb2 as pb
from storelink.core.load_plan import LoadRate, Missing, Prefill, Source, plan
from storelink.ends import ArenaGone, ArenaHere, End
from storelink.link import StoreLink
from storelink.log import PythonLog

TOKENS, LAYERS, VALUES = 32, 3, 576
SHAPE = KvShape(
    fingerprint(b"weights", dtype="bfloat16", chunk_tokens=TOKENS, layout=b"plain"),
    LAYERS,
    1,
    VALUES,
    TOKENS,
    "bfloat16",
    TOKENS * VALUES * 2,
)
SESSION = SessionKey("tenant", "a-session")
LIMIT_S = 30


class PlainClient:
    """One model's end of a link. What comes waits in queues, in order."""

    def __init__(self, address: str) -> None:
        self.attached: asyncio.Queue[bool] = asyncio.Queue()
        self.heard: asyncio.Queue[pb.StoreToWorker] = asyncio.Queue()
        self.moves: asyncio.Queue[object] = asyncio.Queue()
        end = End(SHAPE, self.attached.put_nowait, self.heard.put_nowait, self._move)
        self.link = StoreLink(address, "plain", [end], PythonLog(logging.getLogger("upbeat")))
        self.arena = memoryview(b"")

    def _move(self, message: object) -> None:
        if isinstance(message, ArenaHere):
            self.arena = message.arena
        elif isinstance(message, ArenaGone):
            self.arena = memoryview(b"")
            message.left()  # nothing is copied here
            message.left()
        else:
            self.moves.put_nowait(message)

    def piece(self, offset: int) -> memoryview:
        """A piece's bytes in the arena."""
        return self.arena[offset : offset + SHAPE.piece_bytes]

    async def save(self, pieces: dict[bytes, list[bytes]]) -> None:
        """All of it. Raises AssertionError when the store has no room."""
        keys = list(pieces)
        wanted = pb.SaveRequest(save_id=1, session=session_to_wire(SESSION), fingerprint=SHAPE.fingerprint, keys=keys)
        self.link.send(pb.WorkerToStore(save=wanted))
        grant = await self.moves.get()
        assert isinstance(grant, pb.SaveGrant) and list(grant.indices) == list(range(len(keys))), grant
        for at, offset in enumerate(grant.offsets):
            chunk, layer = divmod(at, LAYERS)
            self.piece(offset)[:] = pieces[keys[chunk]][layer]
        self.link.send(pb.WorkerToStore(saved=pb.SaveDone(save_id=1, ok=grant.indices)))
        manifest = Manifest(SESSION, "plain", SHAPE.fingerprint, keys, len(keys) * TOKENS, 1.0)
        self.link.send(pb.WorkerToStore(turn=pb.Turn(manifest=manifest_to_wire(manifest))))

    async def load(self, keys: list[bytes]) -> dict[tuple[int, int], bytes]:
        """What came, by chunk and layer; all of it, or AssertionError."""
        chunks = [pb.ChunkWant(key=key) for key in keys]
        wanted = pb.LoadRequest(
            load_id=1, session=session_to_wire(SESSION), fingerprint=SHAPE.fingerprint, chunks=chunks
        )
        self.link.send(pb.WorkerToStore(load=wanted))
        found = (await self.heard.get()).found
        missing = [Missing(LAYERS, Source(source)) for source in found.sources]
        chosen = plan(missing, {Source.DRAM: LoadRate(1e-3, 1e-5)}, Prefill(1, 1e-2, TOKENS, LAYERS))
        assert chosen.chunks == found.chunks == len(keys), "bringing it from DRAM is sooner than computing it"
        came: dict[tuple[int, int], bytes] = {}
        while not isinstance(message := await self.moves.get(), pb.LoadEnd):
            assert isinstance(message, pb.LoadPieces), message
            for chunk, layer, offset in zip(message.chunks, message.layers, message.offsets, strict=True):
                came[chunk, layer] = bytes(self.piece(offset))
            taken = pb.LoadTaken(load_id=1, chunks=message.chunks, layers=message.layers)
            self.link.send(pb.WorkerToStore(taken=taken))
        assert message.usable == len(keys)
        return came


async def main(address: str) -> None:
    """See the module."""
    client, draw = PlainClient(address), random.Random(0)
    running = asyncio.ensure_future(client.link.run())
    assert await asyncio.wait_for(client.attached.get(), LIMIT_S)
    keys = chunk_keys(
        tenant_salt(b"s" * 32, SESSION.tenant), SHAPE, list(range(2 * TOKENS + 5)), extras={0: b"adapter"}
    )
    pieces = {key: [draw.randbytes(SHAPE.piece_bytes) for _ in range(LAYERS)] for key in keys}
    await asyncio.wait_for(client.save(pieces), LIMIT_S)
    came = await asyncio.wait_for(client.load(keys), LIMIT_S)
    assert came == {(i, layer): pieces[key][layer] for i, key in enumerate(keys) for layer in range(LAYERS)}
    running.cancel()
    assert not await asyncio.wait_for(client.attached.get(), LIMIT_S) and not len(client.arena)
    print(f"{len(keys)} chunks, {len(came)} pieces")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
