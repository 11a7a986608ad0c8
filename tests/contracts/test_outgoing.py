"""Messages that wait are joined; their order stays, and what was taken is never changed."""

from __future__ import annotations

import asyncio

from contracts.v1 import kvstore_pb2 as pb
from kvstore.attachment import _join
from runtime.outgoing import Outgoing


def pieces(load: int, *chunks: int) -> pb.StoreToWorker:
    return pb.StoreToWorker(pieces=pb.LoadPieces(load_id=load, chunks=chunks, layers=chunks, offsets=chunks))


async def taken(outgoing: Outgoing[pb.StoreToWorker]) -> list[tuple[str, int, list[int]]]:
    found = []
    while (message := await outgoing.get()) is not None:
        kind = message.WhichOneof("kind")
        found.append((kind, getattr(message, kind).load_id, list(getattr(message.pieces, "offsets", ()))))
    return found


async def test_pieces_of_one_load_that_wait_are_one_message_and_nothing_passes_anything() -> None:
    outgoing = Outgoing(_join)
    for message in (
        pieces(1, 0),
        pieces(1, 1, 2),
        pieces(2, 3),
        pieces(1, 4),
        pb.StoreToWorker(end=pb.LoadEnd(load_id=1)),
        pieces(2, 5),
        None,
    ):
        outgoing.put(message)
    expected = [("pieces", 1, [0, 1, 2]), ("pieces", 2, [3]), ("pieces", 1, [4]), ("end", 1, []), ("pieces", 2, [5])]
    assert await taken(outgoing) == expected


async def test_what_was_taken_stays_as_it_was() -> None:
    outgoing = Outgoing(_join)
    outgoing.put(pieces(1, 0))
    first = await outgoing.get()
    outgoing.put(pieces(1, 1))
    second = await outgoing.get()
    assert first is not None and second is not None
    assert list(first.pieces.chunks) == [0] and list(second.pieces.chunks) == [1]


async def test_whoever_waits_is_woken() -> None:
    outgoing = Outgoing(_join)
    waiting = asyncio.ensure_future(taken(outgoing))
    for chunk in range(3):
        await asyncio.sleep(0)
        outgoing.put(pieces(7, chunk))
    outgoing.put(None)
    assert [offset for _, _, offsets in await asyncio.wait_for(waiting, 10) for offset in offsets] == [0, 1, 2]
