"""Real store processes, and a worker without a model that speaks Attach, fills the arena and copies out of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cli.own_certificates import with_own_certificates
from contracts import identity
from contracts.convert import manifest_to_wire, session_to_wire, shape_to_wire
from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from contracts.v1 import kvstore_pb2 as pb
from contracts.v1.kvstore_pb2_grpc import KvStoreStub
from loadtest.stack import free_ports
from runtime import rpc
from runtime.config import Config
from runtime.config_file import dump_config, load_config
from runtime.own_certificate import place_of
from storelink import credentials
from storelink.arena_sharing import SharedArena, arenas_of, remove_dead

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 60.0


class Stores:
    """Processes of `python -m kvstore`, one per node, with data under `folder`. A context manager.

    environments: extra variables by node number. command: what starts a store. certified: with certificates.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int,
        environments: dict[int, dict[str, str]] | None = None,
        command: Sequence[str] = (sys.executable, "-m", "kvstore"),
        certified: bool = False,
        **kv: Any,
    ) -> None:
        self._command = list(command)
        self._environments = environments or {}
        folder.mkdir(parents=True, exist_ok=True)
        first = free_ports(10 * nodes + 2)
        overrides = {
            "data": str(folder / "data"),
            "run_dir": str(folder / "run"),
            "nodes": {"base_port": first, "count": nodes},
            "scheduler": {"port": first + 10 * nodes},
            "gateway": {"port": first + 10 * nodes + 1},
            "kv": kv,
        }
        self.config: Config = load_config(None, overrides)
        if certified:
            self.config = with_own_certificates(self.config)
        self._file = folder / "config.yaml"
        self._file.write_text(dump_config(self.config))
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Stores:
        for node in range(self.config.nodes.count):
            log = (self._folder / f"kvstore-{node}.log").open("ab")
            command = [*self._command, "--config", str(self._file), "--node", str(node)]
            environment = os.environ | {"PYTHONPATH": str(ROOT)} | self._environments.get(node, {})
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment))
        for node in range(self.config.nodes.count):
            self._wait(node)
        return self

    def _wait(self, node: int) -> None:
        """Wait until the store listens. Raises RuntimeError if it does not."""
        host, port = self.address(node).rsplit(":", 1)
        deadline = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline and self._processes[node].poll() is None:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
                return
            time.sleep(0.05)
        self.__exit__()
        raise RuntimeError(f"a store did not start; see {self._folder}/kvstore-{node}.log")

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for node in range(self.config.nodes.count):
            remove_dead(arenas_of(self.config.node(node).arena_stem))

    def address(self, node: int) -> str:
        return self.config.node(node).store_address

    def certificate(self, node: int) -> Path | None:
        """That of the node, if it has one."""
        directory = self.config.tls.directory
        return None if directory is None else place_of(directory, identity.node(self.config.node(node).name))

    def pid(self, node: int) -> int:
        return self._processes[node].pid


