"""Listings and sweeps of more sessions than a node keeps in memory: complete, in pages, with bounded memory."""

from __future__ import annotations

import asyncio
import resource
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import obstore
import pytest
from blake3 import blake3
from obstore.store import MemoryStore

from contracts.cluster import secret_id
from contracts.convert import session_to_wire
from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from contracts.v1 import kvstore_pb2 as pb
from kvstore import upkeep
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.index import Index
from kvstore.core.named import Named
from kvstore.core.residency import Residency, residency
from kvstore.core.state import CopyState, PieceState
from kvstore.core.store import Store
from kvstore.core.tombstone import Tombstone
from kvstore.heeding import Heeding
from kvstore.members import Members
from kvstore.server import Server
from kvstore.tiers.blob import BlobTier, chunk_path
from kvstore.tiers.catalogue import Catalogue
from kvstore.tiers.manifests import decode_manifest, encode_manifest, manifest_path
from kvstore.tiers.objects import Objects
from kvstore.tiers.older_formats import OlderFormats
from kvstore.tiers.tombstones import Listing
from runtime.clock import RealClock
from tests.kvstore.tier_harness import KEYS

SHAPE = KvShape.of_heads(b"f" * 32, 2, 1, 8, 16, "float32")
CHUNKS = 4


def key(session: int, chunk: int) -> bytes:
    return blake3(b"%d %d" % (session, chunk)).digest()


class Sweeper:
    """What upkeep needs of a node: a core that keeps few manifests, and a blob tier. Deletions are carried out at
    once."""

    def __init__(self, store: object, most_sessions: int, folder: Path) -> None:
        self.clock = RealClock()
        self.catalogue = Catalogue(folder / "sessions.sqlite", "", partial(decode_manifest, KEYS), self.clock)
        self.write_back = SimpleNamespace(pending=0)
        self.name, self.confirms = "node-0", False
        self.members = Members(self.name, [self.name], folder)
        self.store = Store("node-0", 1 << 20, write_back_limit_bytes=1 << 20, most_sessions=most_sessions)
        self.blob = BlobTier(store, SimpleNamespace(), KEYS, None, self.catalogue)  # type: ignore[arg-type]
        self.older = OlderFormats(Objects(MemoryStore()))
        self.deleted: list[bytes] = []
        self.most_kept = 0
        self.handle(ev.ShapesDeclared("w", [SHAPE], 0.0))

    def handle(self, event: ev.Event) -> None:
        out = self.store.handle(event)
        self.deleted += [i.key for i in out if isinstance(i, do.DeleteBlob)]
        self.most_kept = max(self.most_kept, len(self.store.index.manifests))

    async def heed_tombstones(self) -> Listing:
        return Listing({}, complete=True)


async def fill(store: object, sessions: int) -> list[bytes]:
    """So many sessions, and a chunk of nobody's for every hundredth. Returns those."""
    orphans, objects = [], []
    for n in range(sessions):
        session = SessionKey(f"t{n % 7}", f"s{n}")
        keys = [key(n, c) for c in range(CHUNKS)]
        manifest = Manifest(session, "m", SHAPE.fingerprint, keys, 64, 1e9 + n)
        objects.append((manifest_path(session), encode_manifest(KEYS, manifest)))
        if n % 100 == 0:
            orphans.append(key(n, CHUNKS))
            objects += [(chunk_path(k, SHAPE.fingerprint), b"x") for k in (*keys, orphans[-1])]
        if len(objects) > 1000 or n + 1 == sessions:
            await asyncio.gather(*(obstore.put_async(store, path, data) for path, data in objects))
            objects.clear()
    return orphans


