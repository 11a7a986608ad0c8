"""Who is preempted, and when waiting is better."""

from __future__ import annotations

from contracts.ids import SessionKey
from contracts.request import GenerateRequest, Sampling
from worker.core.block import Block, SaveState
from worker.core.hbm import HbmCache
from worker.core.pages import PagePool
from worker.core.preemption import Holding, holding, spare_pages, together, victim
from worker.core.sequence import Sequence, State

LAYERS = 4


class Room:
    """A cache with sequences on it, each of some chunks in these states; '-' is a private, unfinished chunk."""

    def __init__(self) -> None:
        self.cache = HbmCache(PagePool(slab_count=16, pages_per_slab=LAYERS, layers=LAYERS))
        self.count = 0

    def sequence(self, *saves: SaveState, priority: int = 0, shared: list[Block] | None = None) -> Sequence:
        request = GenerateRequest(f"r{self.count}", "t", "s", "m", Sampling(), priority=priority)
        s = Sequence(request, 1, [1], 10, self.count)
        s.state = State.RUNNING
        self.count += 1
        for index, save in enumerate(saves):
            block = self.cache.new_block(index, SessionKey("t", "s"), range(LAYERS))
            self.cache.mark(block, save)
            if save is not SaveState.NONE:
                block.ready[:] = True
                self.cache.enter(block, f"{s.arrival}.{index}".encode())
            s.blocks.append(block)
        s.blocks = [*(shared or []), *s.blocks]
        for block in s.blocks:
            self.cache.use(block)
        return s


def chosen(lacking: int, *candidates: Sequence, coming: int = 0) -> Sequence | None:
    return victim([holding(s) for s in candidates], lacking, coming)


def test_the_least_urgent_then_the_youngest_goes() -> None:
    room = Room()
    old, late = room.sequence(SaveState.BELOW), room.sequence(SaveState.BELOW)
    batch = room.sequence(SaveState.BELOW, priority=5)
    later = room.sequence(SaveState.BELOW)
    assert chosen(4, old, late, batch, later) is batch
    assert chosen(4, old, late, later) is later
    assert chosen(4) is None


def test_what_is_being_saved_is_not_free_yet_so_the_next_youngest_goes_instead() -> None:
    room = Room()
    old, late = room.sequence(SaveState.BELOW, SaveState.NONE), room.sequence(SaveState.WAITING)
    assert holding(late) == Holding(late, 0, LAYERS)
    assert chosen(4, old, late) is old
    assert chosen(4, late) is None, "alone it is waited for: preempting it now gains nothing"


def test_a_more_urgent_one_does_not_go_because_a_less_urgent_one_is_being_saved() -> None:
    room = Room()
    urgent, batch = room.sequence(SaveState.BELOW), room.sequence(SaveState.WAITING, priority=5)
    assert chosen(4, urgent, batch) is None


def test_nobody_goes_for_pages_that_come_by_themselves() -> None:
    room = Room()
    one = room.sequence(SaveState.BELOW)
    assert chosen(4, one, coming=4) is None
    assert chosen(5, one, coming=4) is one


def test_nobody_goes_in_vain() -> None:
    room = Room()
    one, two = room.sequence(SaveState.BELOW), room.sequence(SaveState.BELOW)
    assert chosen(9, one, two) is None
    assert chosen(8, one, two) is two


def test_what_two_share_is_to_be_had_when_both_go() -> None:
    room = Room()
    first = room.sequence(SaveState.BELOW, SaveState.BELOW)
    second = room.sequence(SaveState.NONE, shared=first.blocks[:2])
    third = room.sequence(shared=first.blocks[:1])
    assert holding(first).now == 0 and holding(second).now == LAYERS
    assert together([first, second]) == 2 * LAYERS and together([first, second, third]) == 3 * LAYERS
    assert chosen(12, first, second, third) is second, "the youngest frees nothing alone"


def test_what_the_store_refused_is_had_at_once_or_nobody_would_ever_go() -> None:
    room = Room()
    s = room.sequence(SaveState.REFUSED, SaveState.NONE)
    assert holding(s) == Holding(s, 2 * LAYERS, 0) and chosen(4, s) is s


def test_for_a_place_in_the_batch_pages_do_not_matter() -> None:
    room = Room()
    old, late = room.sequence(SaveState.BELOW), room.sequence(SaveState.WAITING)
    assert chosen(0, old, late, coming=8) is late


def test_a_newcomer_leaves_a_chunk_for_each_but_never_much_of_the_whole() -> None:
    assert spare_pages(0, LAYERS, 64) == 0
    assert spare_pages(1, LAYERS, 64) == 4
    assert spare_pages(9, LAYERS, 64) == 8
