"""A worker of the simulated world: loads, checks every piece that it is given, computes and saves the rest, and ends
its turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.core import events as ev
from kvstore.core import instructions as do
from tests.sim.node import SimNode
from tests.sim.world import World, Wrong


@dataclass
class Session:
    """A conversation: its chain of keys as far as it will ever go.

    erased: when it was. named: what its manifest named then, as all nodes know it. clean: nothing was away then or
    since.
    """

    key: SessionKey
    shape: KvShape
    keys: list[bytes]
    erased: float | None = None
    clean: bool = True
    named: tuple[bytes, ...] = ()


@dataclass
class Turn:
    """One load and what follows it. erased: its session was, as its worker has heard; nothing of it is kept. `got`:
    pieces that came."""

    session: Session
    keys: list[bytes]
    kind: ev.LoadKind
    found: int | None = None
    ended: int | None = None
    cancelled: bool = False
    erased: bool = False
    got: set[tuple[int, int]] = field(default_factory=set)


class SimWorker:
    """See the module. One life: a worker that is attached again is a new one."""

    def __init__(self, world: World, node: SimNode, name: str, sessions: list[Session]) -> None:
        self.world = world
        self.node = node
        self.name = name
        self.sessions = sessions
        self.attached = True
        self.turns: dict[ev.LoadId, Turn] = {}
        self._saves: dict[int, Turn] = {}
        self._numbers = 0
        self._epoch = node.epoch
        node.owners[name] = self
        node.workers[name] = self
        node.handle(ev.ShapesDeclared(name, list({s.shape.fingerprint: s.shape for s in sessions}.values()), world.now))

    @property
    def alive(self) -> bool:
        return self.attached and self.node.alive and self.node.epoch == self._epoch

    def detach(self) -> None:
        if self.alive:
            self.node.owners.pop(self.name, None)
            self.node.workers.pop(self.name, None)
            self.attached = False
            self.node.handle(ev.WorkerGone(self.name, self.world.now))
        self.attached = False

    def load(
        self, session: Session, length: int, kind: ev.LoadKind, sources: tuple[str, ...], layers: tuple[int, ...] = ()
    ) -> None:
        self._numbers += 1
        ident = (self.name, str(self._numbers))
        self.turns[ident] = Turn(session, session.keys[:length], kind)
        wants = [(key, layers) for key in session.keys[:length]]
        priority = self.world.random.randint(-1, 1)
        self.node.handle(
            ev.LoadWanted(ident, kind, session.key, session.shape.fingerprint, wants, sources, priority, self.world.now)
        )

    def cancel(self, ident: ev.LoadId) -> None:
        turn = self.turns[ident]
        if self.alive and not turn.cancelled:
            turn.cancelled = True
            self.node.handle(ev.LoadCancelled(ident, self.world.now))

    # ---- what the store says

    def answer(self, instruction: do.Instruction) -> None:
        match instruction:
            case do.Found():
                turn = self.turns[instruction.load]
                if turn.found is not None or turn.cancelled:
                    raise Wrong("a load was told twice what comes, or after it was cancelled")
                turn.found = instruction.chunks
            case do.Pieces():
                self._pieces(instruction)
            case do.End():
                self._end(instruction)
            case do.Grant():
                self._granted(instruction)
            case do.Offer():
                session = next((s for s in self.sessions if s.key == instruction.session), None)
                if session is not None and self.world.random.random() < 0.5:
                    keys = len(instruction.keys)
                    self.world.soon(lambda: self.load(session, keys, ev.LoadKind.PREFETCH, ()) if self.alive else None)

    def _pieces(self, given: do.Pieces) -> None:
        turn = self.turns[given.load]
        if turn.found is None or turn.ended is not None or turn.cancelled:
            raise Wrong("pieces came before Found, after End or after the load was cancelled")
        for i, layer, _, _ in given.pieces:
            if (i, layer) in turn.got:
                raise Wrong("a piece was given twice")
            turn.got.add((i, layer))

        def take() -> None:
            if not self.alive or turn.cancelled:
                return
            for i, layer, offset, checksum in given.pieces:
                content = self.node.pages.read(offset, turn.session.shape.piece_bytes)
                self.world.check(content, turn.keys[i], layer, self.name)
                assert content is not None
                if self.world.sum_of(content) != checksum:
                    raise Wrong("a piece came with the checksum of another copy")
            self.node.handle(
                ev.PiecesTaken(given.load, [(i, layer) for i, layer, _, _ in given.pieces], self.world.now)
            )

        self.world.soon(take, 0.02)

    def _end(self, end: do.End) -> None:
        turn = self.turns[end.load]
        if turn.found is None or turn.ended is not None or turn.cancelled or end.usable > turn.found:
            raise Wrong("a load ended twice, before Found, after it was cancelled, or with more than was found")
        turn.ended = end.usable
        layers = (
            {layer for _, layer in turn.got}
            if turn.kind is ev.LoadKind.PREFETCH
            else set(range(turn.session.shape.layers))
        )
        missing = {(i, layer) for i in range(end.usable) for layer in layers} - turn.got
        if missing and turn.kind is ev.LoadKind.DEMAND:
            raise Wrong(f"a load ended with {end.usable} usable chunks, of which {len(missing)} pieces never came")
        if turn.kind is ev.LoadKind.DEMAND:
            self.world.soon(lambda: self._save(turn))

    # ---- the rest of a turn

    def erased(self, sessions: Sequence[SessionKey]) -> None:
        """The store has told it."""
        for turn in self.turns.values():
            turn.erased = turn.erased or turn.session.key in sessions

    def _save(self, turn: Turn) -> None:
        if not self.alive or turn.erased:
            return
        self._numbers += 1
        self._saves[self._numbers] = turn
        keys = turn.keys[turn.ended or 0 :]
        save = (self.name, self._numbers)
        self.node.handle(ev.SaveWanted(save, turn.session.key, turn.session.shape.fingerprint, keys, self.world.now))

    def _granted(self, grant: do.Grant) -> None:
        turn = self._saves.pop(grant.save[1])
        keys, layers = turn.keys[turn.ended or 0 :], turn.session.shape.layers

        def written() -> None:
            if not self.alive:
                return
            ok, aborted = [], []
            for n, index in enumerate(grant.indices):
                for layer in range(layers):
                    offset = grant.offsets[n * layers + layer]
                    self.node.pages.write(offset, turn.session.shape.piece_bytes, self.world.write(keys[index], layer))
                (aborted if self.world.chance(0.1) else ok).append(index)
            self.node.handle(ev.SaveEnded(grant.save, ok, aborted, self.world.now))
            self.world.soon(self._turn_ended(turn))

        self.world.soon(written)

    def _turn_ended(self, turn: Turn):  # type: ignore[no-untyped-def]
        def end() -> None:
            if self.alive and not turn.erased:
                s = turn.session
                manifest = Manifest(
                    s.key, "m", s.shape.fingerprint, list(turn.keys), 16 * len(turn.keys), self.world.now
                )
                self.node.handle(ev.TurnEnded(manifest, self.world.now, self.name))

        return end