@pytest.fixture(params=["directory", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> object:
    return obstore.store.LocalStore(tmp_path / "blob", mkdir=True) if request.param == "directory" else MemoryStore()


async def test_a_sweep_of_more_sessions_than_are_kept_takes_every_orphan_and_nothing_that_a_session_names(
    store, tmp_path
) -> None:
    orphans = await fill(store, 2500)
    node = Sweeper(store, 1000, tmp_path)
    for _ in range(3):
        await upkeep.sweep_once(node, -60.0)
    assert sorted(node.deleted) == sorted(orphans)
    assert node.most_kept == 1000
    node.store.validate()


async def test_sessions_expire_though_there_are_more_than_are_kept(store, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(upkeep, "_CLOCKS_DIFFER_S", 0.0)
    await fill(store, 300)
    node = Sweeper(store, 100, tmp_path)
    unchanged = upkeep.Unchanged()
    wall = node.clock.wall
    limit = wall() - (1e9 + 250)
    assert await upkeep.expire_once(node, limit, unchanged) in (250, 251)


def test_a_manifest_that_names_something_here_is_kept_however_many_there_are() -> None:
    core = Store("node-0", 1 << 20, write_back_limit_bytes=1 << 20, most_sessions=2)
    core.handle(ev.ShapesDeclared("w", [SHAPE], 0.0))
    core.handle(ev.Recovered([ev.FoundCopy(key(9, 0), SHAPE, (1, 2))]))
    page = [Manifest(SessionKey("t", f"s{n}"), "m", SHAPE.fingerprint, [key(n, 0)], 16, float(n)) for n in range(12)]
    core.handle(ev.ManifestsListed(page, 1.0, True, 20.0))
    assert {s.session_id for s in core.index.manifests} == {"s1", "s9"}
    core.handle(ev.ManifestFetched(SessionKey("t", "s5"), page[5], 2.0))
    assert SessionKey("t", "s5") in core.index.manifests, "somebody asked for it"
    core.handle(ev.ManifestsListed([], 3.0, True, 20.0))
    assert len(core.index.manifests) == 2 and SessionKey("t", "s9") in core.index.manifests
    core.validate()


def test_what_was_named_is_never_taken_for_nobodys() -> None:
    named, keys = Named(), [key(n, 0) for n in range(5000)]
    assert keys[0] not in named
    named.add(keys)
    assert all(k in named for k in keys)
    assert sum(key(n, 1) in named for n in range(5000)) < 5


async def test_who_asks_for_a_session_while_the_same_is_being_answered_gets_that_answer() -> None:
    core, asked = Store("node-0", 1 << 20, write_back_limit_bytes=1 << 20), []

    async def get_manifest(session: SessionKey) -> None:
        asked.append(session.session_id)
        await asyncio.sleep(0.01)

    server = Server(SimpleNamespace(store=core, blob=SimpleNamespace(get_manifest=get_manifest)))  # type: ignore[arg-type]
    requests = [pb.ResidencyRequest(session=session_to_wire(SessionKey("t", name))) for name in ["a"] * 100 + ["b"]]
    replies = await asyncio.gather(*(server.Residency(request, None) for request in requests))
    assert asked == ["a", "b"] and not any(reply.known for reply in replies)
    await server.Residency(requests[0], None)
    assert asked == ["a", "b", "a"], "later it is asked anew"


async def test_many_tombstones_are_heeded_in_parts_and_are_one_complete_list() -> None:
    core, parts = Store("node-0", 1 << 20, write_back_limit_bytes=1 << 20), []
    buried = {f"{n}": Tombstone(SessionKey("t", f"s{n}"), 1, {}) for n in range(1200)}
    listing = Listing(buried, complete=True)

    async def list_all() -> Listing:
        return listing

    async def is_gone(name: str) -> bool:
        return False

    def handle(event: ev.TombstonesListed) -> None:
        parts.append(len(event.tombstones))
        core.handle(event)

    blob = SimpleNamespace(tombstones=SimpleNamespace(list_all=list_all, is_gone=is_gone))
    node = SimpleNamespace(name="node-0", clock=RealClock(), blob=blob, handle=handle)
    heeding = Heeding(node, alone=True)  # type: ignore[arg-type]
    for _ in range(3):
        await heeding.heed()
    assert parts == [500, 500, 200] * 3 and len(core.erasure.graves) == 1200
    listing = Listing({"7": buried["7"]}, complete=True)
    for _ in range(2):
        await heeding.heed()
    assert list(core.erasure.graves) == [SessionKey("t", "s7")], "what complete lists lack is forgotten"
    core.validate()


def test_a_tiers_holdings_are_counted_by_layer() -> None:
    index, shape = Index(), KvShape.of_heads(b"g" * 32, 3, 1, 8, 16, "float32")
    keys = [key(1, n) for n in range(5)]
    for chunk in (index.chunk(k, shape) for k in keys[:4]):
        assert chunk is not None
        for layer in range(3 if chunk.key in keys[:2] else 1):
            for state in (PieceState.QUEUED, PieceState.LOADING, PieceState.READY):
                index.set_piece(chunk, layer, state, layer)
        index.set_copy(chunk, "ssd", CopyState.PRESENT)
    assert residency(index.chunks, keys, "dram") == Residency([4, 2, 2], 32, 8 * shape.piece_bytes)
    assert residency(index.chunks, keys, "ssd") == Residency([4, 4, 4], 64, 4 * shape.chunk_bytes)
    assert residency(index.chunks, keys, "blob") == Residency([0, 0, 0], 0, 0)
    assert residency(index.chunks, keys[4:], "dram") == Residency()


@pytest.mark.slow
@pytest.mark.timeout(3000)
async def test_a_sweep_of_a_million_sessions(capsys, tmp_path) -> None:
    memory = MemoryStore()
    sessions = 1_000_000
    orphans = await fill(memory, sessions)
    node = Sweeper(memory, 100_000, tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(3):
        began = time.monotonic()
        await upkeep.sweep_once(node, -60.0)
        seconds.append(time.monotonic() - began)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    with capsys.disabled():
        print(
            f"\na sweep of {sessions} sessions: {', '.join(f'{s:.0f}' for s in seconds)} s, {grown} MiB more memory",
            flush=True,
        )
    assert set(node.deleted) == set(orphans)
    assert grown < 1500


async def test_what_expires_leaves_chunks_that_sessions_in_use_name(store, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(upkeep, "_CLOCKS_DIFFER_S", 0.0)
    shared, idle_s = key(0, 0), 1000.0
    node = Sweeper(store, 1, tmp_path)
    now = node.clock.wall()
    for n, used_s in (("idle", now - 2 * idle_s), ("busy", now), ("later", now)):
        keys = [shared, blake3(n.encode()).digest()]
        manifest = Manifest(SessionKey("t", n), "m", SHAPE.fingerprint, keys, 32, used_s)
        await obstore.put_async(store, manifest_path(manifest.session), encode_manifest(KEYS, manifest))
    assert await upkeep.expire_once(node, idle_s, upkeep.Unchanged()) == 1
    assert node.deleted == [blake3(b"idle").digest()]


async def test_a_session_that_another_node_has_used_meanwhile_does_not_expire(store, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(upkeep, "_CLOCKS_DIFFER_S", 0.0)
    node, used = Sweeper(store, 10, tmp_path), SessionKey("t", "s")
    old = Manifest(used, "m", SHAPE.fingerprint, [key(0, 0)], 16, 1e9)
    await obstore.put_async(store, manifest_path(used), encode_manifest(KEYS, old))
    idle = node.catalogue.idle

    async def idle_then_used(*given: object) -> object:
        found = await idle(*given)  # type: ignore[arg-type]
        new = replace(old, last_use_s=node.clock.wall())
        await obstore.put_async(store, manifest_path(used), encode_manifest(KEYS, new))
        return found

    node.catalogue.idle = idle_then_used  # type: ignore[method-assign, assignment]
    assert await upkeep.expire_once(node, 1000.0, upkeep.Unchanged()) == 0 and not node.deleted


async def test_a_bucket_of_another_fleet_is_nothing_to_keep_up(store, tmp_path) -> None:
    node = Sweeper(store, 10, tmp_path)
    assert await upkeep.check_owner(node, secret_id(b"a" * 32), "it")  # type: ignore[arg-type]
    times = iter((0.0, 1000.0))
    node.clock.now = lambda: next(times)  # type: ignore[method-assign]
    assert not await upkeep.check_owner(node, secret_id(b"b" * 32), "it")  # type: ignore[arg-type]
