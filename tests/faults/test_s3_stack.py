"""A whole stack over a faulty object store, its DRAM, SSD and HBM emptied so that the store matters: every answer comes
and says the same as a node that keeps nothing; when the store is well again, conversations are read from it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.stack import Stack
from tests.blob_servers import moto_s3
from tests.e2e.chat import Chat, script
from tests.e2e.test_any_node_any_tier import settled
from tests.faults.s3_proxy import proxied
from tests.faults.test_kill import process, wait_ready

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.timeout(290)]
MODEL = Path(os.environ.get("UPBEAT_TEST_MODEL", Path(__file__).parents[2] / "models" / "demo"))
SMALL = {"nodes": 1, "hbm_gib": 0.25, "dram_gib": 0.25}
FAULTS = ("503", "hang", "truncate")
SEEDS = (0, 1)
TURNS = 2 + len(FAULTS) + 2


@pytest.fixture(scope="module")
def expected() -> Iterator[dict[int, list[str]]]:
    """What a node that keeps nothing answers to each script."""
    with Stack(model=MODEL, cache=False, **SMALL) as cold:
        chats = {seed: Chat(cold.url, f"cold-{seed}") for seed in SEEDS}
        yield {seed: [chat.say(line).text for line in script(seed, TURNS)] for seed, chat in chats.items()}


def empty(stack: Stack) -> None:
    """Nothing of any conversation is left but in the object store."""
    victims = [process(stack, f"upbeat-{service} --node 0") for service in ("kvstore", "worker")]
    for victim in victims:
        victim.kill()
    for file in (stack.data / "node-0" / "ssd").rglob("*"):
        if file.is_file():
            file.unlink(missing_ok=True)
    for victim in victims:
        victim.wait(20)
    wait_ready(stack, 60)


def test_a_faulty_object_store_fails_no_request_and_changes_no_answer(
    expected: dict[int, list[str]], tmp_path: Path
) -> None:
    with moto_s3() as server, proxied(server.port) as proxy:
        through = server.through(proxy.port)
        # Loads are tried here, however much sooner so small a model computes.
        settings = {"kv": {"blob_url": through.url, "blob_options": through.options, "load_plan": False}}
        with Stack(model=MODEL, directory=tmp_path, settings=settings, **SMALL) as stack:
            lines = {seed: script(seed, TURNS) for seed in SEEDS}
            chats = {seed: Chat(stack.url, f"chat-{seed}") for seed in SEEDS}

            def turn(number: int) -> list[int]:
                """One turn of every conversation; how many tokens each found in the cache."""
                found = []
                for seed, chat in chats.items():
                    answer = chat.say(lines[seed][number])
                    assert answer.text == expected[seed][number], f"turn {number} of session {seed}"
                    found.append(answer.cached_tokens)
                return found

            for number in range(2):
                turn(number)
            for seed in SEEDS:
                settled(stack.url, f"chat-{seed}", "blob")
            for number, fault in enumerate(FAULTS, start=2):
                proxy.set(fault)
                empty(stack)
                turn(number)
            assert proxy.faults_met() > 0
            proxy.heal()
            empty(stack)
            turn(TURNS - 2)
            for seed in SEEDS:
                settled(stack.url, f"chat-{seed}", "blob")
            empty(stack)
            assert all(turn(TURNS - 1)), "the store is well: what it holds is not computed again"
