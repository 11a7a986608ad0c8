"""One cycle of a store's death: a life that ends at a failpoint in the middle of work, and the next one, in which every
byte is checked.

A cycle begins with what an earlier life left behind (`Before`: sessions on the SSD, sessions that only the blob tier
has, sessions to be erased), so that recovery, reads and deletions have something to do. Content is random and known to
the test by chunk key.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from contracts.convert import session_to_wire
from contracts.ids import SessionKey
from contracts.kv import KvShape
from contracts.v1 import common_pb2
from contracts.v1 import scheduler_pb2 as pb
from kvstore.tiers.cluster_keys import ClusterKeys
from kvstore.tiers.encoded import Opened
from kvstore.tiers.format import Header, decode_header, header_length, object_bytes, piece_offset
from kvstore.tiers.manifests import decode_manifest
from kvstore.tiers.objects import ROOT
from kvstore.tiers.sealing import SessionSecret
from kvstore.tiers.session_keys import decode_key
from runtime.config_file import cluster_secret, dump_config, load_config
from tests.faults.forks import ClockedStack
from tests.kvstore.fake_scheduler import FakeScheduler
from tests.kvstore.fake_worker import FakeWorker, Loaded, make_chunks, make_manifest, make_shape

LIMIT_S = 30.0
#: Sweeps fall into most lives, and a turn on a busy machine ends sooner.
ORPHAN_GRACE_S = 3.0
#: Two models, one of them with pieces that fill no whole number of blocks.
SHAPES = [make_shape(4, tag="even", chunk_tokens=16), make_shape(3, tag="odd", chunk_tokens=16, head_dim=20)]
_CHUNK = re.compile("[0-9a-f]{64}")
_STAGED = re.compile(r"#\d+$")


@dataclass
class Session:
    """What the test knows of one session."""

    key: SessionKey
    shape: KvShape
    chunks: dict[bytes, list[bytes]]


@dataclass
class Known:
    """What the test knows of everything. `durable`: chunks of which a flush said that every tier has them."""

    sessions: dict[str, Session] = field(default_factory=dict)
    content: dict[bytes, list[bytes]] = field(default_factory=dict)
    durable: set[bytes] = field(default_factory=set)
    erased: list[Session] = field(default_factory=list)
    erasing: Session | None = None

    def make(self, name: str, chunks: int, seed: int) -> Session:
        """A new session of random content."""
        shape = SHAPES[seed % len(SHAPES)]
        session = Session(SessionKey("default", name), shape, make_chunks(shape, chunks, seed))
        self.sessions[name] = session
        self.content.update(session.chunks)
        return session

    def copy(self) -> Known:
        """One to go on with."""
        return Known(dict(self.sessions), dict(self.content), set(self.durable))

    def check(self, loaded: Loaded, keys: list[bytes]) -> int:
        """Every piece that was handed over is what was saved; how many there were."""
        for (i, layer), data in loaded.pieces.items():
            assert data == self.content[keys[i]][layer], f"wrong bytes in layer {layer} of {keys[i].hex()}"
        return len(loaded.pieces)


class Lane:
    """A directory and ports in which one cycle after the other runs."""

    def __init__(self, directory: Path, first_port: int, **kv: object) -> None:
        overrides = {
            "data": str(directory / "data"),
            "run_dir": str(directory / "run"),
            "shm_dir": "/dev/shm" if os.access("/dev/shm", os.W_OK) else str(directory),
            "nodes": {"base_port": first_port, "count": 2},
            "scheduler": {"port": first_port + 35},
            "gateway": {"port": first_port + 36},
            "kv": {"dram_gib": 1 / 64, "orphan_grace_s": ORPHAN_GRACE_S, **kv},
        }
        directory.mkdir(parents=True, exist_ok=True)
        config = load_config(None, overrides)
        file = directory / "config.yaml"
        file.write_text(dump_config(config))
        self.stack = ClockedStack(config, file)
        self.data = config.data
        self.ssd = config.node(0).ssd
        self.blob = config.data / "blob" / ROOT

    @property
    def keys(self) -> ClusterKeys:
        """Those of the data that it has now: each cycle begins with a copy, and its secret."""
        return ClusterKeys(cluster_secret(self.data))

    async def start(self, node: int, **settings: str) -> subprocess.Popen[bytes]:
        """Start a store; on return it listens or has ended. `settings`: of its `kv` section."""
        self.stack.start(node, {f"UPBEAT__KV__{name.upper()}": value for name, value in settings.items()})
        process = self.stack.processes[node]
        host, port = self.stack.address(node).split(":")
        async with asyncio.timeout(LIMIT_S):
            while process.poll() is None:
                try:
                    _, writer = await asyncio.open_connection(host, int(port))
                    writer.close()
                    break
                except OSError:
                    await asyncio.sleep(0.02)
        return process

    def secret_of(self, header: Header) -> SessionSecret | None:
        """The key that the object is encrypted with, if it is; None also when the key is not in the blob tier."""
        path = self.blob / header.seal.key.path if header.seal is not None else None
        if header.seal is None or path is None or not path.exists():
            return None
        return decode_key(self.keys, header.seal.key, path.read_bytes())

    def kill(self) -> None:
        """End every store."""
        for node, process in self.stack.processes.items():
            if process.poll() is None:
                self.stack.signal(node, signal.SIGKILL)

    def objects(self) -> dict[str, list[Path]]:
        """Files of node 0's SSD, and chunks and manifests of the blob tier, by name."""
        found: dict[str, list[Path]] = {}
        for root in (self.ssd, self.blob / "chunks", self.blob / "manifests"):
            for path in root.rglob("*"):
                if path.is_file():
                    found.setdefault(path.name, []).append(path)
        return found


