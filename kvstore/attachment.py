"""One attached worker: its messages become events, the core's instructions become messages to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import fields
from itertools import count as counter

from contracts.convert import (
    layers_from_bitmap,
    manifest_from_wire,
    session_from_wire,
    session_to_wire,
    shape_from_wire,
)
from contracts.errors import InvalidRequest, UpbeatError
from contracts.kv import KEY_BYTES, KvShape
from contracts.v1 import common_pb2
from contracts.v1 import kvstore_pb2 as pb
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.failpoints import reach
from kvstore.metrics import count, log
from kvstore.node import StoreNode
from runtime.outgoing import Outgoing

_numbers = counter(1)
_HBM_S = 0.5
#: How often a detached worker that may still copy is checked, and after how long that is logged.
_LINGER_LOOK_S, _LINGERS_S = 0.02, 5.0


class Attachment:
    """See the module. outgoing: the stream's messages; None ends it. fingerprints: the models that this worker serves.
    device: its number on the node."""

    def __init__(self, node: StoreNode) -> None:
        self._node = node
        self.owner = f"worker-{next(_numbers)}"
        self._number = 0  #: the attachment's number at the arena
        self._mapped = False
        self.outgoing = Outgoing(_join)
        self.fingerprints: frozenset[bytes] = frozenset()
        self.device = 0
        self._queries: dict[int, asyncio.Future[common_pb2.TierResidency | None]] = {}
        self._notices: dict[int, int] = {}  #: by query, the notice that its answer confirms
        self._query_numbers = counter(1)

    # ---- from the worker

    async def read(self, messages: AsyncIterator[pb.WorkerToStore]) -> None:
        """Handle the worker's messages until its stream ends."""
        try:
            async for message in messages:
                self._take(message)
        except (ValueError, TypeError, LookupError, OverflowError) as e:
            log.warning("a worker's message made no sense; it is detached", error=repr(e))
        except UpbeatError as e:
            self._node.fail(e)
        finally:
            self.outgoing.put(None)

    def _take(self, message: pb.WorkerToStore) -> None:
        node, now = self._node, self._node.clock.now()
        node.heard_from_worker = now
        kind = message.WhichOneof("kind")
        if kind in ("load", "save"):
            self._check_arena()
        if kind == "hello":
            self._hello(message.hello, now)
        elif kind == "load":
            load = self._load(message.load, now)
            node.traces.load(load.load, message.load)
            node.handle(load)
        elif kind == "taken":
            pieces = list(zip(message.taken.chunks, message.taken.layers, strict=False))
            node.handle(ev.PiecesTaken((self.owner, str(message.taken.load_id)), pieces, now))
        elif kind == "cancel":
            ident = self.owner, str(message.cancel.load_id)
            node.traces.cancelled(ident)
            node.handle(ev.LoadCancelled(ident, now))
        elif kind == "save":
            save = message.save
            keys = list(save.keys)
            fingerprint = self._declared(save.fingerprint)
            node.traces.save((self.owner, save.save_id), save)
            node.handle(
                ev.SaveWanted((self.owner, save.save_id), session_from_wire(save.session), fingerprint, keys, now)
            )
            reach("save.granted")
        elif kind == "saved":
            done = message.saved
            node.traces.copied((self.owner, done.save_id), done.ok)
            node.handle(ev.SaveEnded((self.owner, done.save_id), list(done.ok), list(done.aborted), now))
        elif kind == "turn":
            manifest = manifest_from_wire(message.turn.manifest)
            if all(len(key) == KEY_BYTES for key in manifest.keys):
                node.handle(ev.TurnEnded(node.notes.sealed(manifest), now, self.owner))
        elif kind == "hbm":
            self._told(message.hbm, now)
        else:
            count("unknown_messages")

    def _told(self, answer: pb.HbmResidency, now: float) -> None:
        notice = self._notices.pop(answer.query_id, None)
        if notice is not None:
            self._node.handle(ev.EraseHeard(self.owner, notice, now))
        future = self._queries.pop(answer.query_id, None)
        if future is not None and not future.done():
            future.set_result(answer.hbm)

    def _hello(self, hello: pb.AttachHello, now: float) -> None:
        node = self._node
        if self._number:
            raise ValueError("a second hello")
        arena, self._number = node.arena, node.arena.attachment()
        welcome = pb.AttachWelcome(
            node=node.name,
            arena_path=str(arena.path),
            arena_bytes=arena.size_bytes,
            nonce=arena.nonce,
            attachment=self._number,
        )
        self.outgoing.put(pb.StoreToWorker(welcome=welcome))
        node.owners[self.owner] = self
        node.workers[self.owner] = self
        sound = self._sound(hello)
        self.fingerprints, self.device = frozenset(s.fingerprint for s in sound), hello.device
        node.handle(ev.ShapesDeclared(self.owner, sound, now))
        refused = len(hello.shapes) - len(sound)
        log.info("worker attached", worker=hello.worker_id, device=self.device, models=len(sound), refused=refused)

    def _sound(self, hello: pb.AttachHello) -> list[KvShape]:
        """The shapes that this store can hold. The others are logged with the reason, and nothing is kept of their
        models."""
        known, sound = self._node.store.index.shapes, []
        for message in hello.shapes:
            try:
                shape = shape_from_wire(message)
                _check_same(shape, known.get(shape.fingerprint, shape))
            except InvalidRequest as e:
                log.warning("a model's shape is refused", worker=hello.worker_id, field=e.param, reason=str(e))
            else:
                sound.append(shape)
        return sound

    def _check_arena(self) -> None:
        """Raise ValueError unless the worker holds its lock on this arena's file: it gets no offsets into another
        one."""
        self._mapped = self._mapped or self._node.arena.is_used_by(self._number)
        if not self._mapped:
            raise ValueError("it has not mapped this store's arena; do its container and the store's share shm_dir?")

    def _declared(self, fingerprint: bytes) -> bytes:
        """The fingerprint if the worker declared its shape, else one that no model has."""
        return fingerprint if fingerprint in self.fingerprints else b""

    def _load(self, load: pb.LoadRequest, now: float) -> ev.LoadWanted:
        fingerprint = self._declared(load.fingerprint)
        shape = self._node.store.index.shapes.get(fingerprint)
        layers = shape.layers if shape else 0
        wants = [(c.key, tuple(layers_from_bitmap(c.layers, layers)) if c.layers else ()) for c in load.chunks]
        return ev.LoadWanted(
            (self.owner, str(load.load_id)),
            ev.LoadKind.PREFETCH if load.load_class == pb.PREFETCH else ev.LoadKind.DEMAND,
            session_from_wire(load.session) if load.HasField("session") else None,
            fingerprint,
            wants,
            [n for n in load.source_nodes if n != self._node.name],
            load.priority,
            now,
        )

    def gone(self) -> None:
        """The stream ended: release everything of this worker, once it copies no more."""
        self._node.owners.pop(self.owner, None)
        self._node.workers.pop(self.owner, None)
        self._node.traces.gone(self.owner)
        if self._node.arena.is_used_by(self._number):
            self._node.background(self._release_late(), "release")
        else:
            self._release()
        for future in self._queries.values():
            if not future.done():
                future.set_result(None)

    def _release(self) -> None:
        self._node.handle(ev.WorkerGone(self.owner, self._node.clock.now()))

    async def _release_late(self) -> None:
        """Release once the worker has let go of the arena or is dead: a slow or stopped one may still copy."""
        arena, clock = self._node.arena, self._node.clock
        began, told = clock.now(), False
        while arena.is_used_by(self._number):
            if not told and clock.now() - began > _LINGERS_S:
                told = True
                count("workers_linger")
                log.warning(
                    "a worker's stream has ended, and it still uses the arena: what it was granted stays reserved",
                    owner=self.owner,
                )
            await clock.sleep(_LINGER_LOOK_S)
        self._release()

    # ---- to the worker

    def answer(self, instruction: do.Found | do.Pieces | do.End | do.Grant) -> None:
        """Owner.answer"""
        self._node.traces.told(instruction)
        self.outgoing.put(_answer(instruction))

    def tell(self, instruction: do.Offer | do.TellInvalid | do.TellErase) -> None:
        """Attached.tell"""
        match instruction:
            case do.TellInvalid():
                message = pb.StoreToWorker(invalidate=session_to_wire(instruction.session))
            case do.TellErase():
                message = pb.StoreToWorker(
                    erase=pb.Erase(keys=instruction.keys, sessions=[session_to_wire(s) for s in instruction.sessions])
                )
            case do.Offer() as o:
                offer = pb.PrefetchOffer(
                    session=session_to_wire(o.session),
                    fingerprint=o.fingerprint,
                    keys=o.keys,
                    priority=o.priority,
                    arrival_s=o.arrival_s,
                    expires_s=o.expires_s,
                    note=o.note,
                )
                message = pb.StoreToWorker(offer=offer)
        self.outgoing.put(message)
        if isinstance(instruction, do.TellErase) and instruction.notice:
            # A worker handles its messages in order, so its answer to a later query confirms this notice.
            number = next(self._query_numbers)
            self._notices[number] = instruction.notice
            self.outgoing.put(pb.StoreToWorker(hbm_query=pb.HbmQuery(query_id=number)))

    async def hbm(self, fingerprint: bytes, keys: list[bytes]) -> common_pb2.TierResidency | None:
        """What the worker holds of these chunks; None when it does not answer in time."""
        number = next(self._query_numbers)
        future: asyncio.Future[common_pb2.TierResidency | None] = asyncio.get_running_loop().create_future()
        self._queries[number] = future
        self.outgoing.put(pb.StoreToWorker(hbm_query=pb.HbmQuery(query_id=number, fingerprint=fingerprint, keys=keys)))
        try:
            async with asyncio.timeout(_HBM_S):
                return await future
        except TimeoutError:
            return None
        finally:
            self._queries.pop(number, None)