class Worker:
    """One attachment to a store. Loads copy pieces into `hbm`. certificate: its node's, if any."""

    def __init__(self, address: str, shape: KvShape, hbm_bytes: int, certificate: Path | None = None) -> None:
        self.shape, self._certificate = shape, certificate
        self.hbm = np.zeros(hbm_bytes, dtype=np.uint8)
        self._address = address
        self._outgoing: asyncio.Queue[pb.WorkerToStore] = asyncio.Queue()
        self._answers: dict[int, asyncio.Queue[Any]] = {}
        self._ids = 0

    async def __aenter__(self) -> Worker:
        credentials.use(self._certificate)
        self._channel = rpc.channel(self._address, identity.node(self._certificate.name if self._certificate else ""))
        credentials.use(None)
        self.stub = KvStoreStub(self._channel)
        self._welcome: asyncio.Future[pb.AttachWelcome] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.ensure_future(self._read())
        self._send(hello=pb.AttachHello(worker_id="bench", shapes=[shape_to_wire(self.shape)]))
        welcome = await asyncio.wait_for(self._welcome, _LIMIT_S)
        self._shared = SharedArena(
            Path(welcome.arena_path), welcome.arena_bytes, welcome.nonce, welcome.attachment, "auto"
        )
        self.arena = np.frombuffer(self._shared.mapped, dtype=np.uint8, count=welcome.arena_bytes)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._reading
        self._shared.leave()
        await self._channel.close(None)

    def _send(self, **kind: Any) -> None:
        self._outgoing.put_nowait(pb.WorkerToStore(**kind))

    async def _read(self) -> None:
        async def messages() -> AsyncIterator[pb.WorkerToStore]:
            while True:
                yield await self._outgoing.get()

        async for message in self.stub.Attach(messages(), wait_for_ready=True):
            kind = message.WhichOneof("kind")
            if kind == "welcome":
                self._welcome.set_result(message.welcome)
            elif kind == "grant":
                self._answers[message.grant.save_id].put_nowait(message.grant)
            elif kind in ("found", "pieces", "end"):
                self._answers[getattr(message, kind).load_id].put_nowait(message)

    def _open(self) -> tuple[int, asyncio.Queue[Any]]:
        self._ids += 1
        queue = self._answers[self._ids] = asyncio.Queue()
        return self._ids, queue

    async def save(self, session: SessionKey, keys: Sequence[bytes], seed: int) -> None:
        """Save chunks of random bytes through the arena and wait until they are written back."""
        shape = self.shape
        number, queue = self._open()
        self._send(
            save=pb.SaveRequest(
                save_id=number, session=session_to_wire(session), fingerprint=shape.fingerprint, keys=keys
            )
        )
        grant = await asyncio.wait_for(queue.get(), _LIMIT_S)
        if len(grant.indices) != len(keys):
            raise RuntimeError(f"room for {len(grant.indices)} of {len(keys)} chunks was granted")
        random = np.random.default_rng(seed).integers(0, 256, shape.piece_bytes, dtype=np.uint8)
        for i, offset in enumerate(grant.offsets):
            self.arena[offset : offset + shape.piece_bytes] = random ^ np.uint8(i & 255)
        self._send(saved=pb.SaveDone(save_id=number, ok=list(grant.indices)))
        manifest = Manifest(
            session, "bench", shape.fingerprint, list(keys), len(keys) * shape.chunk_tokens, time.time()
        )
        self._send(turn=pb.Turn(manifest=manifest_to_wire(manifest)))
        await self.flush()

    async def put(self, session: SessionKey, keys: Sequence[bytes]) -> float:
        """Seconds from the save request until every piece is in the arena and the store is notified."""
        shape, size = self.shape, self.shape.piece_bytes
        number, queue = self._open()
        begun = time.perf_counter()
        self._send(
            save=pb.SaveRequest(
                save_id=number, session=session_to_wire(session), fingerprint=shape.fingerprint, keys=keys
            )
        )
        grant = await asyncio.wait_for(queue.get(), _LIMIT_S)
        for i, offset in enumerate(grant.offsets):
            self.arena[offset : offset + size] = self.hbm[i * size : (i + 1) * size]
        self._send(saved=pb.SaveDone(save_id=number, ok=list(grant.indices)))
        seconds = time.perf_counter() - begun
        if len(grant.indices) != len(keys):
            raise RuntimeError(f"room for {len(grant.indices)} of {len(keys)} chunks was granted")
        await self.flush()
        return seconds

    async def flush(self) -> None:
        reply = await self.stub.Flush(pb.FlushRequest(timeout_s=_LIMIT_S))
        if not reply.complete:
            raise RuntimeError("write-back did not end")

    async def load(self, keys: Sequence[bytes], sources: Sequence[str] = (), *, copy: bool = True) -> float:
        """Seconds from the request until every piece is in HBM (without `copy`: in the arena). Raises RuntimeError if
        some are missing."""
        number, queue = self._open()
        size, layers = self.shape.piece_bytes, self.shape.layers
        begun = time.perf_counter()
        chunks = [pb.ChunkWant(key=key) for key in keys]
        request = pb.LoadRequest(
            load_id=number,
            load_class=pb.DEMAND,
            fingerprint=self.shape.fingerprint,
            chunks=chunks,
            source_nodes=list(sources),
        )
        self._send(load=request)
        while True:
            message = await asyncio.wait_for(queue.get(), _LIMIT_S)
            kind = message.WhichOneof("kind")
            if kind == "end":
                break
            if kind != "pieces":
                continue
            pieces = message.pieces
            if copy:
                for chunk, layer, offset in zip(pieces.chunks, pieces.layers, pieces.offsets, strict=True):
                    to = (chunk * layers + layer) * size
                    self.hbm[to : to + size] = self.arena[offset : offset + size]
            self._send(taken=pb.LoadTaken(load_id=number, chunks=pieces.chunks, layers=pieces.layers))
        seconds = time.perf_counter() - begun
        del self._answers[number]
        if message.end.usable != len(keys):
            raise RuntimeError(f"{message.end.usable} of {len(keys)} chunks came")
        return seconds
