"""Helper processes for work on untrusted input that cannot be bounded in-process: a helper can be killed.

`Children` is the parent's side: it starts processes, gives each one call at a time, in turns by owner
(`runtime.turns`), and kills a process at its call's deadline. `runtime.child.serve` is the child's side. They exchange
length-prefixed frames over stdin and stdout. A child limits its own memory, ends with its parent, and is the first
choice of the kernel's OOM killer.
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
#: Limit for the start of a child; its imports take well below a second on an idle core.
_START_S = 30.0
#: Time for a child that closed its socket to exit by itself.
_GRACE_S = 0.5
_POLL_S = 0.005


class ChildError(Exception):
    """The call has no result."""


class ChildTimeout(ChildError):
    """The call exceeded its deadline and the child was killed. cpu_s: processor time used; far below the deadline means
    a busy machine."""

    def __init__(self, message: str, cpu_s: float) -> None:
        super().__init__(message)
        self.cpu_s = cpu_s


class ChildDied(ChildError):
    """The child ended during the call: memory limit or crash. status: exit status, or minus a signal's number. The next
    call gets a new child."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ChildCannotStart(ChildDied):
    """No child could be started; the call was not tried."""


class ChildrenBusy(ChildError):
    """Too many calls of this owner wait, or its turn did not come in time. The call was not tried."""


@dataclass(eq=False, slots=True)
class _Call:
    payload: bytes
    deadline_s: float
    result: asyncio.Future[bytes]


@dataclass(frozen=True, slots=True)
class Statistics:
    """waiting, running: calls now. The others: counts since the start."""

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
    """A process, with one socket as its stdin and stdout."""

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def start(cls, argv: Sequence[str], nice: int) -> _Child:
        """nice: niceness relative to this process, set at once, so that it covers the imports. Raises OSError.

        Uses `subprocess`, which uses vfork: asyncio and uvloop fork, which runs the fork handlers of gRPC and other
        threaded libraries and can hang the child and this loop. The child has its own process group, so that Ctrl-C
        does not reach it, but the same session (`runtime.niceness`).
        """
        env = {**os.environ, "MALLOC_ARENA_MAX": "1"}  # else every thread reserves address space
        mine, its = socket.socketpair()
        with its:
            try:
                process = subprocess.Popen(argv, stdin=its.fileno(), stdout=its.fileno(), env=env, process_group=0)  # noqa: ASYNC220
            except BaseException:
                mine.close()
                raise
        try:
            with contextlib.suppress(OSError):  # it has already ended
                os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + nice)
            mine.setblocking(False)
            return cls(process, *await asyncio.open_connection(sock=mine))
        except BaseException:  # cancelled: no other code would end the process
            process.kill()
            process.wait()
            raise

    async def receive(self, most: int) -> bytes:
        """Receives one frame. Raises EOFError when the process has ended or the frame is longer than `most`."""
        try:
            (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
            if length > most:
                raise EOFError(f"a frame of {length} bytes")
            return await self.reader.readexactly(length)
        except asyncio.IncompleteReadError as e:
            raise EOFError("it ended") from e

    async def send(self, *parts: bytes) -> None:
        """Sends `parts` as one frame. Raises OSError when the process has ended."""
        self.writer.write(LENGTH.pack(sum(map(len, parts))))
        for part in parts:
            self.writer.write(part)
        await self.writer.drain()

    def cpu_s(self) -> float:
        """Processor time used so far; 0 when unknown."""
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(self.process.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    async def end(self, grace_s: float = 0.0) -> int:
        """Waits `grace_s`, kills the process if it still runs, and returns its exit status."""
        try:
            await self._ended(grace_s)
        finally:
            self.process.kill()
            self.writer.close()
        await self._ended(math.inf)
        return int(self.process.returncode)

    async def _ended(self, limit_s: float) -> None:
        """Returns when the process has ended, or after the limit. Polls: a few milliseconds do not matter."""
        until = asyncio.get_running_loop().time() + limit_s
        while self.process.poll() is None and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)


class Children:
    """Up to `count` processes of one program. One event loop; only copies of payloads and answers block it.

    Processes start on demand, and are replaced when lost.
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
        """argv: a program whose main calls `serve`. memory_bytes: address space of a child in addition to what it has
        after its setup. per_owner: limit of waiting calls per owner. running_each: limit of children per owner at a
        time; None: all but one, at least one. setup: sent to each child at its start. nice: added to its niceness."""
        self._argv, self._memory_bytes, self._setup, self._nice = list(argv), memory_bytes, setup, nice
        self._turns: Turns[_Call] = Turns(count, running_each or max(count - 1, 1), per_owner)
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
        self._work: set[asyncio.Task[None]] = set()
        #: Calls without a result yet.
        self._asked: set[_Call] = set()
        self._counts = _Counts()
        self._closed = False

    @property
    def statistics(self) -> Statistics:
        """Current load and counts of outcomes."""
        c = self._counts
        return Statistics(self._turns.waiting, self._turns.running, c.done, c.timeouts, c.deaths, c.refused)

    async def start(self) -> None:
        """Starts all processes, so that the first calls do not wait for it. Raises ChildDied when one cannot start."""
        self._idle += await asyncio.gather(*(self._child() for _ in range(self._turns.places)))

    async def call(self, owner: str, payload: bytes, deadline_s: float, wait_s: float | None = None) -> bytes:
        """Returns the result of a child's handler for `payload`. deadline_s: from the moment a child has it. wait_s:
        limit of waiting for a child; None: no limit.

        Raises ChildTimeout, ChildDied and ChildrenBusy. Cancelling a waiting call removes it. A running call goes on
        when cancelled, still counts for its owner, and its result is dropped; so cancelling costs no process.
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
                # Starting the replacement still counts for the owner whose call ended the child.
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
        """The child's answer. Raises ChildTimeout and ChildDied, after ending the child."""
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
        """An idle child, started if necessary. Raises ChildDied when it cannot start."""
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
        self._all.discard(child)  # after ending it: if `close` cancels this, it ends the rest of `_all`
        return status

    async def close(self) -> None:
        """Ends all processes. Waiting and running calls raise ChildDied."""
        self._closed = True
        for call in list(self._asked):  # a task that is cancelled before it begins would not fail its call
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