def _check_same(shape: KvShape, known: KvShape) -> None:
    """Raise InvalidRequest naming the first field in which they differ."""
    for field in fields(shape):
        value, here = getattr(shape, field.name), getattr(known, field.name)
        if value != here:
            raise InvalidRequest(
                f"{field.name} = {value!r}: this store knows the fingerprint with {here!r}", param=field.name
            )


def _join(last: pb.StoreToWorker, new: pb.StoreToWorker) -> bool:
    """Merge waiting pieces of one load into one message."""
    if (
        last.WhichOneof("kind") != "pieces"
        or new.WhichOneof("kind") != "pieces"
        or last.pieces.load_id != new.pieces.load_id
    ):
        return False
    last.pieces.MergeFrom(new.pieces)
    return True


def _answer(instruction: do.Found | do.Pieces | do.End | do.Grant) -> pb.StoreToWorker:
    match instruction:
        case do.Found() as f:
            sources = [0 if source is None else source + 1 for source in f.sources]
            found = pb.LoadFound(load_id=int(f.load[1]), chunks=f.chunks, near=f.near, sources=sources, due_s=f.due_s)
            return pb.StoreToWorker(found=found)
        case do.Pieces() as p:
            pieces = pb.LoadPieces(
                load_id=int(p.load[1]),
                chunks=[x[0] for x in p.pieces],
                layers=[x[1] for x in p.pieces],
                offsets=[x[2] for x in p.pieces],
            )
            return pb.StoreToWorker(pieces=pieces)
        case do.End() as e:
            return pb.StoreToWorker(end=pb.LoadEnd(load_id=int(e.load[1]), usable=e.usable))
        case do.Grant() as g:
            grant = pb.SaveGrant(
                save_id=g.save[1], indices=g.indices, offsets=g.offsets, held=g.held, refused=g.refused
            )
            return pb.StoreToWorker(grant=grant)
