"""A rank's side: copies pieces between the node's arena and vLLM's KV blocks, beside the forward pass.

Three threads: one hears the scheduler side, one copies loads, one copies saves. The rank's own thread (vLLM's) hands in
the orders of each step and waits where it must: before a layer that a load of this step brings, and before blocks are
overwritten out of which a save is still copied. Nothing is decided here.

Invariants: a load touches no block after it is closed, so closing waits for the copy under way; a save's blocks are
read only between its step and the moment when its copies are reported; what a step computed from blocks that did not
come is not saved.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from storelink.arena_sharing import MARK_BYTES
from storelink.log import Log
from upbeat_vllm import wire
from upbeat_vllm.blocks import Blocks
from upbeat_vllm.orders import LoadOrder, SaveOrder, StepOrders

#: Loads (and, negative, saves) that are over and remembered: what still comes of them is ignored.
_REMEMBERED = 4096
#: How long nothing may come of a load, or of the store's answer to a save, in seconds; then it is given up.
SILENCE_S = 5.0
_CONNECT_S = 0.1
#: To the loads' thread, of a load: its order is here, so what came before can be done.
_ORDERED = -1


@dataclass
class _Load:
    order: LoadOrder
    left: dict[int, int] = field(default_factory=dict)
    closed: bool = False
    copying: bool = False
    came: int = 0
    began_s: float = 0.0
    heard_s: float = 0.0
    first_s: float = 0.0
    here: dict[int, int] = field(default_factory=dict)  #: by chunk, a bit for each layer that has come


@dataclass
class _Save:
    order: SaveOrder
    asked_s: float
    computed: bool = False
    grant: tuple[list[int], list[int]] | None = None
    done: bool = False


class RankSide:
    """See the module."""

    def __init__(self, blocks: Blocks, chunk_layers: int, engine_id: str, log: Log, in_flight: int = 1) -> None:
        """chunk_layers: layers of the whole model. in_flight: steps that vLLM schedules before it hears of the first
        one's failed loads."""
        self._blocks, self._layers, self._log = blocks, chunk_layers, log
        self._in_flight = in_flight
        #: So many steps' results are not saved: they were, or may have been, computed from blocks that did not come.
        self._unsound_steps = 0
        self._address = wire.address(engine_id)
        self._changed = threading.Condition()
        self._loads: dict[int, _Load] = {}
        self._saves: dict[int, _Save] = {}
        #: What came for loads and saves before their order did.
        self._early: dict[int, list[list[Any]]] = {}
        self._over: OrderedDict[int, None] = OrderedDict()
        self._sync: list[_Load] = []
        self._ending: dict[str, set[int]] = {}
        self._received: set[str] = set()
        self._failed: set[int] = set()
        self._arena: mmap.mmap | None = None
        self._file = -1
        self._connection: socket.socket | None = None
        self._sending = threading.Lock()
        self._work: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._save_work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closing = False
        for name, run in (("hear", self._hear), ("loads", self._copy_loads), ("saves", self._copy_saves)):
            threading.Thread(target=run, name=f"upbeat-{name}", daemon=True).start()

    # ---- vLLM's thread -----------------------------------------------------------------------------------------
    def overwrite(self, orders: StepOrders) -> None:
        """Before the step overwrites blocks: copies out of those end, or are given up."""
        for save_id in orders.drain:
            with self._changed:
                save = self._saves.get(save_id)
                if save is None or save.done:
                    continue
                if not (save.computed and save.grant is not None):
                    self._end_save(save_id, [])
                    continue
                self._changed.wait_for(lambda save=save: save.done)  # type: ignore[misc]

    def begin(self, orders: StepOrders) -> None:
        """The step's orders. Its forward pass may begin, and reads layers after `wait_for_layer`."""
        with self._changed:
            self._sync = []
            for order in orders.loads:
                load = _Load(order, began_s=(now := time.monotonic()), heard_s=now)
                wanted = sum(block >= 0 for block in order.blocks)
                load.left = dict.fromkeys(self._blocks.layers, wanted)
                self._loads[order.load_id] = load
                if order.sync:
                    self._sync.append(load)
                if order.load_id in self._early:
                    self._work.put([_ORDERED, order.load_id])
                if not wanted or self._arena is None:
                    self._close(load)
            for request_id in orders.aborted:
                for load in list(self._loads.values()):
                    if load.order.request_id == request_id:
                        self._close(load)
            for save_order in orders.saves:
                save = self._saves[save_order.save_id] = _Save(save_order, time.monotonic())
                for _, save_id, indices, offsets in self._early.pop(-save_order.save_id, ()):
                    self._grant(save_id, save, indices, offsets)
            for request_id, saves in orders.ending:
                self._ending[request_id] = set(saves)

    def wait_for_layer(self, layer: int) -> None:
        """Until every load of this step has the layer, or is closed."""
        for load in self._sync:
            with self._changed:
                while not load.closed and load.left.get(layer, 0):
                    if not self._changed.wait(0.25) and time.monotonic() - load.heard_s > SILENCE_S:
                        self._close(load)

    def computed(self, orders: StepOrders) -> None:
        """The forward pass has ended: what it completed may be copied. Loads of the step are over."""
        self._blocks.computed()
        with self._changed:
            for load in self._sync:
                if not load.closed:
                    self._close(load)
            self._sync = []
            for order in orders.saves:
                if (save := self._saves.get(order.save_id)) is not None:
                    if self._unsound_steps:
                        self._end_save(order.save_id, [])
                        continue
                    save.computed = True
                    self._try_save(order.save_id, save)
            self._unsound_steps = max(self._unsound_steps - 1, 0)

    def results(self) -> tuple[set[str], set[str], set[int]]:
        """Requests whose blocks are free now, requests whose load has ended, and blocks that did not come."""
        now = time.monotonic()
        with self._changed:
            for load in list(self._loads.values()):
                if not load.closed and now - load.heard_s > SILENCE_S:
                    self._close(load)
            for save_id, save in list(self._saves.items()):
                if save.grant is None and now - save.asked_s > SILENCE_S:
                    self._end_save(save_id, [])
            sent = {r for r, saves in self._ending.items() if not any(n in self._saves for n in saves)}
            for request_id in sent:
                del self._ending[request_id]
            received, self._received = self._received, set()
            failed, self._failed = self._failed, set()
        return sent, received, failed

    def close(self) -> None:
        """End the threads."""
        self._closing = True
        self._work.put(None)
        self._save_work.put(None)
        if self._connection is not None:
            wire.end(self._connection)

    # ---- ends, under the lock ----------------------------------------------------------------------------------
    def _close(self, load: _Load) -> None:
        self._changed.wait_for(lambda: not load.copying)
        if load.closed:
            return
        load.closed = True
        order = load.order
        self._loads.pop(order.load_id, None)
        self._remember(order.load_id)
        every = sum(1 << layer for layer in self._blocks.layers)
        for chunk, block in enumerate(order.blocks):
            if block >= 0 and load.here.get(chunk, 0) & every != every:
                self._failed.add(block)
                if order.sync:
                    self._unsound_steps = self._in_flight
        if not order.sync:
            self._received.add(order.request_id)
        now = time.monotonic()
        first_s = load.first_s or now
        self._send([wire.LOADED, order.load_id, load.came, first_s - load.began_s, now - first_s])
        self._changed.notify_all()

    def _wait_for_order(self, number: int, message: list[Any]) -> None:
        """Keep what came before its load's order, or its save's (negative), unless that is over."""
        if number not in self._over:
            self._early.setdefault(number, []).append(message)

    def _remember(self, number: int) -> None:
        self._early.pop(number, None)
        self._over[number] = None
        while len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)

    def _try_save(self, save_id: int, save: _Save) -> None:
        if save.computed and save.grant is not None:
            self._save_work.put(save_id)

    def _end_save(self, save_id: int, ok: Iterable[int]) -> None:
        if (save := self._saves.pop(save_id, None)) is not None:
            save.done = True
            self._remember(-save_id)
            self._send([wire.COPIED, save_id, list(ok)])
            self._changed.notify_all()

    def _send(self, message: list[Any]) -> None:
        with self._sending:
            if self._connection is not None:
                # The hearing thread sees a broken connection too.
                with contextlib.suppress(OSError):
                    wire.send(self._connection, message)

    # ---- the hearing thread ------------------------------------------------------------------------------------
    def _hear(self) -> None:
        while not self._closing:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(self._address)
            except OSError:
                connection.close()
                time.sleep(_CONNECT_S)
                continue
            if not wire.is_same_user(connection):
                connection.close()
                time.sleep(_CONNECT_S)
                continue
            self._connection = connection
            layers = self._blocks.layers
            self._send([wire.HELLO, layers.start, len(layers)])
            reader = wire.Reader(connection)
            try:
                while (message := reader.read()) is not None:
                    self._heard(message, reader)
            except (ValueError, TypeError, LookupError) as e:
                self._log.warning("a message of the scheduler side made no sense", reason=repr(e))
            connection.close()
            self._connection = None
            self._forget(None)
            time.sleep(_CONNECT_S)

    def _heard(self, message: list[Any], reader: wire.Reader) -> None:
        kind = message[0]
        if kind == wire.ARENA:
            self._map(reader.files.pop(), message[1])
        elif kind == wire.GONE:
            self._forget(message[1])
        elif kind == wire.GRANT:
            _, save_id, indices, offsets = message
            with self._changed:
                save = self._saves.get(save_id)
                if save is None:
                    self._wait_for_order(-save_id, message)
                else:
                    self._grant(save_id, save, indices, offsets)
        elif kind == wire.DROP:
            with self._changed:
                self._remember(message[1])
        else:
            self._work.put(message)

    def _grant(self, save_id: int, save: _Save, indices: list[int], offsets: list[int]) -> None:
        sound = self._arena is not None and len(offsets) == len(indices) * self._layers
        if not indices or not sound or not self._blocks.saves:
            self._end_save(save_id, indices if indices and sound else [])
            return
        save.grant = indices, offsets
        self._try_save(save_id, save)

    def _map(self, file: int, size: int) -> None:
        arena = mmap.mmap(file, size + MARK_BYTES, mmap.MAP_SHARED)
        with self._changed:
            self._arena, self._file = arena, file
        self._blocks.adopt(memoryview(arena)[:size])

    def _forget(self, number: int | None) -> None:
        """The store is gone: loads and saves that are not done are over, and nothing is copied after this."""
        self._work.put([wire.GONE, number])

    # ---- the loads' thread -------------------------------------------------------------------------------------
    def _copy_loads(self) -> None:
        while (message := self._work.get()) is not None:
            kind, number = message[:2]
            if kind == wire.GONE:
                self._leave(number)
                continue
            with self._changed:
                load = self._loads.get(number)
                messages = self._early.pop(number, []) if kind == _ORDERED else [message]
                if kind != _ORDERED and (load is None or number in self._early):  # behind what came earlier
                    self._wait_for_order(number, message)
                    continue
            if load is None:
                continue
            for message in messages:
                try:
                    if message[0] == wire.PIECES:
                        self._take(load, message)
                        continue
                except Exception as e:  # this thread must go on, and vLLM must hear of the blocks
                    self._log.warning("a copy into vLLM's blocks failed", reason=repr(e))
                with self._changed:
                    self._close(load)

    def _leave(self, number: int | None) -> None:
        with self._changed:
            for load in list(self._loads.values()):
                self._close(load)
            for save_id, save in list(self._saves.items()):
                if save.grant is None or not save.computed:
                    self._end_save(save_id, [])
            self._early.clear()
            # Saves that are being copied end first.
            self._changed.wait_for(lambda: not any(s.grant is not None for s in self._saves.values()))
            self._arena = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if number is not None:
            self._send([wire.LEFT, number])

    def _take(self, load: _Load, message: list[Any]) -> None:
        _, load_id, chunks, layers, offsets = message
        blocks, arena = load.order.blocks, self._arena
        arena_bytes = len(arena) - MARK_BYTES if arena is not None else 0
        last = arena_bytes - self._blocks.share_at - self._blocks.share_bytes
        by_layer: dict[int, list[tuple[int, int, int]]] = {}
        for chunk, layer, offset in zip(chunks, layers, offsets, strict=True):
            if layer in self._blocks.layers and chunk < len(blocks) and 0 <= offset <= last:
                by_layer.setdefault(layer, []).append((chunk, blocks[chunk], offset))
        for layer in sorted(by_layer):
            pieces = by_layer[layer]
            with self._changed:
                if load.closed:
                    return
                load.copying, load.first_s = True, load.first_s or time.monotonic()
            # Without the lock: the forward pass reads layers that are here.
            try:
                self._blocks.load(layer, [(block, offset) for _, block, offset in pieces if block >= 0])
            finally:
                with self._changed:
                    load.copying = False
                    self._changed.notify_all()
            with self._changed:
                load.heard_s = time.monotonic()
                load.came += len(pieces)
                load.here.update((chunk, load.here.get(chunk, 0) | 1 << layer) for chunk, _, _ in pieces)
                load.left[layer] -= sum(block >= 0 for _, block, _ in pieces)
                self._changed.notify_all()
            self._send([wire.TAKEN, load_id, [c for c, _, _ in pieces], [layer] * len(pieces)])
        with self._changed:
            if not load.closed and not any(load.left.values()):
                self._close(load)

    # ---- the saves' thread -------------------------------------------------------------------------------------
    def _copy_saves(self) -> None:
        while (save_id := self._save_work.get()) is not None:
            with self._changed:
                save = self._saves.get(save_id)
            if save is None or save.grant is None:
                continue
            (indices, offsets), arena = save.grant, self._arena
            rows = {i: row for row, i in enumerate(indices) if i < len(save.order.blocks)} if arena is not None else {}
            limit = (len(arena) - MARK_BYTES if arena is not None else 0) - self._blocks.share_at
            for layer in self._blocks.layers if rows else ():
                places = {i: offsets[row * self._layers + layer] for i, row in rows.items()}
                for i in [i for i, offset in places.items() if not 0 <= offset <= limit - self._blocks.share_bytes]:
                    del rows[i], places[i]
                try:
                    self._blocks.save(layer, [(save.order.blocks[i], offset) for i, offset in places.items()])
                except Exception as e:  # vLLM keeps the blocks until the save is over
                    self._log.warning("a copy out of vLLM's blocks failed", reason=repr(e))
                    rows = {}
                    break
            with self._changed:
                self._end_save(save_id, list(rows))