async def prepare(lane: Lane) -> Known:
    """The life before: three sessions on the SSD, two that only the blob tier has, three to be erased."""
    known = Known()
    names = [f"{kind}-{i}" for kind in ("kept", "far", "gone") for i in range(3)]
    await lane.start(0)
    async with FakeWorker(lane.stack.address(0), SHAPES) as worker:
        for seed, name in enumerate(names):
            session = known.make(name, 4, seed)
            await worker.save(session.key, session.shape, session.chunks)
            worker.turn(make_manifest(session.key, session.shape, list(session.chunks)))
        while not all(name in lane.objects() for name in names):
            assert (await worker.flush()).complete
            await asyncio.sleep(0.02)
    lane.kill()
    for name in names:
        for key in known.sessions[name].chunks:
            if name.startswith("far"):
                next(lane.ssd.rglob(key.hex())).unlink()
    known.durable = set(known.content)
    return known


# ---- the life that ends


class Life:
    """Work of a store until it dies. Steps come in random order, again and again; each one checks every byte that it is
    given."""

    def __init__(
        self, lane: Lane, known: Known, worker: FakeWorker, scheduler: FakeScheduler, rng: random.Random
    ) -> None:
        self.lane = lane
        self.known = known
        self.worker = worker
        self.scheduler = scheduler
        self.rng = rng
        self.saved: set[bytes] = set()
        self._name = f"{rng.randrange(1 << 30)}"
        self._numbers = 0

    async def work(self) -> None:
        """One round of everything."""
        steps: list[Callable[[], Awaitable[object]]] = [
            self.load_near,
            self.load_far,
            self.erase,
            self.save,
            self.save,
            self.flush,
            self.advise,
        ]
        self.rng.shuffle(steps)
        for step in steps:
            await step()

    async def save(self) -> Session:
        """A session of several turns, each some chunks longer."""
        self._numbers += 1
        seed = self.rng.randrange(1 << 30)
        session = self.known.make(f"new-{self._name}-{self._numbers}", self.rng.randint(3, 8), seed)
        keys = list(session.chunks)
        done = 0
        while done < len(keys):
            turn = keys[done : done + self.rng.randint(1, 4)]
            done += len(turn)
            grant = await self.worker.save(session.key, session.shape, {k: session.chunks[k] for k in turn})
            self.saved |= {turn[i] for i in (*grant.indices, *grant.held)}
            self.worker.turn(make_manifest(session.key, session.shape, keys[:done], last_use_s=float(done)))
            await asyncio.sleep(self.rng.choice([0.0, 0.0, 0.03]))
        return session

    async def flush(self) -> None:
        """What was saved before is durable afterwards."""
        before = set(self.saved)
        if (await self.worker.flush()).complete:
            self.known.durable |= before

    async def load_near(self) -> None:
        """What the arena or the SSD has."""
        await self._load("kept")

    async def load_far(self) -> None:
        """What only the blob tier has, the first time."""
        await self._load("far")

    async def _load(self, kind: str) -> None:
        session = self.known.sessions[f"{kind}-{self.rng.randrange(3)}"]
        keys = list(session.chunks)
        deadline = asyncio.get_running_loop().time() + LIMIT_S
        while True:
            loaded = await self.worker.load(session.shape, keys, session=session.key)
            self.known.check(loaded, keys)
            if loaded.usable == len(keys):
                return
            # A busy machine may not have read them in time.
            assert asyncio.get_running_loop().time() < deadline, f"{loaded.usable} of {len(keys)} chunks of {kind}"
            await asyncio.sleep(0.2)

    async def advise(self) -> None:
        """A hint, whose load nobody waits for."""
        session = self.rng.choice(list(self.known.sessions.values()))
        await self.scheduler.tell(
            "node-0", prefetch=pb.PrefetchCommand(advisory=common_pb2.Advisory(session=session_to_wire(session.key)))
        )

    async def erase(self) -> None:
        """A session disappears from every tier; on return all of it is gone."""
        left = [s for name, s in self.known.sessions.items() if name.startswith("gone")] or [
            s for name, s in self.known.sessions.items() if name.startswith("new")
        ]
        if not left:
            return
        self.known.erasing = session = self.rng.choice(left)
        del self.known.sessions[session.key.session_id]
        await erase(self.lane, self.scheduler, session)
        self.known.erased.append(session)
        self.known.erasing = None


