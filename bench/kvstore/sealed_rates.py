"""What keyed digests and encryption cost: write-back and loads, beside what one core hashes and encrypts."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import xxhash
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from ground import GB, KEYS, SHAPE, SHAPE_8B, arena, bands, chunks, forget_page_cache
from pairs import Figure, Pair, compare
from ssd_rates import read_by_store, sums_of

from contracts.ids import SessionKey
from contracts.kv import KvShape
from kvstore.core.events import LoadKind, SourceKind, Wrote
from kvstore.core.instructions import FetchPiece, WriteSsd
from kvstore.core.prefetch import reads as cut
from kvstore.tiers.blob import BlobTier
from kvstore.tiers.codecs import Codecs
from kvstore.tiers.encoded_files import EncodedFiles
from kvstore.tiers.file_io import make_file_io
from kvstore.tiers.objects import open_store
from kvstore.tiers.sealing import SessionSecret
from kvstore.tiers.ssd import SsdTier

_SESSION = SessionKey("tenant", "session")
#: Objects read from blob at a time, as the store does (kvstore/core/fetches.py).
_BLOB_READS = 16


def measure(scratch: Path, quick: bool) -> list[Pair | Figure]:
    """Both shapes; the libraries alone first."""
    found: list[Pair | Figure] = []
    for name, shape, count in (
        ("131 M model", SHAPE, 64 if quick else 128),
        ("8 B model", SHAPE_8B, 8 if quick else 24),
    ):
        found += _alone(name, shape.piece_bytes, 0.2 if quick else 1.0)
        found += asyncio.run(_of_store(scratch / name[:3].strip(), name, shape, count, 3 if quick else 9))
    return found


def _alone(model: str, size: int, least_s: float) -> list[Figure]:
    """One core, from memory that is not in its caches, in pieces of this size."""
    memory = memoryview(os.urandom(64 << 20))
    pieces = [memory[at : at + size] for at in range(0, len(memory) - size + 1, size)]
    key, into = os.urandom(32), bytearray(size + 16)
    aead, nonce = AESGCM(key), bytes(12)
    ways: dict[str, Callable[[memoryview], object]] = {
        "xxh3-64": xxhash.xxh3_64_intdigest,
        "BLAKE3, keyed": lambda piece: blake3(piece, key=key).digest(length=8),
        "AES-256-GCM": lambda piece: aead.encrypt_into(nonce, piece, b"", into),
    }
    found = []
    for name, work in ways.items():
        moved, begun = 0, time.thread_time()
        while time.thread_time() - begun < least_s:
            for piece in pieces:
                work(piece)
            moved += len(pieces) * size
        rate = moved / (time.thread_time() - begun) / GB
        note = f"the library alone, pieces of {size >> 10} KiB, by processor time"
        found.append(Figure(f"one core's {name}: {model}", round(rate, 2), "GB/s", note=note))
    return found


async def _of_store(scratch: Path, model: str, shape: KvShape, count: int, repetitions: int) -> list[Pair | Figure]:
    amount = count * shape.chunk_bytes / GB
    with arena(2 * count * shape.chunk_bytes, f"sealed-{model[:3].strip()}") as memory:
        writes = chunks(memory, shape, count)
        blob = BlobTier(open_store("", {}, scratch / "blob"), memory, KEYS)
        secret, _ = blob.session_keys.current(_SESSION, 0)
        assert await blob.session_keys.store(secret.name)
        reader, writer = (make_file_io("auto", memory, f"sealed-{model}-{what}") for what in ("reads", "writes"))
        encoded = EncodedFiles(memory, KEYS, Codecs(), None, blob.session_keys.known)
        tier = SsdTier(scratch / "ssd", memory, KEYS, reader, writer, "auto", encoded)
        put = partial(_write, tier, writes)
        found: list[Pair | Figure] = [
            compare(
                f"arena to SSD in one group commit, encrypted, against with keyed digests only: {model}",
                partial(put, secret),
                partial(put, None),
                amount,
                "GB/s",
                repetitions,
            )
        ]
        times: dict[bool, list[float]] = {False: [], True: []}
        blob_times: dict[bool, list[float]] = {False: [], True: []}
        loop = asyncio.get_running_loop()
        for _ in range(repetitions):
            for sealed in (False, True):
                put(secret if sealed else None)
                sums = sums_of(tier, writes)
                for write in writes:
                    path = tier.path(write.key, shape.fingerprint)
                    header = tier.header(write.key, shape.fingerprint)
                    assert await blob.write(write.key, shape.fingerprint, path.read_bytes(), header)
                layers = len(cut(shape, list(range(shape.layers)), SourceKind.SSD, LoadKind.DEMAND)[0])
                reads = bands(writes, layers, base=count * shape.chunk_bytes, sums=sums)
                forget_page_cache([tier.path(w.key, shape.fingerprint) for w in writes])
                times[sealed].append(await loop.run_in_executor(None, read_by_store, tier, shape, reads))
                whole = bands(writes, shape.layers, base=count * shape.chunk_bytes, sums=sums)
                blob_times[sealed].append(await _read_blob(blob, shape, whole))
        for source, took, note in (
            ("SSD", times, "cold"),
            ("blob, a directory", blob_times, f"{_BLOB_READS} chunks at a time, page cache warm"),
        ):
            for sealed, seconds in took.items():
                how = "encrypted" if sealed else "keyed digests"
                rate = amount / sorted(seconds)[len(seconds) // 2]
                found.append(Figure(f"{source} to arena, {how}: {model}", round(rate, 2), "GB/s", note=note))
        tier.close()
    shutil.rmtree(scratch, ignore_errors=True)
    return found


def _write(tier: SsdTier, writes: Sequence[WriteSsd], secret: SessionSecret | None) -> float:
    for write in writes:
        tier.delete(write.key, write.shape.fingerprint)
    begun = time.perf_counter()
    assert set(tier.write(writes, {w.key: secret for w in writes} if secret is not None else {})) == {Wrote.OK}
    return time.perf_counter() - begun


async def _read_blob(blob: BlobTier, shape: KvShape, reads: Sequence[tuple[FetchPiece, ...]]) -> float:
    gate = asyncio.Semaphore(_BLOB_READS)

    async def one(pieces: tuple[FetchPiece, ...]) -> None:
        async with gate:
            assert await blob.read(shape, pieces) == {}

    begun = time.perf_counter()
    await asyncio.gather(*map(one, reads))
    return time.perf_counter() - begun
