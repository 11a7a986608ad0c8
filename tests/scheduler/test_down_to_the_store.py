"""What a hint is worth and how urgent it is, from the scheduler's core over the wire into the store's core: what is
read first there."""

from __future__ import annotations

from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from contracts.v1 import scheduler_pb2
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.fetches import RUNNING_LIMIT
from kvstore.core.store import Store
from kvstore.directory import _advised
from scheduler.convert import hint_to_wire
from scheduler.core.control import Command, Prefetch
from tests.scheduler.test_core import Harness, hint

SHAPE = KvShape.of_heads(b"f" * 32, 4, 1, 8, 16, "float32")  # 1 KiB pieces: one 4 KiB slot each
CHUNKS = 12


def key(name: str, number: int) -> bytes:
    return f"{name}-{number}".encode().ljust(32)


class Node:
    """A store that has the caches of these sessions on its SSD, and obeys what the scheduler's core says. Reads end one
    by one."""

    def __init__(self, *names: str, room: int = 400) -> None:
        self.store = Store("node-0", room * 4096, write_back_limit_bytes=1 << 20)
        self.store.handle(ev.ShapesDeclared("w", [SHAPE], 0.0))
        keys = {name: [key(name, i) for i in range(CHUNKS)] for name in names}
        self.store.handle(ev.Recovered([ev.FoundCopy(k, SHAPE, (1,) * 4) for of_one in keys.values() for k in of_one]))
        manifests = [
            Manifest(SessionKey("t", name), "m", SHAPE.fingerprint, k, 16 * CHUNKS, 1.0) for name, k in keys.items()
        ]
        self.store.handle(ev.ManifestsListed(manifests, 0.0))
        self.begun: list[do.Fetch] = []
        self.names = names

    def obey(self, commands: list[Command], now: float = 0.0) -> None:
        for c in commands:
            assert isinstance(c, Prefetch)
            wire = scheduler_pb2.PrefetchCommand(advisory=hint_to_wire(c.hint, now), source_nodes=c.sources)
            self.take(
                self.store.handle(_advised(scheduler_pb2.PrefetchCommand.FromString(wire.SerializeToString()), now))
            )

    def take(self, instructions: list[do.Instruction]) -> None:
        self.begun += [i for i in instructions if isinstance(i, do.Fetch)]

    def read_all(self) -> list[str]:
        """End every read in the order in which it began; the sessions in the order in which their reads began."""
        done = 0
        while done < len(self.begun):
            self.take(self.store.handle(ev.FetchDone(self.begun[done].fetch, {}, 1.0)))
            done += 1
        self.store.validate()
        return [fetch.pieces[0].key.decode().partition("-")[0] for fetch in self.begun]

    def resident(self, name: str) -> int:
        """Pieces of the session in DRAM."""
        return sum(
            sum(c.ready for c in [self.store.index.resident.get(key(name, i))] if c is not None) for i in range(CHUNKS)
        )


def doubt(h: Harness, address: str) -> None:
    while h.trust.worth("t", address).value == "full":
        h.trust.ended("t", address, 0.0)


def advise(h: Harness, name: str, **more: object) -> list[Command]:
    return h.advise(hint(SessionKey("t", name), f"a-{name}", **more), 0.0)


def test_the_pieces_of_an_urgent_hint_come_before_those_of_hints_that_came_earlier() -> None:
    h, node = Harness(1), Node("low", "urgent")
    node.obey(advise(h, "low", priority=5))
    first = len(node.begun)
    node.obey(advise(h, "urgent", priority=-5, arrival_s=30.0))
    order = node.read_all()
    assert first and set(order[:first]) == {"low"}, "reads that run are not taken back"
    rest = order[first:]
    assert rest == sorted(rest, key=lambda name: name != "urgent") and rest.count("urgent") == order.count("urgent") > 1


def test_a_doubtful_callers_hint_is_read_behind_everybody_elses_although_it_says_that_it_is_urgent() -> None:
    h = Harness(1)
    doubt(h, "liar")
    node = Node("liar", "honest")
    node.obey(advise(h, "liar", priority=-9, address="liar"))
    first = len(node.begun)
    node.obey(advise(h, "honest", address="honest"))
    rest = node.read_all()[first:]
    assert rest == sorted(rest, key=lambda name: name != "honest") and "liar" in rest and "honest" in rest


def test_of_a_caller_whose_hints_never_come_true_nothing_is_read() -> None:
    h, node = Harness(1), Node("liar")
    for _ in range(300):
        h.trust.ended("t", "liar", 0.0)
    node.obey(advise(h, "liar", address="liar"))
    assert not node.begun


def test_an_urgent_hint_takes_the_room_of_less_urgent_ones_and_never_the_other_way_round() -> None:
    pieces = CHUNKS * SHAPE.layers
    h, node = Harness(1), Node("low", "urgent", room=pieces + 8)
    node.obey(advise(h, "low", priority=5))
    node.read_all()
    assert node.resident("low") == pieces
    node.obey(advise(h, "urgent", priority=-5))
    node.read_all()
    assert node.resident("urgent") == pieces and node.resident("low") <= 8
    node.obey(h.advise(hint(SessionKey("t", "low"), "again", priority=5, expires_s=1000.0), 0.0))
    node.read_all()
    assert node.resident("urgent") == pieces


def test_a_doubtful_callers_caches_make_way_for_a_believed_ones() -> None:
    pieces = CHUNKS * SHAPE.layers
    h, node = Harness(1), Node("liar", "honest", room=pieces + 8)
    doubt(h, "liar")
    node.obey(advise(h, "liar", address="liar"))
    node.read_all()
    assert node.resident("liar") == pieces
    node.obey(advise(h, "honest", address="honest"))
    node.read_all()
    assert node.resident("honest") == pieces


def test_reads_under_way_are_few_enough_for_order_to_matter() -> None:
    assert max(RUNNING_LIMIT.values()) < CHUNKS * SHAPE.layers
