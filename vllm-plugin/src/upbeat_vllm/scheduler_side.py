"""The scheduler side's shell: one thread with an event loop keeps the link to the store and a socket for the ranks; the
engine's thread calls the core. A lock keeps them apart; nobody waits while holding it.

Pieces, ends and grants go to the ranks as they come, without waiting for a step of the engine.

An engine without requests sleeps, and evicts nothing that was erased. Where a sidecar listens, it is asked to send the
engine a request (`wake`), again and again until vLLM's cache has forgotten what it must. It also hears which hinted
sessions are in the arena: a request brings one into vLLM's cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from contracts.v1 import common_pb2
from contracts.v1 import kvstore_pb2 as pb
from storelink.ends import ArenaGone, ArenaHere, End
from storelink.fleet import SecretDiffers
from storelink.link import StoreLink
from storelink.log import Log
from upbeat_vllm import wire
from upbeat_vllm.core import Core
from upbeat_vllm.orders import StepOrders
from upbeat_vllm.state import Turn

#: Seconds until an erasure counts as waiting for an idle engine, and between two requests for a step.
_WAKE_AFTER_S, _WAKE_AGAIN_S = 0.2, 1.0
#: Seconds to reach the sidecar, and to send it a message.
_SIDECAR_S = 5.0
#: Seconds that a step with other requests waits for the store's answers, and one without.
_STEP_WAIT_S, _IDLE_WAIT_S = 0.002, 0.02
#: Seconds that the engine rests when all its requests wait for KV: its empty steps take the cores that bring it.
_REST_S = 0.005


class _Rank:
    """One connected rank. layers: those that it has."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.reader = wire.Reader(connection)
        self.layers = range(0)
        self.lock = threading.Lock()

    def send(self, message: list[Any], file: int | None = None) -> None:
        with self.lock, contextlib.suppress(OSError):
            wire.send(self.connection, message, file)