async def erase(lane: Lane, scheduler: FakeScheduler, session: Session) -> None:
    """Tell the store to; wait until no file of it is left."""
    names = {session.key.session_id, *(key.hex() for key in session.chunks)}
    await scheduler.tell("node-0", erase=session_to_wire(session.key))
    await nothing(lambda: names & lane.objects().keys(), f"left of {session.key.session_id}, which was erased")


async def nothing(left: Callable[[], object], what: str) -> None:
    """Wait until nothing is left."""
    deadline = asyncio.get_running_loop().time() + LIMIT_S
    while now := left():
        assert asyncio.get_running_loop().time() < deadline, f"{what}: {now}"
        await asyncio.sleep(0.01)


async def until_death(process: subprocess.Popen[bytes], work: Awaitable[None]) -> bool:
    """Do the work unless the process ends before; whether it ended."""
    task = asyncio.ensure_future(work)

    async def death() -> None:
        while process.poll() is None:  # noqa: ASYNC110 - no event tells of another process
            await asyncio.sleep(0.01)

    dead = asyncio.ensure_future(death())
    await asyncio.wait({task, dead}, return_when=asyncio.FIRST_COMPLETED)
    if task.done() and isinstance(task.exception(), grpc.aio.AioRpcError):
        await asyncio.wait_for(dead, LIMIT_S)
    task.cancel()
    dead.cancel()
    errors = await asyncio.gather(task, return_exceptions=True)
    ended = process.poll() is not None
    if isinstance(errors[0], Exception) and not (ended and isinstance(errors[0], grpc.aio.AioRpcError)):
        raise errors[0]
    return ended


# ---- the next life


def check_files(lane: Lane, known: Known) -> None:
    """Whatever has its final name is whole and true: a kill tears nothing. Staged files are made old enough to be
    removed."""
    for name, paths in lane.objects().items():
        for path in paths:
            if _STAGED.search(name):
                os.utime(path, (1, 1))
            elif path.is_relative_to(lane.blob / "manifests"):
                decode_manifest(lane.keys, _name(lane, path), path.read_bytes())
            elif _CHUNK.fullmatch(name):
                _check_object(lane, path, known)


def _name(lane: Lane, path: Path) -> str:
    return path.relative_to(lane.blob).as_posix()


