"""Small helper processes for work on what strangers send: work that cannot be bounded from within is done where it can be killed.

`Children` is the parent's side: it starts processes, gives each one piece of work at a time, fairly by owner (`runtime.turns`), and kills
what runs past its deadline. `runtime.child.serve` is the child's side. They exchange length-prefixed frames over stdin and stdout. A
child limits its own memory, ends with its parent, and is the first that the kernel ends when the machine is short of memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from runtime import telemetry
from runtime.child import LENGTH, LIMITS
from runtime.turns import Turns

log = telemetry.logger("runtime.children")
#: Importing what a child needs takes well below a second on a free core.
_START_S = 30.0
#: One that has closed its end is about to tell its status.
_GRACE_S = 0.5
_POLL_S = 0.005


class ChildError(Exception):
    """The work has no result."""


class ChildTimeout(ChildError):
    """It ran past its deadline and was killed. cpu_s: processor time that it had; far below the deadline, the machine was busy."""

    def __init__(self, message: str, cpu_s: float) -> None:
        super().__init__(message)
        self.cpu_s = cpu_s


class ChildDied(ChildError):
    """The process ended by itself: its memory limit, or a crash. status: its exit status, below 0 a signal's number; the next call
    finds a new one."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ChildCannotStart(ChildDied):
    """There is no process for the work, which nobody has seen."""


class ChildrenBusy(ChildError):
    """Too much of this owner waits already, or its turn did not come in time. Nothing was tried."""


