"""A store that is killed with -9 at each failpoint, again and again: the next life serves no wrong byte and has lost
nothing durable. Each life's wall clock is right or wrong by a month, either way.

`make faults` kills real processes 13 times at each point, with encryption and without, and 1,000 forked ones
(UPBEAT_FAULTS_FORKS); `make test-long` one process at each of two points. UPBEAT_FAULTS_SEED repeats a run's work (the
timing is the machine's).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from kvstore.failpoints import POINTS
from tests.faults.forks import Forks
from tests.faults.kill_cycle import LIMIT_S, SHAPES, Known, Lane, Life, begin, check_files, prepare, until_death, verify
from tests.kvstore.fake_scheduler import FakeScheduler
from tests.kvstore.fake_worker import FakeWorker

TIMES = 13
FORKS = int(os.environ.get("UPBEAT_FAULTS_FORKS", 1000))
LANES = 2
#: Forked stores mostly wait: for each other, and for what they delete.
FORKED_LANES = 6
WALL_DAYS = (-31, 0, 31)
#: Rounds of work, and pauses after the first of them: a peer that answered late is left alone for a while.
ROUNDS, UNHURRIED, PAUSE_S = 120, 12, 0.5
SEED = int(os.environ.get("UPBEAT_FAULTS_SEED", random.SystemRandom().randrange(1 << 30)))
#: By which time at most each point is meant; what a few rounds of work reach with certainty.
MOST = {
    "recover.between_files": 20,
    "save.granted": 6,
    "save.summed": 12,
    "ssd.part_made": 12,
    "ssd.before_sync": 4,
    "ssd.before_rename": 4,
    "ssd.renamed": 12,
    "ssd.before_folder_sync": 4,
    "ssd.before_report": 4,
    "ssd.before_delete": 10,
    "ssd.after_delete": 10,
    "ssd.after_read": 4,
    "blob.before_put": 12,
    "blob.after_put": 12,
    "blob.before_delete": 12,
    "blob.after_delete": 12,
    "blob.after_read": 3,
    "manifest.before_put": 4,
    "manifest.after_put": 4,
    "erase.before": 3,
    "erase.queued": 3,
    "erase.noted": 3,
    "erase.confirmed": 3,
    "journal.before_append": 4,
    "journal.before_sync": 4,
    "journal.before_rename": 1,
    "key.before_put": 4,
    "key.after_put": 4,
    "key.before_delete": 2,
    "key.after_delete": 2,
    "tombstone.before_put": 3,
    "tombstone.after_put": 3,
    "peer.leased": 3,
    "peer.sending": 3,
    "peer.read": 3,
}


@pytest.fixture
async def lanes(
    request: pytest.FixtureRequest, tmp_path: Path, free_ports: Callable[[int], int]
) -> AsyncIterator[list[Lane]]:
    """Parameter: whether the stores encrypt."""
    made = [Lane(tmp_path / f"lane-{i}", free_ports(40), encrypt=request.param) for i in range(LANES)]
    yield made
    _end(made)


def _end(lanes: list[Lane]) -> None:
    for lane in lanes:
        lane.kill()
        lane.stack.stop()


@pytest.fixture(autouse=True)
def _nothing_stays_in_shared_memory() -> Iterator[None]:
    """What UCX leaves behind when its process is killed is removed."""
    place = Path("/dev/shm")
    before = set(place.glob("ucx_shm_*"))
    yield
    for path in set(place.glob("ucx_shm_*")) - before:
        path.unlink(missing_ok=True)


async def cycle(lane: Lane, before: tuple[Path, Known], point: str, number: int) -> tuple[int, float]:
    """One death and what follows: pieces verified, and how long the next start took."""
    rng = random.Random(f"{SEED}/{point}/{number}")
    at = rng.randint(1, MOST[point])
    begin(lane, before[0])
    known = before[1].copy()
    lane.stack.wall_days = rng.choice(WALL_DAYS)
    settings = {
        "failpoints": f'{{"{point}": "kill@{at}"}}',
        "file_io": rng.choice(["auto", "threads", "threads"]),
        "transport": rng.choice(["auto", "socket"]) if point.startswith("peer") else "socket",
    }
    try:
        async with FakeScheduler(lane.stack.config.scheduler_addresses[0]) as scheduler:
            victim = await lane.start(0, **settings)
            if victim.poll() is None:
                await (_peers if point.startswith("peer") else _live)(
                    lane, known, scheduler, rng, victim, settings["transport"]
                )
            assert victim.wait(LIMIT_S) == -signal.SIGKILL, f"died of something else: {lane.stack.log(0)[-2000:]}"
            lane.kill()
            check_files(lane, known)
            began = time.monotonic()
            lane.stack.wall_days = rng.choice(WALL_DAYS)
            await lane.start(0, file_io="threads", transport="socket")
            started = time.monotonic() - began
            pieces = await verify(lane, known, scheduler)
            assert lane.stack.processes[0].poll() is None
            lane.kill()
            check_files(lane, known)
    except BaseException:
        print(f"failed: UPBEAT_FAULTS_SEED={SEED} {point} kill@{at}, number {number}", file=sys.stderr)
        raise
    return pieces, started


async def _live(lane: Lane, known: Known, scheduler: FakeScheduler, rng: random.Random, victim, transport: str) -> None:
    async def work() -> None:
        async with FakeWorker(lane.stack.address(0), SHAPES) as worker:
            life = Life(lane, known, worker, scheduler, rng)
            for number in range(ROUNDS):
                await life.work()
                await asyncio.sleep(PAUSE_S if number > UNHURRIED else 0)

    assert await until_death(victim, work()), "the work is done and the failpoint was not reached"


async def _peers(
    lane: Lane, known: Known, scheduler: FakeScheduler, rng: random.Random, victim, transport: str
) -> None:
    """Node 1 reads from the victim, and the victim from node 1, which has a blob store of its own: there is no other
    source."""
    await lane.start(1, blob_url=f"file://{lane.data}/blob-1", transport=transport)

    async def work() -> None:
        async with (
            FakeWorker(lane.stack.address(0), SHAPES) as mine,
            FakeWorker(lane.stack.address(1), SHAPES) as other,
        ):
            life, far = Life(lane, known, mine, scheduler, rng), Life(lane, known, other, scheduler, rng)
            for number in range(ROUNDS):
                session = known.sessions[f"kept-{number}"] if number < 3 else await life.save()
                loading = asyncio.ensure_future(
                    other.load(session.shape, list(session.chunks), session=session.key, sources=["node-0"])
                )
                theirs = await far.save()
                try:
                    loaded = await mine.load(theirs.shape, list(theirs.chunks), session=theirs.key, sources=["node-1"])
                    known.check(loaded, list(theirs.chunks))
                finally:
                    # The other node lives: its load ends, whatever became of its source.
                    known.check(await asyncio.wait_for(asyncio.shield(loading), LIMIT_S), list(session.chunks))
                await asyncio.sleep(PAUSE_S if number > UNHURRIED else 0)

    assert await until_death(victim, work()), "the work is done and the failpoint was not reached"


async def live_before(lane: Lane) -> tuple[Path, Known]:
    """What cycles begin with."""
    known = await prepare(lane)
    before = lane.data.with_name("before")
    lane.data.rename(before)
    return before, known


async def kill(lanes: list[Lane], before: tuple[Path, Known], point: str, times: int) -> str:
    """So many cycles, in all lanes at a time. A line that says what was seen."""
    began = time.monotonic()
    numbers = iter(range(times))

    async def run(lane: Lane) -> list[tuple[int, float]]:
        return [await cycle(lane, before, point, number) for number in numbers]

    results = [r for part in await asyncio.gather(*(run(lane) for lane in lanes)) for r in part]
    assert len(results) == times
    starts = sorted(s for _, s in results)
    seconds = time.monotonic() - began
    return (
        f"{point}: {times} kills, {sum(p for p, _ in results)} pieces verified, starts in "
        f"{starts[len(starts) // 2]:.2f} s, {seconds:.0f} s"
    )


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("lanes", "point"),
    [(encrypt, point) for point in POINTS for encrypt in (False, True) if encrypt or not point.startswith("key.")],
    indirect=["lanes"],
)
async def test_a_store_killed_at_a_failpoint_serves_no_wrong_byte_afterwards(
    point: str, lanes: list[Lane], capsys
) -> None:
    said = await kill(lanes, await live_before(lanes[0]), point, int(os.environ.get("UPBEAT_FAULTS_TIMES", TIMES)))
    with capsys.disabled():
        print(f"\n{said} (seed {SEED})", end="", flush=True)


@pytest.mark.faults
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("encrypts", [False, True], ids=["plain", "encrypted"])
async def test_thousands_of_forked_stores_killed_at_failpoints_serve_no_wrong_byte_afterwards(
    encrypts: bool, free_ports: Callable[[int], int], capsys
) -> None:
    points = [point for point in POINTS if encrypts or not point.startswith("key.")]
    # On a tmpfs: what a killed process wrote is there in any case, and files come and go at once.
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="upbeat-forks-", dir=place) as folder:
        lanes = [Lane(Path(folder) / f"lane-{i}", free_ports(40), encrypt=encrypts) for i in range(FORKED_LANES)]
        before, forks = await live_before(lanes[0]), Forks()
        try:
            for lane in lanes:
                lane.stack.forks = forks
            for point in points:
                said = await kill(lanes, before, point, -(-FORKS // (2 * len(points))))
                with capsys.disabled():
                    what = "encrypted" if encrypts else "plain"
                    print(f"\nforked, {what}, {said} (seed {SEED})", end="", flush=True)
        finally:
            _end(lanes)
            forks.stop()


@pytest.mark.parametrize(
    ("lanes", "point"),
    [(False, "ssd.renamed"), (False, "blob.before_delete"), (True, "ssd.renamed"), (True, "key.after_delete")],
    indirect=["lanes"],
)
async def test_a_store_killed_once_in_the_middle_of_its_work_serves_no_wrong_byte_afterwards(
    point: str, lanes: list[Lane]
) -> None:
    await kill(lanes[:1], await live_before(lanes[0]), point, 1)