def _check_object(lane: Lane, path: Path, known: Known) -> None:
    data = path.read_bytes()
    header = decode_header(lane.keys, data[: header_length(data)])
    key, shape = header.key, header.shape
    assert key.hex() == path.name and len(data) == object_bytes(shape), path
    secret = lane.secret_of(header)
    if header.seal is not None and secret is None:
        return  # killed before its key was stored: unreadable, and nobody was told that it is durable
    opened = Opened(lane.keys, header, None, secret)
    for layer, piece in enumerate(known.content[key]):
        start, into = piece_offset(shape, layer), memoryview(bytearray(shape.piece_bytes))
        opened.read(data[start : start + shape.piece_bytes], layer, header.checksums[layer], into)
        assert bytes(into) == piece, f"wrong bytes in {path}"


async def verify(lane: Lane, known: Known, scheduler: FakeScheduler) -> int:
    """The next life: load all that can be loaded and compare; how many pieces that were."""
    pieces = 0
    async with FakeWorker(lane.stack.address(0), SHAPES) as worker:
        shapes = {
            key: s.shape for s in (*known.sessions.values(), *known.erased, known.erasing) if s for key in s.chunks
        }
        gone = {key for s in known.erased for key in s.chunks}
        sessions = await asyncio.gather(
            *(_load(worker, known, s.shape, list(s.chunks), s) for s in known.sessions.values())
        )
        pieces += sum(
            loaded.usable * s.shape.layers for loaded, s in zip(sessions, known.sessions.values(), strict=True)
        )
        single = await asyncio.gather(*(_load(worker, known, shape, [key]) for key, shape in shapes.items()))
        for (key, shape), loaded in zip(shapes.items(), single, strict=True):
            assert key not in gone or loaded.usable == 0, f"erased chunk {key.hex()} came back"
            being_erased = known.erasing is not None and key in known.erasing.chunks
            if key in known.durable and key not in gone and not being_erased and not loaded.usable:
                await _comes_late(lane, worker, known, shape, key)
            pieces += loaded.usable * shape.layers
        if known.erasing is not None:
            await erase(lane, scheduler, known.erasing)
        await _until_blob_has_all(lane, known)
        await nothing(lambda: [n for n in lane.objects() if _STAGED.search(n)], "left of writes of the life before")
        assert (await worker.flush()).complete
    left = [name for name in lane.objects() if name.endswith(".part")]
    assert not left, f"temporary files stay: {left}"
    return pieces


async def _load(
    worker: FakeWorker, known: Known, shape: KvShape, keys: list[bytes], session: Session | None = None
) -> Loaded:
    loaded = await worker.load(shape, keys, session=session.key if session else None, limit_s=LIMIT_S)
    known.check(loaded, keys)
    assert all((i, layer) in loaded.pieces for i in range(loaded.usable) for layer in range(shape.layers)), (
        "usable chunks were not delivered"
    )
    return loaded


async def _comes_late(lane: Lane, worker: FakeWorker, known: Known, shape: KvShape, key: bytes) -> None:
    """A durable chunk that a busy machine did not read in time is read later."""
    deadline = asyncio.get_running_loop().time() + LIMIT_S
    while not (await _load(worker, known, shape, [key])).usable:
        if asyncio.get_running_loop().time() > deadline:
            (of,) = [s.key.session_id for s in known.sessions.values() if key in s.chunks]
            copies = [str(p.relative_to(lane.data)) for p in lane.objects().get(key.hex(), ())]
            raise AssertionError(
                f"durable chunk {key.hex()} of {of} is lost; copies: {copies}; {lane.stack.log(0)[-3000:]}"
            )
        await asyncio.sleep(0.5)


async def _until_blob_has_all(lane: Lane, known: Known) -> None:
    """What the SSD has of sessions with a manifest and the blob tier lacks, since it died, is written now."""

    def owed() -> set[str]:
        manifests = [
            decode_manifest(lane.keys, _name(lane, p), p.read_bytes())
            for p in (lane.blob / "manifests").rglob("*")
            if p.is_file() and "#" not in p.name
        ]
        named = {key.hex() for manifest in manifests for key in manifest.keys}
        return named & {p.name for p in lane.ssd.rglob("*")} - {p.name for p in (lane.blob / "chunks").rglob("*")}

    await nothing(owed, "owed to the blob tier")


def begin(lane: Lane, before: Path) -> None:
    """The lane's directory as the life before left it."""
    shutil.rmtree(lane.data, ignore_errors=True)
    shutil.copytree(before, lane.data)