@dataclass(eq=False, slots=True)
class _Call:
    payload: bytes
    deadline_s: float
    result: asyncio.Future[bytes]


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts since the start, but for the first two."""

    waiting: int
    running: int
    done: int
    timeouts: int
    deaths: int
    refused: int


@dataclass(slots=True)
class _Counts:
    done: int = 0
    timeouts: int = 0
    deaths: int = 0
    refused: int = 0


@dataclass(eq=False, slots=True)
class _Child:
    """A process and the one socket that is its stdin and its stdout."""

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def start(cls, argv: Sequence[str], nice: int) -> _Child:
        """nice: added to this process's niceness, from its first instruction on: what it imports takes a second. Raises OSError.

        By `subprocess`, which uses vfork: asyncio's and uvloop's own fork runs the fork handlers of gRPC and other libraries with
        threads, in which the copy of the process can hang, and this loop with it. A group of its own, so that a Ctrl-C is not for it, but
        the same session (`runtime.niceness`).
        """
        env = {**os.environ, "MALLOC_ARENA_MAX": "1"}  # else each thread reserves address space of its own
        mine, its = socket.socketpair()
        with its:
            try:
                process = subprocess.Popen(argv, stdin=its.fileno(), stdout=its.fileno(), env=env, process_group=0)  # noqa: ASYNC220
            except BaseException:
                mine.close()
                raise
        try:
            with contextlib.suppress(OSError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + nice)
            mine.setblocking(False)
            return cls(process, *await asyncio.open_connection(sock=mine))
        except BaseException:  # cancelled: nobody else knows of it
            process.kill()
            process.wait()
            raise

    async def receive(self, most: int) -> bytes:
        """One frame. Raises EOFError when the process has ended or sends what no child of ours does."""
        try:
            (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
            if length > most:
                raise EOFError(f"a frame of {length} bytes")
            return await self.reader.readexactly(length)
        except asyncio.IncompleteReadError as e:
            raise EOFError("it ended") from e

    async def send(self, *parts: bytes) -> None:
        """One frame. Raises OSError when the process has ended."""
        self.writer.write(LENGTH.pack(sum(map(len, parts))))
        for part in parts:
            self.writer.write(part)
        await self.writer.drain()

    def cpu_s(self) -> float:
        """Processor time that it had."""
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(self.process.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    async def end(self, grace_s: float = 0.0) -> int:
        """Kill it, if it still runs after `grace_s`, and return its status."""
        try:
            await self._ended(grace_s)
        finally:
            self.process.kill()
            self.writer.close()
        await self._ended(math.inf)
        return int(self.process.returncode)

    async def _ended(self, limit_s: float) -> None:
        """Return when it has ended, or after the limit. It is asked, not told: the few milliseconds do not matter."""
        until = asyncio.get_running_loop().time() + limit_s
        while self.process.poll() is None and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)


class Children:
    """Up to `count` processes of one program. One event loop; nothing blocks it but the copies of payloads and answers.

    Processes start when work first needs them, and again after one was lost.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        count: int,
        memory_bytes: int,
        per_owner: int,
        running_each: int | None = None,
        setup: bytes = b"",
        nice: int = 0,
    ) -> None:
        """argv: a program whose main calls `serve`. memory_bytes: address space of each beyond what it has after its setup.
        per_owner: calls of one owner that may wait. running_each: children that one owner may have at a time; None: all but one, at
        least one. setup: what each is told once, at its start. nice: how far it steps back when processors are short."""
        self._argv, self._memory_bytes, self._setup, self._nice = list(argv), memory_bytes, setup, nice
        self._turns: Turns[_Call] = Turns(count, running_each or max(count - 1, 1), per_owner)
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
        self._work: set[asyncio.Task[None]] = set()
        #: Calls whose callers wait.
        self._asked: set[_Call] = set()
        self._counts = _Counts()
        self._closed = False

    @property
    def statistics(self) -> Statistics:
        """How much waits, runs, and went how."""
        c = self._counts
        return Statistics(self._turns.waiting, self._turns.running, c.done, c.timeouts, c.deaths, c.refused)

    async def start(self) -> None:
        """Start all processes now, before the first call, so that no call waits for it. Raises ChildDied when one cannot start."""
        self._idle += await asyncio.gather(*(self._child() for _ in range(self._turns.places)))

    async def call(self, owner: str, payload: bytes, deadline_s: float, wait_s: float | None = None) -> bytes:
        """What a child's handler returns for `payload`. deadline_s: from when a child has it. wait_s: for a child; None: without limit.

        Raises ChildTimeout, ChildDied and ChildrenBusy. A call that is cancelled while it waits is forgotten; once a child has it,
        it goes on there, on its owner's account, and its result is dropped: cancelling costs nobody a new process.
        """
        if self._closed:
            raise ChildCannotStart("it is shut down")
        call = _Call(payload, deadline_s, asyncio.get_running_loop().create_future())
        if not self._turns.ask(owner, call):
            self._counts.refused += 1
            raise ChildrenBusy(f"{self._turns.waiting_each} calls of this owner wait already")
        self._asked.add(call)
        self._next()
        try:
            if wait_s is not None:
                timer = asyncio.get_running_loop().call_later(wait_s, self._give_up, owner, call)
                call.result.add_done_callback(lambda _: timer.cancel())
            return await call.result
        finally:
            self._asked.discard(call)
            self._turns.withdraw(owner, call)

    def _give_up(self, owner: str, call: _Call) -> None:
        if self._turns.withdraw(owner, call):
            self._counts.refused += 1
            _fail(call, ChildrenBusy("its turn did not come in time"))

    def _next(self) -> None:
        while not self._closed and (started := self._turns.start()) is not None:
            task = asyncio.ensure_future(self._run(*started))
            self._work.add(task)
            task.add_done_callback(self._work.discard)

    async def _run(self, owner: str, call: _Call) -> None:
        try:
            child = await self._child()
            try:
                result = await self._exchange(child, call)
            except ChildError as error:
                _fail(call, error)
                # Still on the account of the owner whose work ended the child: the next caller finds a new one.
                child = await self._child()
            else:
                self._counts.done += 1
                if not call.result.done():
                    call.result.set_result(result)
            self._idle.append(child)
        except ChildError as error:
            _fail(call, error)
        finally:
            self._turns.finish(owner)
            self._next()

    async def _exchange(self, child: _Child, call: _Call) -> bytes:
        """The child's answer. Raises ChildTimeout and ChildDied; it is gone then."""
        began = child.cpu_s()
        try:
            async with asyncio.timeout(call.deadline_s):
                await child.send(call.payload)
                return await child.receive(self._memory_bytes)
        except TimeoutError as e:
            cpu_s = child.cpu_s() - began
            await self._lose(child)
            self._counts.timeouts += 1
            raise ChildTimeout(f"killed after {call.deadline_s:g} s", cpu_s) from e
        except (EOFError, OSError) as e:
            status = await self._lose(child, _GRACE_S)
            self._counts.deaths += 1
            log.warning("a helper process died", program=self._argv[-1], status=status)
            raise ChildDied(f"it ended with status {status}", status) from e

    async def _child(self) -> _Child:
        """One that waits for work. Raises ChildDied when none can be started."""
        while self._idle:
            child = self._idle.pop()
            if child.process.poll() is None:
                return child
            await self._lose(child)  # it died between two calls
        try:
            child = await _Child.start(self._argv, self._nice)
        except OSError as e:
            raise ChildCannotStart(f"{self._argv[0]} cannot be started: {e.strerror}") from e
        self._all.add(child)
        try:
            async with asyncio.timeout(_START_S):
                await child.send(LIMITS.pack(self._memory_bytes), self._setup)
                await child.receive(0)
        except (TimeoutError, EOFError, OSError) as e:
            status = await self._lose(child, _GRACE_S)
            self._counts.deaths += 1
            log.error("a helper process does not start", program=self._argv[-1], status=status)
            raise ChildCannotStart(f"it does not start; its status is {status}", status) from e
        return child

    async def _lose(self, child: _Child, grace_s: float = 0.0) -> int:
        status = await child.end(grace_s)
        self._all.discard(child)  # not before: `close`, which cancels this, ends what is left
        return status

    async def close(self) -> None:
        """End all processes. What waits or runs raises ChildDied."""
        self._closed = True
        for call in list(self._asked):  # those of tasks that have not begun, too: cancelling tells nobody of them
            _fail(call, ChildCannotStart("it is shut down"))
        for task in list(self._work):
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        children, self._all = self._all, set()
        await asyncio.gather(*(child.end() for child in children))
        self._idle.clear()


def _fail(call: _Call, error: ChildError) -> None:
    if not call.result.done():
        call.result.set_exception(error)
