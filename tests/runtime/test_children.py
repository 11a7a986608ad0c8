"""Helper processes: killed at deadlines, limited in memory, shared fairly, gone with their parent. Real processes
throughout."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.children import ChildDied, Children, ChildrenBusy, ChildTimeout

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "tests.runtime.child_program"]
MIB = 1 << 20
Make = Callable[..., Children]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[Children] = []

    def children(**settings: Any) -> Children:
        made.append(Children(PROGRAM, **{"count": 1, "memory_bytes": 256 * MIB, "per_owner": 8, **settings}))
        return made[-1]

    yield children
    for one in made:
        await one.close()


async def pid_of(children: Children, owner: str = "a") -> int:
    return int(await children.call(owner, b"pid", 20))


async def wait_gone(pid: int) -> bool:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.02)
                continue
        return True
    return False


async def test_a_child_stays_in_the_session_where_its_niceness_counts_in_a_group_that_no_ctrl_c_is_for(
    make: Make,
) -> None:
    children = make()
    session, group = (await children.call("a", b"session", 20)).split()
    assert int(session) == os.getsid(0)
    assert int(group) == await pid_of(children)


async def test_calls_are_answered_by_one_process_whatever_it_prints(make: Make) -> None:
    children = make(setup=b"words", nice=3)
    assert await children.call("a", b"echo hello", 20) == b"hello"
    assert await children.call("a", b"echo ", 20) == b""
    assert await children.call("a", b"setup", 20) == b"words"
    assert int(await children.call("a", b"nice", 20)) == os.getpriority(os.PRIO_PROCESS, 0) + 3
    large = bytes(range(256)) * (4 * MIB // 256)
    assert await children.call("a", b"echo " + large, 20) == large
    assert await pid_of(children) == await pid_of(children)


async def test_what_runs_past_its_deadline_is_killed_and_the_next_call_is_served(make: Make) -> None:
    children = make()
    pid = await pid_of(children)
    began = time.monotonic()
    with pytest.raises(ChildTimeout) as spun:
        await children.call("a", b"spin 60", 0.3)
    assert time.monotonic() - began < 5 and await wait_gone(pid)
    assert spun.value.cpu_s > 0.02
    with pytest.raises(ChildTimeout) as slept:
        await children.call("a", b"sleep 60", 0.3)
    assert slept.value.cpu_s < 0.02, "it had a processor all the time, and did not use it"
    assert await children.call("a", b"echo again", 20) == b"again"
    assert children.statistics.timeouts == 2 and children.statistics.deaths == 0


async def test_memory_beyond_the_limit_ends_the_process_and_nothing_else(make: Make) -> None:
    children = make()
    assert await children.call("a", b"allocate %d" % (32 * MIB), 20) == b"%d" % (32 * MIB)
    with pytest.raises(ChildDied):
        await children.call("a", b"allocate %d" % (512 * MIB), 20)
    assert await children.call("a", b"echo again", 20) == b"again"


@pytest.mark.parametrize("payload", [b"crash", b"exit 3", b"no such verb"])
async def test_a_crash_is_told_and_the_next_call_is_served(make: Make, payload: bytes) -> None:
    children = make()
    with pytest.raises(ChildDied):
        await children.call("a", payload, 20)
    assert await children.call("a", b"echo again", 20) == b"again"
    assert children.statistics.deaths == 1


async def test_a_process_that_died_between_two_calls_is_replaced(make: Make) -> None:
    children = make()
    pid = await pid_of(children)
    psutil.Process(pid).kill()
    assert await wait_gone(pid)
    await asyncio.sleep(0.1)
    assert await pid_of(children) != pid


async def test_a_program_that_cannot_start_fails_its_call(make: Make) -> None:
    with pytest.raises(ChildDied, match="status is 7"):
        await make(setup=b"do not start").call("a", b"echo x", 20)
    missing = Children(["/nowhere/program"], count=1, memory_bytes=MIB, per_owner=1)
    with pytest.raises(ChildDied, match="cannot be started"):
        await missing.call("a", b"echo x", 20)


async def test_one_owner_cannot_keep_the_others_waiting(make: Make) -> None:
    children = make(count=2, per_owner=50)
    await children.start()
    greedy = [asyncio.ensure_future(children.call("greedy", b"sleep 60", 100)) for _ in range(20)]
    await asyncio.sleep(0.1)
    assert await children.call("modest", b"echo x", 50) == b"x"
    assert not any(task.done() for task in greedy)
    for task in greedy:
        task.cancel()


async def test_one_process_serves_owners_in_turn(make: Make) -> None:
    children = make(per_owner=50)
    order: list[str] = []

    async def ask(owner: str) -> None:
        await children.call(owner, b"echo x", 20)
        order.append(owner)

    await asyncio.gather(*(ask("greedy") for _ in range(10)), *(ask(owner) for owner in "abc"))
    assert set(order[:5]) >= {"a", "b", "c"}


async def test_too_much_of_one_owner_is_refused_and_so_is_what_waits_too_long(make: Make) -> None:
    children = make(per_owner=2)
    running = asyncio.ensure_future(children.call("greedy", b"sleep 1", 20))
    await asyncio.sleep(0)
    waiting = [asyncio.ensure_future(children.call("greedy", b"echo x", 20)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ChildrenBusy):
        await children.call("greedy", b"echo x", 20)
    with pytest.raises(ChildrenBusy):
        await children.call("other", b"echo x", 20, wait_s=0.1)
    assert await running == b"slept" and [await task for task in waiting] == [b"x", b"x"]
    assert children.statistics.refused == 2 and children.statistics.waiting == 0


async def test_a_cancelled_call_has_no_turn_and_a_cancelled_one_that_runs_costs_no_process(make: Make) -> None:
    children = make()
    pid = await pid_of(children)
    running = asyncio.ensure_future(children.call("a", b"sleep 0.5", 20))
    waiting = asyncio.ensure_future(children.call("b", b"crash", 20))
    await asyncio.sleep(0.1)
    for task in (waiting, running):
        task.cancel()
    assert children.statistics.running == 1, "on its owner's account until it is done"
    assert await pid_of(children) == pid
    assert children.statistics.deaths == 0


async def test_closing_ends_every_process_and_every_call(make: Make) -> None:
    children = make(count=2)
    await children.start()
    pids = [int(pid) for pid in await asyncio.gather(*(children.call(o, b"pid", 20) for o in "ab"))]
    assert len(set(pids)) == 2
    calls = [asyncio.ensure_future(children.call(o, b"spin 60", 60)) for o in "aab"]
    await asyncio.sleep(0.1)
    await children.close()
    assert all(isinstance(e, ChildDied) for e in await asyncio.gather(*calls, return_exceptions=True))
    assert all([await wait_gone(pid) for pid in pids])
    with pytest.raises(ChildDied):
        await children.call("a", b"echo x", 20)


@pytest.mark.parametrize("pause_s", [0.0, 0.002, 0.02, 0.06, 0.15, 0.3])
async def test_closing_at_any_moment_leaves_no_process(make: Make, pause_s: float) -> None:
    children = make(count=3)
    starting = asyncio.ensure_future(children.start())
    calls = [asyncio.ensure_future(children.call(o, b"crash" if o == "a" else b"spin 60", 0.05)) for o in "aabc"]
    await asyncio.sleep(pause_s)
    starting.cancel()
    await children.close()
    await asyncio.gather(starting, *calls, return_exceptions=True)
    assert not psutil.Process().children()


async def test_a_child_has_none_of_its_parents_files_and_ends_with_it_in_the_middle_of_work() -> None:
    pipe = asyncio.subprocess.PIPE
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.runtime.parent_program", stdout=pipe, cwd=ROOT
    )
    assert parent.stdout is not None
    assert b"parent_program" not in await parent.stdout.readline()
    pid = int(await parent.stdout.readline())
    assert await parent.stdout.readline() == b"0\n", "handlers of fork, in which threads of gRPC hang, do not run"
    assert psutil.pid_exists(pid)
    parent.kill()
    await parent.wait()
    assert await wait_gone(pid)
