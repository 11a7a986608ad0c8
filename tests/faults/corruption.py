"""Damaged objects, read by a store: which damage it noticed, and that it served nothing else.

One batch is one life of a real `StoreNode` in this process, without gRPC: objects are put on its SSD and into its blob
tier as an earlier life would have left them, damaged before it starts or while it runs, and then all are loaded. A load
either ends without the chunk, whose copy is then deleted, or brings exactly the bytes that were saved, which only
damage outside all pieces allows.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from contracts.ids import SessionKey
from contracts.kv import KvShape
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.instructions import WriteSsd
from kvstore.node import StoreNode
from kvstore.tiers import nixl
from kvstore.tiers.arena import Arena
from kvstore.tiers.cluster_keys import ClusterKeys
from kvstore.tiers.file_io import ThreadFileIo
from kvstore.tiers.format import object_bytes, piece_offset
from kvstore.tiers.key_names import KeyName
from kvstore.tiers.objects import ROOT
from kvstore.tiers.sealing import SessionSecret
from kvstore.tiers.session_keys import encode_key
from kvstore.tiers.ssd import SsdTier, folder_name
from runtime import telemetry
from runtime.clock import RealClock
from runtime.config import Config
from runtime.config_file import load_config
from runtime.directory_lock import DirectoryLock
from runtime.service import Tasks
from tests.faults import damage
from tests.kvstore.fake_worker import make_chunks, make_shape

#: One with pieces of whole blocks, one with padding after each piece.
SHAPES = [make_shape(2, tag="even", chunk_tokens=8), make_shape(3, tag="odd", chunk_tokens=10, head_dim=20)]
CHUNKS = 64
LIMIT_S = 60.0
OWNER = "test"
#: How often a copy that was neither served nor deleted is asked for again.
_AGAIN = 4


@dataclass(frozen=True)
class Pristine:
    """An object as it was written, and what is in it."""

    key: bytes
    shape: KvShape
    pieces: list[bytes]
    stored: list[bytes]  #: the pieces, encrypted if the object is
    data: bytes

    def harmed(self, data: bytes, first: int) -> bool:
        """Whether any piece, from layer `first` on, of the object with these bytes differs from what was saved."""
        starts = [piece_offset(self.shape, layer) for layer in range(self.shape.layers)]
        return any(
            data[at : at + len(piece)] != piece for at, piece in list(zip(starts, self.stored, strict=True))[first:]
        )


@dataclass
class Seen:
    """What became of damaged objects. `harmless`: read right, as the damage was outside all pieces. `kinds`: of the
    detected."""

    detected: int = 0
    harmless: int = 0
    untouched: int = 0
    kinds: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Seen) -> Seen:
        sums = (getattr(self, name) + getattr(other, name) for name in ("detected", "harmless", "untouched", "kinds"))
        return Seen(*sums)


class Reader:
    """An owner of loads that copies pieces out of the arena like a worker."""

    def __init__(self, node: StoreNode) -> None:
        self._node = node
        self._ends: dict[str, asyncio.Future[int]] = {}
        self._shapes: dict[str, KvShape] = {}
        self.pieces: dict[tuple[str, int], bytes] = {}

    async def load(self, key: bytes, shape: KvShape, layers: tuple[int, ...] = ()) -> int:
        """Whether the chunk is usable; its pieces are in `pieces` by (key, layer)."""
        name = key.hex() + str(len(self._ends))
        self._shapes[name] = shape
        end = self._ends[name] = asyncio.get_running_loop().create_future()
        wants = [(key, layers)]
        self._node.handle(
            ev.LoadWanted(
                (OWNER, name), ev.LoadKind.DEMAND, None, shape.fingerprint, wants, (), 0, self._node.clock.now()
            )
        )
        return await asyncio.wait_for(end, LIMIT_S)

    def answer(self, instruction: do.Found | do.Pieces | do.End | do.Grant) -> None:
        """Owner.answer"""
        if isinstance(instruction, do.Pieces):
            name = instruction.load[1]
            size = self._shapes[name].piece_bytes
            for _, layer, offset, _ in instruction.pieces:
                self.pieces[name[:64], layer] = bytes(self._node.arena.view[offset : offset + size])
            taken = [(p[0], p[1]) for p in instruction.pieces]
            loop = asyncio.get_running_loop()
            loop.call_soon(self._node.handle, ev.PiecesTaken(instruction.load, taken, self._node.clock.now()))
        elif isinstance(instruction, do.End):
            self._ends[instruction.load[1]].set_result(instruction.usable)


def write_pristine(directory: Path, seed: int, keys: ClusterKeys, secret: SessionSecret | None) -> list[Pristine]:
    """Objects of random content, written by the SSD tier; encrypted with `secret`, if there is one."""
    arena = Arena(directory / "arena", 4 << 20)
    io = ThreadFileIo(arena)
    tier = SsdTier(directory / "ssd", arena, keys, io, io)
    made: list[Pristine] = []
    for i, shape in enumerate(SHAPES):
        for key, pieces in make_chunks(shape, CHUNKS, seed + i).items():
            offsets = tuple(layer * shape.piece_bytes for layer in range(shape.layers))
            for offset, piece in zip(offsets, pieces, strict=True):
                arena.view[offset : offset + len(piece)] = piece
            sums = tuple(arena.checksum(offset, shape.piece_bytes) for offset in offsets)
            tier.write([WriteSsd(key, shape, offsets, sums)], {key: secret} if secret is not None else {})
            data = tier.path(key, shape.fingerprint).read_bytes()
            assert len(data) == object_bytes(shape)
            starts = [piece_offset(shape, layer) for layer in range(shape.layers)]
            stored = [data[start : start + shape.piece_bytes] for start in starts]
            assert (stored == pieces) == (secret is None)
            made.append(Pristine(key, shape, pieces, stored, data))
    tier.close()
    arena.close()
    shutil.rmtree(directory)
    return made


class Harness:
    """Where the batches run."""

    def __init__(self, directory: Path, first_port: int, seed: int, *, encrypt: bool) -> None:
        overrides = {
            "data": str(directory / "data"),
            "run_dir": str(directory / "run"),
            "shm_dir": str(directory),
            "nodes": {"base_port": first_port, "count": 1},
            "kv": {"dram_gib": 1 / 64, "transport": "socket", "file_io": "threads", "encrypt": encrypt},
        }
        self._config: Config = load_config(None, overrides)
        self._ssd, self._blob = self._config.node(0).ssd, self._config.data / "blob" / ROOT / "chunks"
        self._secret = random.Random(seed).randbytes(32)
        keys = ClusterKeys(self._secret)
        session = SessionKey("tenant", "session")
        self._session = SessionSecret(KeyName(keys.tag(session), 0, bytes(8)), os.urandom(32)) if encrypt else None
        self._wrapped = encode_key(keys, session.tenant, self._session) if self._session is not None else b""
        self._pristine = write_pristine(directory / "pristine", seed, keys, self._session)

    def _place(self, root: Path, chunk: Pristine) -> Path:
        return root / folder_name(chunk.shape.fingerprint) / chunk.key.hex()

    async def batch(self, rng: random.Random, seen: Seen) -> None:
        """One life: every object is damaged once, a few not at all."""
        shutil.rmtree(self._config.data, ignore_errors=True)
        self._config.data.mkdir(parents=True)
        (self._config.data / "secret").write_text(self._secret.hex())
        if self._session is not None:
            path = self._config.data / "blob" / ROOT / self._session.name.path
            path.parent.mkdir(parents=True)
            path.write_bytes(self._wrapped)
        chunks = rng.sample(self._pristine, len(self._pristine))
        files: dict[Path, Pristine] = {}
        for i, chunk in enumerate(chunks):
            path = self._place(self._ssd if i % 2 else self._blob, chunk)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(chunk.data)
            files[path] = chunk
        early = rng.random() < 0.5
        kinds = self._damage(rng, files) if early else {}
        held = {path: path.read_bytes() for path in files}
        tasks = Tasks()
        lock = DirectoryLock(self._config.node(0).directory / "lock", "store")
        node = StoreNode(self._config, 0, RealClock(), tasks, lock)
        reader = Reader(node)
        before, detected = _counted(), seen.detected
        try:
            await node.start()
            node.owners[OWNER] = reader
            node.handle(ev.ShapesDeclared(OWNER, SHAPES, node.clock.now()))
            if not early:
                # What the blob tier has becomes known by a read of one layer; the rest of it is damaged after that.
                known = [c for p, c in files.items() if p.is_relative_to(self._blob)]
                await _read_first_layers(reader, known)
                kinds = self._damage(rng, files)
                held = {path: path.read_bytes() for path in files}
            usable = await asyncio.gather(*(reader.load(c.key, c.shape) for c in files.values()))
            await node.flush(LIMIT_S)
            for _ in range(_AGAIN):
                bad = {path: i for i, (path, whole) in enumerate(zip(files, usable, strict=True)) if not whole}
                await _until_gone(list(bad))
                # A busy machine may have answered too late, so that nobody looked at the copy.
                for path, i in bad.items():
                    if path.exists():
                        usable[i] = await reader.load(files[path].key, files[path].shape)
            for (path, chunk), whole in zip(files.items(), usable, strict=True):
                self._judge(path, chunk, held[path], bool(whole), kinds.get(path, ""), reader, seen, early=early)
            assert not tasks.failed.done()
        finally:
            await tasks.cancel()
            await node.stop()
            lock.release()
            node.arena._map.madvise(mmap.MADV_REMOVE)  # a store's pages stay until its process ends
        assert _counted() - before >= seen.detected - detected, "damage was detected and not counted"

    def _damage(self, rng: random.Random, files: dict[Path, Pristine]) -> dict[Path, str]:
        """Damage nearly all; what was done to each. Objects that are damaged together belong to one tier and one
        model."""
        kinds: dict[Path, str] = {}
        groups: dict[Path, list[Path]] = {}
        for path in files:
            groups.setdefault(path.parent, []).append(path)
        for group in groups.values():
            left = rng.sample(group, len(group))
            while len(left) > 2:
                how = rng.choices(list(damage.KINDS), list(damage.KINDS.values()))[0]
                for path in left[: how(rng, left)]:
                    kinds[path] = how.__name__
                    left.remove(path)
        return kinds

    def _judge(
        self,
        path: Path,
        chunk: Pristine,
        held: bytes,
        whole: bool,
        kind: str,
        reader: Reader,
        seen: Seen,
        *,
        early: bool,
    ) -> None:
        what = f"{kind or 'nothing'} {'before' if early else 'after'} the start, {path}"
        for layer, piece in enumerate(chunk.pieces):
            got = reader.pieces.get((chunk.key.hex(), layer))
            assert got is None or got == piece, f"wrong bytes in layer {layer}: {what}"
            assert got is not None or not whole, f"usable without layer {layer}: {what}"
        if not kind:
            assert whole, f"a sound chunk was not served: {what}"
            seen.untouched += 1
        elif whole:
            came_before = int(not early and path.is_relative_to(self._blob))
            assert not chunk.harmed(held, came_before), f"served although no copy is right: {what}"
            seen.harmless += 1
        else:
            assert not path.exists(), f"the bad copy stays: {what}"
            seen.detected += 1
            seen.kinds[f"{'ssd' if self._ssd in path.parents else 'blob'}.{kind}"] += 1


async def corrupt(directory: Path, first_port: int, seed: int, wanted: int, *, encrypt: bool = False) -> Seen:
    """So many damaged objects that were noticed. Raises AssertionError with the seed when something else was."""
    harness, seen, number = Harness(directory, first_port, seed, encrypt=encrypt), Seen(), 0
    while seen.detected < wanted:
        try:
            await harness.batch(random.Random(f"{seed}/{number}"), seen)
        except BaseException as e:
            e.add_note(f"UPBEAT_FAULTS_SEED={seed}, batch {number}")
            raise
        number += 1
    return seen


def corrupt_in_process(directory: Path, first_port: int, seed: int, wanted: int, encrypt: bool) -> Seen:
    """The same, in a process of its own."""
    telemetry.configure_logs("corruption", "error")
    nixl.set_environment("lo")
    return asyncio.run(corrupt(directory, first_port, seed, wanted, encrypt=encrypt))


async def _read_first_layers(reader: Reader, chunks: list[Pristine]) -> None:
    """Sound chunks can all be read. A store leaves a tier alone for a while when the disk stalls."""
    deadline = asyncio.get_running_loop().time() + LIMIT_S
    while chunks:
        usable = await asyncio.gather(*(reader.load(c.key, c.shape, (0,)) for c in chunks))
        chunks = [c for c, whole in zip(chunks, usable, strict=True) if not whole]
        assert not chunks or asyncio.get_running_loop().time() < deadline, f"{len(chunks)} sound chunks were not served"
        if chunks:
            await asyncio.sleep(0.5)


async def _until_gone(paths: list[Path]) -> None:
    """Give deletions, which nobody waits for, time to happen."""
    deadline = asyncio.get_running_loop().time() + LIMIT_S / 20
    while any(p.exists() for p in paths) and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def _counted() -> int:
    """Damage that the store's metrics tell of: files at start, headers and pieces later."""
    read = telemetry.REGISTRY.get_sample_value
    total = read("upbeat_kvstore_events_total", {"what": "ssd_files_deleted_at_start"}) or 0
    total += read("upbeat_kvstore_events_total", {"what": "blob_headers_damaged"}) or 0
    return int(
        total + sum(read("upbeat_kvstore_checksum_failures_total", {"source": tier}) or 0 for tier in ("ssd", "blob"))
    )
