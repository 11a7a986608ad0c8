"""One tenant sends a hundred times as many hints as everybody else, and none comes true: nobody's request fails, and it
soon stops moving anything. How much others feel is measured by `bench/hint_flood/run`."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from bench.hint_flood.flood import KEYS, TTL_S, World, settings
from loadtest.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.timeout(280)]
MODEL = Path(__file__).parents[2] / "models" / "demo"


async def flooded(world: World) -> None:
    await world.begin()
    quiet = await world.hold(4.0, clients=2, flood_per_s=0.0, seed=0)
    per_s = 100.0 * quiet.hints_per_s
    first = await world.hold(3 * TTL_S, clients=2, flood_per_s=per_s, seed=1)
    later = await world.hold(6.0, clients=2, flood_per_s=per_s, seed=2)
    for window in (quiet, first, later):
        assert window.turns and [turn.error for turn in window.turns if turn.error is not None] == []
    for window in (first, later):
        assert set(window.statuses) <= {202, 429} and sum(window.statuses.values()) > 20 * len(window.turns)
    explained(world)
    hints = sum(later.done.values())
    followed = later.done.get("full", 0.0) + later.done.get("behind", 0.0)
    assert later.done["noted"] > 0.2 * hints, "nothing is brought for most of what is new"
    assert followed < 2 * len(later.turns) + 0.05 * hints, "the chatters' own, and next to nothing of the flood's"
    assert followed >= 0.9 * len(later.turns), "the chatters' are followed as before"


def explained(world: World) -> None:
    """The gateway says why a chatter's last turn went where it went, and the same to nobody else."""
    asked = urllib.request.Request(
        f"{world.stack.url}/v1/sessions/chat-0/placement", headers={"Authorization": f"Bearer {KEYS['chat']}"}
    )
    with urllib.request.urlopen(asked, timeout=10) as answer:
        turn = next(d for d in json.load(answer)["decisions"] if d["what"] == "turn")
    assert turn["hinted"] and turn["node"] in ("node-0", "node-1") and turn["prefetched_node"] is not None
    terms = {"work_s", "arrivals_s", "load_s", "leaving_s", "pressure_s"}
    assert turn["node"] == turn["scores"][0]["node"] and set(turn["scores"][0]["terms"]) == terms
    other = urllib.request.Request(asked.full_url, headers={"Authorization": f"Bearer {KEYS['flood']}"})
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(other, timeout=10)


def test_a_flood_of_false_hints_fails_no_request_and_is_soon_not_followed(tmp_path: Path) -> None:
    with Stack(model=MODEL, nodes=2, hbm_gib=0.25, directory=tmp_path, settings=settings(dram_gib=0.25)) as stack:
        asyncio.run(flooded(World(stack, sessions=8, tokens=400)))
