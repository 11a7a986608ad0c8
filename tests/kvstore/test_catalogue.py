"""The catalogue of sessions is a cache: whatever happens to its file, a listing says what the blob tier has."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from obstore.exceptions import GenericError
from obstore.store import LocalStore, MemoryStore

from contracts.ids import SessionKey
from contracts.kv import Manifest
from kvstore.tiers import catalogue as module
from kvstore.tiers.blob import BlobTier, ManifestsUnread
from kvstore.tiers.catalogue import Catalogue, Idle
from kvstore.tiers.manifests import decode_manifest, manifest_path
from runtime.clock import RealClock
from tests.kvstore.tier_harness import KEYS

SESSIONS = [SessionKey(f"t{n % 3}", f"s{n}") for n in range(12)]


class Clock(RealClock):
    """A clock that is set."""

    def __init__(self) -> None:
        self.at = 50.0

    def now(self) -> float:
        return self.at


class Bench:
    """A blob tier, its catalogue's file, and what should be listed."""

    def __init__(self, store: object, path: Path, source: str = "") -> None:
        self.store, self.path, self.clock, self.read = store, path, Clock(), 0
        self.truth: dict[SessionKey, Manifest] = {}
        self.open(source)

    def open(self, source: str = "") -> None:
        self.catalogue = Catalogue(self.path, source, partial(decode_manifest, KEYS), self.clock)
        self.blob = BlobTier(self.store, SimpleNamespace(), KEYS, None, self.catalogue)  # type: ignore[arg-type]
        get = self.blob._objects.get

        async def counted(path: str) -> bytes:
            self.read += 1
            return await get(path)

        self.blob._objects.get = counted  # type: ignore[method-assign]

    async def put(self, n: int, use_s: float) -> None:
        session = SESSIONS[n]
        self.truth[session] = Manifest(session, "m", b"f" * 32, [os.urandom(32)], 16, use_s)
        assert await self.blob.put_manifest(self.truth[session])

    async def delete(self, n: int) -> None:
        self.truth.pop(SESSIONS[n], None)
        await self.blob.delete_manifest(SESSIONS[n])

    async def check(self) -> int:
        """The listing is what the blob tier has. Returns how many manifests it read."""
        before = self.read
        assert {m.session: m async for page in self.blob.manifests() for m in page} == self.truth
        return self.read - before


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(LocalStore(tmp_path / "blob", mkdir=True), tmp_path / "sessions.sqlite")
    yield made
    made.catalogue.close()


async def test_only_what_is_new_is_read_also_after_a_restart(bench: Bench) -> None:
    for n in range(10):
        await bench.put(n, n)
    assert await bench.check() == 10 and await bench.check() == 0
    bench.catalogue.close()
    bench.open()
    await bench.put(3, 99.0)
    await bench.delete(4)
    assert await bench.check() == 1 and await bench.catalogue.sessions() == 9


def spoil(path: Path, how: str, data: st.DataObject) -> None:
    """Damage the file of a catalogue that is closed."""
    match how:
        case "missing":
            path.unlink(missing_ok=True)
        case "garbage":
            path.write_bytes(os.urandom(5000))
        case "short":
            os.truncate(path, data.draw(st.integers(0, path.stat().st_size)))
        case "flipped":
            content = bytearray(path.read_bytes())
            for _ in range(data.draw(st.integers(1, 30))):
                content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            path.write_bytes(content)
        case "old":
            with sqlite3.connect(path) as db:
                db.execute("PRAGMA user_version = 0")
            db.close()
        case "forged":
            with contextlib.suppress(sqlite3.DatabaseError), sqlite3.connect(path) as db:  # it may be damaged already
                db.execute("UPDATE manifest SET data = (SELECT data FROM manifest ORDER BY id LIMIT 1)")
            db.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_happens_to_the_file_a_listing_says_what_the_blob_tier_has(tmp_path_factory, data) -> None:
    async def run() -> None:
        bench = Bench(MemoryStore(), tmp_path_factory.mktemp("catalogue") / "sessions.sqlite")
        for _ in range(data.draw(st.integers(1, 6))):
            for n in data.draw(st.lists(st.integers(0, 11), max_size=6)):
                await (bench.delete(n) if data.draw(st.booleans()) else bench.put(n, data.draw(st.floats(0, 1e9))))
            if data.draw(st.booleans()):
                await bench.check()
            how = data.draw(
                st.sampled_from(["stays", "missing", "garbage", "short", "flipped", "old", "forged", "foreign", "open"])
            )
            if how == "open":  # damaged while it is in use
                if bench.path.exists():
                    os.truncate(bench.path, 100)
            else:
                await bench.check()
                bench.catalogue.close()
                spoil(bench.path, how, data)
                bench.open("s3://elsewhere" if how == "foreign" else "")
            await bench.check()
            await bench.check()
        bench.catalogue.close()

    asyncio.run(run())


async def test_a_place_that_cannot_be_written_or_is_not_this_process_s_costs_reads_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    bench = Bench(MemoryStore(), tmp_path / "file" / "sessions.sqlite")
    await bench.put(0, 1.0)
    assert await bench.check() == 1 and await bench.check() == 1
    other = tmp_path / "other.sqlite"
    bench.catalogue = Catalogue(other, "", partial(decode_manifest, KEYS), bench.clock, lambda: False)
    assert await bench.catalogue.idle(1e12, 0.0) == [] and not other.exists()
    bench.catalogue.close()


