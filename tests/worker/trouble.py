"""What can happen to a virtual engine, at random."""

from __future__ import annotations

import random

from tests.worker.virtual_engine import VirtualEngine
from tests.worker.virtual_model import CHUNK, LAYERS, random_prompt


class Trouble:
    """Requests come and are cancelled, pages are purged, chunks evicted, sessions hinted, and the store fails.

    dice: what happens. beliefs: what the scheduler believes, which need not be so. requests: at most so many. longest:
    chunks of the longest request that a worker's server accepts.
    """

    def __init__(
        self, e: VirtualEngine, dice: random.Random, beliefs: random.Random, requests: int, longest: int | None = None
    ) -> None:
        self._e, self._dice, self._beliefs, self._requests = e, dice, beliefs, requests
        self._longest = e.pool.total // LAYERS - 3 if longest is None else longest
        self._names: list[str] = []
        self._tenants = beliefs.choice(["t", "tu", "tuv"])

    def something(self) -> None:
        """Something happens now."""
        e, dice = self._e, self._dice
        action = dice.choice(["submit"] * 6 + ["cancel", "cancel", "purge", "evict", "hint", "hang", "down", "up"])
        if action == "submit" and len(self._names) < self._requests:
            self._submit()
        elif action == "cancel" and self._names:
            e.cancel(dice.choice(self._names))
        elif action == "purge":
            e.cache.make_room(min(e.pool.free + dice.randrange(1, 30), e.cache.available()), e.world.now())
        elif action == "evict" and e.store.chunks:
            e.store.chunks.pop(dice.choice(sorted(e.store.chunks)))
        elif action == "hint" and e.store.arena is not None and e.store.chunks:
            e.store.hint(
                f"s{dice.randrange(4)}", list(e.store.chunks)[: dice.randrange(1, 8)], dice.choice([0.05, 60.0])
            )
        elif action == "hang":
            e.store.hangs_until_s = e.world.now() + dice.choice([0.1, 1.0, 15.0])
        elif action == "down" and e.store.arena is not None and dice.random() < 0.3:
            e.store.down()
        elif action == "up" and e.store.arena is None:
            e.store.up()

    def _submit(self) -> None:
        dice, beliefs = self._dice, self._beliefs
        count = dice.choice([1, 3, 20, 40])
        length = min(dice.choice([1, CHUNK, 17, 40, 100]), self._longest * CHUNK - count)
        shared = random_prompt(random.Random(dice.randrange(3)), length)
        own = dice.choice([0, 0, 5, length])
        text = shared[: length - own] + random_prompt(dice, own)
        session, priority = f"s{dice.randrange(4)}", dice.choice([0, 0, 0, -1, 3])
        tenant, kept = beliefs.choice(self._tenants), beliefs.choice([0, length // 2, 10**6])
        weight = {"t": 1.0, "u": 3.0, "v": 0.25}[tenant]
        self._names.append(
            self._e.submit(text, count, session=session, priority=priority, kept=kept, tenant=tenant, weight=weight)
        )
