"""Conversations whose KV comes from everywhere: the passage that the quick test and the long one share."""

from __future__ import annotations

import random
import signal
import threading

from tests.faults import damage
from tests.vllm_plugin.checked_connector import compare
from tests.vllm_plugin.vllm_server import BLOCK_TOKENS, VllmServer
from tests.vllm_plugin.world import Conversations, World

TURNS = 3
#: Of the objects on the SSD.
DAMAGED_SHARE = 0.01


def from_every_tier(world: World, a: VllmServer, b: VllmServer, talks: Conversations) -> None:
    """a, b: servers of node 0 and node 1."""
    last, count = [TURNS - 1], talks.count
    at_least = count * BLOCK_TOKENS

    def tiers(node: int) -> str:
        found = world.hits(node)
        return ", ".join(f"{tier} {size >> 20} MiB" for tier, size in found.items() if tier != "damaged" and size)

    talks.ask("cold and warm", a, range(TURNS - 1))
    a.forget()
    assert talks.ask("from its node", a, last) >= 2 * at_least
    print("  the store's hits:", tiers(0))
    assert talks.ask("from the other node", b, last, ("node-0",)) >= 2 * at_least
    print("  the store's hits:", tiers(1))
    assert world.hits(1)["peer"]
    world.end_store(0)
    world.restart_store(0)
    a.forget()
    assert talks.ask("from SSD after a restart", a, last) >= at_least
    print("  the store's hits:", tiers(0))
    assert world.hits(0)["ssd"]
    rng = random.Random(1)
    objects = world.end_store(0)
    chosen = rng.sample(objects, max(2, round(len(objects) * DAMAGED_SHARE)))
    for path in chosen:
        damage.flip(rng, [path])
    world.restart_store(0)
    a.forget()
    assert talks.ask("with damaged pieces", a, last) >= at_least // 2
    print(f"  {len(chosen)} of {len(objects)} objects damaged, {world.hits(0)['damaged']} pieces found so; {tiers(0)}")
    assert world.hits(0)["damaged"]
    killed_while_they_talk(world, a, talks)
    compared = compare(world.records)
    print(f"{world.tally}; {compared.loaded} heads' shares of pieces loaded, {len(compared.different)} different")
    assert compared.loaded and not compared.different, compared.different[:5]


def killed_while_they_talk(world: World, a: VllmServer, talks: Conversations) -> None:
    """Node 0's store is killed at a third of the conversations and started again at two thirds."""
    lock, begun = threading.Lock(), 0

    def meanwhile(_: int) -> None:
        nonlocal begun
        with lock:
            begun += 1
            if begun == talks.count // 3:
                world.stack.signal(0, signal.SIGKILL)
            elif begun == 2 * talks.count // 3:
                world.stack.start(0)

    a.forget()
    talks.ask("with a store killed meanwhile", a, [TURNS - 1], meanwhile=meanwhile)
    world.await_store(0)
    a.forget()
    assert talks.ask("after the kill", a, [TURNS - 1])