class SchedulerSide:
    """See the module. `core` is used under `lock`."""

    def __init__(
        self,
        core: Core,
        store: str,
        engine_id: str,
        name: str,
        device: int,
        log: Log,
        wake: Path | None = None,
        node: str = "",
    ) -> None:
        """wake, node: see `Settings`."""
        self._wake, self._wakes = wake, False
        self._messages: set[asyncio.Task[None]] = set()
        self.core, self.lock, self._log = core, threading.RLock(), log
        #: The store has answered, or a load has ended.
        self._found = threading.Condition(self.lock)
        #: Seconds that the coming step has waited for the store.
        self._waited_s = 0.0
        self._store, self._name, self._device, self._node = store, name, device, node
        self._ranks: list[_Rank] = []
        self._arena: tuple[int, int] | None = None  # (file, bytes)
        self._gone = 0
        self._leaving: dict[int, tuple[int, Callable[[], None]]] = {}
        self._taken: dict[int, Counter[tuple[int, int]]] = {}
        self._done: dict[int, list[tuple[int, float, float]]] = {}
        #: Answers to questions that wait for vLLM's cache to have forgotten what was erased.
        self._to_answer: list[pb.WorkerToStore] = []
        self._link: StoreLink | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(wire.address(engine_id))
        self._listener.listen(64)
        self._closing = False
        threading.Thread(target=self._accept, name="upbeat-ranks", daemon=True).start()
        threading.Thread(target=self._run_link, name="upbeat-link", daemon=True).start()

    # ---- the engine's thread -----------------------------------------------------------------------------------
    def match(self, turn: Turn, tokens: Sequence[int], computed: int) -> tuple[int | None, bool]:
        """`Core.match`. Waits a little for the store's answer: a None costs the request a step. Under the lock."""
        found = self.core.match(turn, tokens, computed, time.monotonic())
        self.flush()
        limit_s = (_STEP_WAIT_S if self.core.busy else _IDLE_WAIT_S) - self._waited_s
        if found[0] is not None or limit_s <= 0 or not self.core.waits(turn.request_id):
            return found
        began_s = time.monotonic()
        answered = self._found.wait_for(lambda: not self.core.waits(turn.request_id), limit_s)
        self._waited_s += time.monotonic() - began_s
        if answered:
            found = self.core.match(turn, tokens, computed, time.monotonic())
            self.flush()
        return found

    def take_orders(self) -> StepOrders:
        """`Core.take_orders`: a step begins. Under the lock."""
        self._waited_s = 0.0
        orders = self.core.take_orders()
        self.flush()
        return orders

    def rest(self) -> None:
        """The coming step has no work. Where requests only wait for KV, wait until some comes. Under the lock."""
        if self.core.only_loads:
            self._found.wait(_REST_S)

    def flush(self) -> None:
        """Send what the core has for the store, and forget loads at the ranks that were given up. Under the lock."""
        messages, self.core.to_store = self.core.to_store, []
        link = self._link
        for message in messages:
            if message.WhichOneof("kind") == "cancel":
                self._tell([wire.DROP, message.cancel.load_id])
            if link is not None:
                link.send(message)

    def evicted(self) -> None:
        """vLLM's cache has forgotten what was to be evicted: answer who waits for that. Under the lock."""
        answers, self._to_answer = self._to_answer, []
        for answer in answers:
            if self._link is not None:
                self._link.send(answer)

    def close(self) -> None:
        """End the threads; the store keeps what it was given."""
        self._closing = True
        wire.end(self._listener)
        if self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
        for rank in self._ranks:
            wire.end(rank.connection)

    # ---- the link's thread -------------------------------------------------------------------------------------
    def _run_link(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            try:
                asyncio.run(self._stay_linked())
            except SecretDiffers as e:
                self._log.warning("this server is not let in, and serves without Upbeat's cache", reason=str(e))

    async def _stay_linked(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        end = End(self.core.shape, attached=self._attached, hear=self._hear, move=self._move)
        self._link = StoreLink(self._store, self._name, [end], self._log, device=self._device, node=self._node)
        await self._link.run()

    def _attached(self, here: bool) -> None:
        with self.lock:
            self._here(here)
            self._found.notify_all()
            self.flush()

    def _here(self, attached: bool) -> None:
        """Under the lock."""
        arena_bytes = self._arena[1] if self._arena is not None else 0
        self.core.here(attached and len(self._ranks) == self.core.ranks, arena_bytes)

    def _hear(self, message: pb.StoreToWorker) -> None:
        kind = message.WhichOneof("kind")
        with self.lock:
            if kind == "hbm_query":
                self._answer(message.hbm_query)
            else:
                self.core.hear(message, time.monotonic())
                self._found.notify_all()
            self.flush()
            offers, self.core.to_warm = self.core.to_warm, []
            for offer in offers:
                self._tell_sidecar(offer)
            if self.core.blocks.to_evict and not self._wakes and self._wake is not None and self._loop is not None:
                self._wakes = True
                self._loop.call_later(_WAKE_AFTER_S, self._ask_for_a_step)

    def _ask_for_a_step(self) -> None:
        with self.lock:
            self._wakes = bool(self.core.blocks.to_evict)
        if not self._wakes or self._closing or self._wake is None or self._loop is None:
            return
        self._tell_sidecar(b"")
        self._loop.call_later(_WAKE_AGAIN_S, self._ask_for_a_step)

    def _tell_sidecar(self, message: bytes) -> None:
        if self._wake is not None and self._loop is not None:
            task = self._loop.create_task(_sent(self._wake, message))
            self._messages.add(task)
            task.add_done_callback(self._messages.discard)

    def _answer(self, query: pb.HbmQuery) -> None:
        chunks, layers = self.core.blocks.leading(query.keys), self.core.shape.layers
        tokens = chunks * self.core.shape.chunk_tokens
        answer = pb.HbmResidency(
            query_id=query.query_id,
            hbm=common_pb2.TierResidency(
                tier="hbm", layer_chunks=[chunks] * layers, tokens=tokens, bytes=chunks * self.core.shape.chunk_bytes
            ),
        )
        message = pb.WorkerToStore(hbm=answer)
        if self.core.blocks.to_evict:
            self._to_answer.append(message)
        elif self._link is not None:
            self._link.send(message)

    def _move(self, message: object) -> None:
        if isinstance(message, ArenaHere):
            self._arena = message.file, message.arena.nbytes
            self._tell([wire.ARENA, message.arena.nbytes], message.file)
        elif isinstance(message, ArenaGone):
            self._arena = None
            self._gone += 1
            with self.lock:
                ranks = len(self._ranks)
                if ranks:
                    self._leaving[self._gone] = (ranks, message.left)
            if not ranks:
                self._left(message.left)
            self._tell([wire.GONE, self._gone])
        elif isinstance(message, pb.LoadPieces):
            self._tell(
                [wire.PIECES, message.load_id, list(message.chunks), list(message.layers), list(message.offsets)]
            )
        elif isinstance(message, pb.LoadEnd):
            self._tell([wire.END, message.load_id])
            self._hear(pb.StoreToWorker(end=message))
        elif isinstance(message, pb.SaveGrant):
            self._hear(pb.StoreToWorker(grant=message))
            self._tell([wire.GRANT, message.save_id, list(message.indices), list(message.offsets)])

    @staticmethod
    def _left(left: Callable[[], None]) -> None:
        left()  # loads
        left()  # saves

    def _tell(self, message: list[Any], file: int | None = None) -> None:
        for rank in list(self._ranks):
            rank.send(message, file)

    # ---- the ranks' threads ------------------------------------------------------------------------------------
    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if not wire.is_same_user(connection):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(_Rank(connection),), name="upbeat-rank", daemon=True).start()

    def _serve(self, rank: _Rank) -> None:
        try:
            while (message := rank.reader.read()) is not None:
                self._from_rank(rank, message)
        except (ValueError, TypeError, LookupError) as e:
            self._log.warning("a rank's message made no sense", reason=repr(e))
        with self.lock:
            if rank in self._ranks:
                self._ranks.remove(rank)
                self.core.here(False)
                self.flush()
            for number in list(self._leaving):
                self._rank_left(number)

    def _from_rank(self, rank: _Rank, message: list[Any]) -> None:
        kind, *rest = message
        with self.lock:
            if kind == wire.HELLO:
                rank.layers = range(rest[0], rest[0] + rest[1])
                self._ranks.append(rank)
                if self._arena is not None:
                    rank.send([wire.ARENA, self._arena[1]], self._arena[0])
                self._here(self._arena is not None)
            elif kind == wire.TAKEN:
                self._pieces_taken(*rest)
            elif kind == wire.LOADED:
                self._loaded(*rest)
                self._found.notify_all()
            elif kind == wire.COPIED:
                self.core.copied(*rest)
            elif kind == wire.LEFT:
                self._rank_left(rest[0])
            self.flush()

    def _pieces_taken(self, load_id: int, chunks: list[int], layers: list[int]) -> None:
        counts = self._taken.setdefault(load_id, Counter())
        whole = []
        for piece in zip(chunks, layers, strict=True):
            counts[piece] += 1
            if counts[piece] >= sum(piece[1] in rank.layers for rank in self._ranks):
                whole.append(piece)
        if whole and self._link is not None:
            taken = pb.LoadTaken(load_id=load_id, chunks=[c for c, _ in whole], layers=[layer for _, layer in whole])
            self._link.send(pb.WorkerToStore(taken=taken))

    def _loaded(self, load_id: int, came: int, waited_s: float, seconds: float) -> None:
        done = self._done.setdefault(load_id, [])
        done.append((came, waited_s, seconds))
        if len(done) >= len(self._ranks):
            del self._done[load_id]
            self._taken.pop(load_id, None)
            pieces, waits_s, took_s = zip(*done, strict=True)
            self.core.loaded(load_id, sum(pieces), max(waits_s), max(took_s), time.monotonic())
            # What it has not taken goes back to the store.
            self.core.to_store.append(pb.WorkerToStore(cancel=pb.LoadCancel(load_id=load_id)))

    def _rank_left(self, number: int) -> None:
        if (waits := self._leaving.pop(number, None)) is None:
            return
        count, left = waits
        if count > 1:
            self._leaving[number] = count - 1, left
        else:
            self._left(left)


async def _sent(path: Path, message: bytes) -> None:
    """Whoever listens has it, or nobody does."""
    with contextlib.suppress(OSError, TimeoutError):
        _, writer = await asyncio.wait_for(asyncio.open_unix_connection(str(path)), _SIDECAR_S)
        writer.write(message)
        writer.close()
        await asyncio.wait_for(writer.wait_closed(), _SIDECAR_S)
