"""Peers read by NIXL over UCX: one-sided READs of the owner's registered arena, by shared memory or RDMA where
available.

NIXL's own progress thread uses a whole core; our thread polls instead, often while reads run and rarely otherwise. It
makes all calls of the agent.

UCX is given its interface before it is loaded, so that a default deployment listens on loopback only.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.tiers import nixl
from kvstore.tiers.arena import Arena
from kvstore.tiers.contiguous import joined
from kvstore.tiers.transport import Card, GivenUp, LeasedRanges, PeerRange, never

#: A read that takes longer is cancelled.
_READ_S = 4.0
#: Pauses of the thread: while transfers run, while peers hold leases, otherwise.
_BUSY_S, _LEASED_S, _IDLE_S = 0.0001, 0.001, 0.05
#: No pause for this long after a read began: enough for several megabytes within one machine.
_EAGER_S = 0.003
_START_S = 20.0
#: The interpreter's switch interval. The polling thread would otherwise delay threads that verify by Python's 5 ms.
_SWITCH_S = 0.0001


class _Transfer:
    __slots__ = ("deadline", "done", "eager_until", "given_up", "handle")

    def __init__(self, handle: Any, done: Callable[[bool], None], given_up: GivenUp) -> None:
        self.handle = handle
        self.done = done
        now = time.monotonic()
        self.deadline = now + _READ_S
        self.eager_until = now + _EAGER_S
        self.given_up = given_up


class NixlTransport:
    """See the module. agent_name: must be new at every start of the process."""

    name = "nixl"

    def __init__(self, arena: Arena, leases: LeasedRanges, agent_name: str) -> None:
        self._arena = arena
        self._leases = leases
        self._agent_name = agent_name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._running: list[_Transfer] = []
        self._peers: dict[str, str] = {}  #: instance -> agent name
        self._agent: Any = None
        self._metadata = b""
        self._ready: asyncio.Future[None] | None = None
        self._stopped = False
        leases.opened = lambda: self._work.put(_nothing)

    async def start(self) -> None:
        """Raises ImportError where NIXL is not installed and RuntimeError where UCX does not work."""
        loop = asyncio.get_running_loop()
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self._ready = loop.create_future()
        threading.Thread(
            target=self._run, args=(loop, self._ready), name=f"nixl {self._agent_name}", daemon=True
        ).start()
        try:
            async with asyncio.timeout(_START_S):
                await self._ready
        except BaseException:
            await self.stop()  # the thread ends as soon as NIXL allows it
            raise

    def fill(self, card: Card) -> Card:
        return card._replace(nixl_metadata=self._metadata)

    async def read(self, peer: Card, lease: str, ranges: Sequence[PeerRange], given_up: GivenUp = never) -> bool:
        if self._stopped:
            return False
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        self._work.put(lambda: self._begin(peer, ranges, _resolver(loop, future), given_up))
        return await asyncio.shield(future)

    async def forget(self, peer: Card) -> None:
        self._work.put(lambda: self._remove(peer.instance))

    async def stop(self) -> None:
        """Running reads return false as soon as NIXL has released them."""
        self._stopped = True
        self._work.put(None)

    # ---- on the thread

    def _run(self, loop: asyncio.AbstractEventLoop, ready: asyncio.Future[None]) -> None:
        try:
            self._open()
        except Exception as e:
            loop.call_soon_threadsafe(_fail, ready, e)
            return
        loop.call_soon_threadsafe(_succeed, ready)
        while not self._stopped or self._running or not self._work.empty():
            pause = _BUSY_S if self._running else _LEASED_S if self._leases.count else _IDLE_S
            # UCX moves bytes only while polled: without pause for a while after a transfer began.
            eager = self._running and time.monotonic() < self._running[-1].eager_until
            try:
                work = self._work.get(block=not eager, timeout=pause)
                if work is not None:
                    work()
            except queue.Empty:
                pass
            with contextlib.suppress(Exception):
                self._agent.get_new_notifs()
            self._progress()

    def _open(self) -> None:
        api = nixl.load()
        if self._stopped:
            raise RuntimeError("it took too long to load")
        agent = api.nixl_agent(self._agent_name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        if "UCX" not in agent.backends:
            raise RuntimeError("NIXL has no UCX backend here")
        agent.register_memory([(self._arena.address, self._arena.size_bytes, 0, "")], "DRAM", backends=["UCX"])
        self._metadata = agent.get_agent_metadata()
        self._agent = agent

    def _begin(self, peer: Card, ranges: Sequence[PeerRange], done: Callable[[bool], None], given_up: GivenUp) -> None:
        if self._stopped or given_up():
            done(False)
            return
        try:
            if peer.instance not in self._peers:
                self._peers[peer.instance] = self._agent.add_remote_agent(peer.nixl_metadata)
            parts = list(joined(ranges))
            local = self._agent.get_xfer_descs(
                [(self._arena.address + here, length, 0) for _, here, length in parts], "DRAM"
            )
            remote = self._agent.get_xfer_descs(
                [(peer.arena_base + there, length, 0) for there, _, length in parts], "DRAM"
            )
            handle = self._agent.initialize_xfer("READ", local, remote, self._peers[peer.instance], backends=["UCX"])
        except Exception:
            self._remove(peer.instance)
            done(False)
            return
        try:
            state = self._agent.transfer(handle)
        except Exception:
            state = "ERR"
        if state == "PROC":
            self._running.append(_Transfer(handle, done, given_up))
        else:
            self._end(handle)
            if state != "DONE":
                self._remove(peer.instance)
            done(state == "DONE")

    def _progress(self) -> None:
        """Collect ended transfers. One past its deadline is reported only once NIXL has released it."""
        going: list[_Transfer] = []
        for transfer in self._running:
            try:
                state = self._agent.check_xfer_state(transfer.handle)
            except Exception:
                state = "ERR"
            if (
                state == "PROC"
                and time.monotonic() < transfer.deadline
                and not self._stopped
                and not transfer.given_up()
            ):
                going.append(transfer)
            elif self._end(transfer.handle):
                transfer.done(state == "DONE")
            else:
                going.append(transfer)
        self._running = going

    def _end(self, handle: Any) -> bool:
        """Release a handle; false while NIXL cannot cancel it yet."""
        try:
            handle.release()
        except Exception:
            return False
        return True

    def _remove(self, instance: str) -> None:
        name = self._peers.pop(instance, None)
        if name is not None and not self._running:
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(name)


def _nothing() -> None:
    """Wakes the thread."""


def _resolver(loop: asyncio.AbstractEventLoop, future: asyncio.Future[bool]) -> Callable[[bool], None]:
    def settle(ok: bool) -> None:
        if not future.done():
            future.set_result(ok)

    def resolve(ok: bool) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, ok)

    return resolve


def _succeed(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _fail(ready: asyncio.Future[None], error: Exception) -> None:
    if not ready.done():
        ready.set_exception(error)