async def test_idle_sessions_come_in_slices_by_last_use(bench: Bench, monkeypatch) -> None:
    monkeypatch.setattr(module, "SLICE", 3)
    for n in range(11):
        await bench.put(n, 100.0 - n if n != 5 else 94.0 + 1)
    await bench.check()
    found: list[Idle] = []
    while page := await bench.catalogue.idle(99.0, 0.0, found[-1] if found else None):
        assert len(page) <= 3
        found += page
    assert [row.last_use_s for row in found] == sorted(row.last_use_s for row in found)
    assert {row.session for row in found} == {s for s, m in bench.truth.items() if m.last_use_s < 99.0}
    await bench.catalogue.forget(found[:4])
    assert await bench.catalogue.idle(99.0, 0.0) == found[4:7]


async def test_unchanged_is_counted_in_seconds_that_the_node_has_lived(bench: Bench) -> None:
    await bench.put(0, 1.0)
    await bench.put(1, 1.0)
    await bench.check()
    bench.clock.at += 60
    await bench.put(1, 0.5)  # another time is a use, even one that seems earlier
    await bench.check()
    assert [row.session for row in await bench.catalogue.idle(9.0, 50.0)] == [SESSIONS[0]]
    bench.catalogue.close()
    bench.clock.at += 1e6  # while it was down: it saw nothing
    bench.open()
    assert [row.session for row in await bench.catalogue.idle(9.0, 50.0)] == [SESSIONS[0]]
    assert await bench.catalogue.idle(9.0, 70.0) == []
    bench.clock.at += 50
    assert len(await bench.catalogue.idle(9.0, 50.0)) == 2


async def test_numbers_last(bench: Bench) -> None:
    assert await bench.catalogue.number("sweep") == 0
    await bench.catalogue.note_number("sweep", 7)
    bench.catalogue.close()
    bench.open()
    assert await bench.catalogue.number("sweep") == 7


_LISTS = """
import asyncio, sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from obstore.store import LocalStore
from kvstore.tiers.blob import BlobTier
from kvstore.tiers.catalogue import Catalogue
from kvstore.tiers.manifests import decode_manifest
from runtime.clock import RealClock
from tests.kvstore.tier_harness import KEYS
async def main():
    path = Path(sys.argv[1])
    for n in range(10**6):
        catalogue = Catalogue(path / "sessions.sqlite", str(n % 2), partial(decode_manifest, KEYS), RealClock())
        blob = BlobTier(LocalStore(path / "blob"), SimpleNamespace(), KEYS, None, catalogue)
        async for page in blob.manifests():
            print("page", flush=True)
        catalogue.close()
asyncio.run(main())
"""


def kill_a_lister(folder: Path, after_s: float) -> None:
    """Run a process that makes the catalogue anew again and again, and kill it after its first page."""
    with subprocess.Popen([sys.executable, "-c", _LISTS, str(folder)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"page\n"
        time.sleep(after_s)
        process.send_signal(signal.SIGKILL)


async def test_a_process_killed_while_it_writes_leaves_a_catalogue_that_is_right_or_made_anew(bench: Bench) -> None:
    for n in range(12):
        await bench.put(n, n)
    for turn in range(4):
        bench.catalogue.close()
        await asyncio.to_thread(kill_a_lister, bench.path.parent, 0.01 * turn)
        await bench.put(turn, 100.0 + turn)
        bench.open()
        await bench.check()
        assert await bench.check() == 0


async def test_nothing_of_an_erased_session_stays_in_the_file(bench: Bench) -> None:
    for n in range(6):
        await bench.put(n, float(n))
    await bench.check()
    gone = bench.truth[SESSIONS[3]]
    path = manifest_path(gone.session)
    assert await bench.catalogue.holds(path)
    await bench.delete(3)
    await bench.catalogue.drop(path)
    assert not await bench.catalogue.holds(path)
    files = [file.read_bytes() for file in bench.path.parent.glob("sessions.sqlite*")]
    assert not any(gone.keys[0] in data for data in files)
    assert await bench.check() == 0


async def test_a_listing_that_began_before_an_erasure_does_not_bring_its_session_back(bench: Bench) -> None:
    await bench.put(0, 1.0)
    get, dropped = bench.blob._objects.get, asyncio.Event()

    async def late(path: str) -> bytes:
        data = await get(path)
        await bench.catalogue.drop(path)  # erased after its manifest was read
        dropped.set()
        return data

    bench.blob._objects.get = late  # type: ignore[method-assign]
    assert [m async for page in bench.blob.manifests() for m in page] and dropped.is_set()
    assert not await bench.catalogue.holds(manifest_path(SESSIONS[0]))


async def test_a_manifest_that_cannot_be_read_makes_the_listing_incomplete_and_no_more(bench: Bench) -> None:
    for n in range(4):
        await bench.put(n, float(n))
    get, bad = bench.blob._objects.get, manifest_path(SESSIONS[2])

    async def archived(path: str) -> bytes:
        if path == bad:
            raise GenericError("this object is in an archive")
        return await get(path)

    bench.blob._objects.get = archived  # type: ignore[method-assign]
    seen: list[SessionKey] = []

    async def list_all() -> None:
        async for page in bench.blob.manifests():
            seen.extend(m.session for m in page)

    with pytest.raises(ManifestsUnread):
        await list_all()
    assert set(seen) == {SESSIONS[n] for n in (0, 1, 3)}
