"""Real vLLM servers over real stores: whatever comes from where, answers are those of a server that computes all."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.vllm_plugin.models import sensitive_llama
from tests.vllm_plugin.tiers import TURNS, from_every_tier
from tests.vllm_plugin.vllm_server import BLOCK_TOKENS, VllmServer
from tests.vllm_plugin.world import Conversations, World, world

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
CONVERSATIONS = 25


@dataclass
class Servers:
    world: World
    bare: VllmServer
    a: VllmServer
    b: VllmServer

    def check(self, server: VllmServer, tokens: list[int], session: str, sources: tuple[str, ...] = ()) -> None:
        """Ask, and compare with the server that computes all."""
        found = server.complete(tokens, session, sources=sources)
        self.world.tally.add(found, self.world.expected(self.bare, tokens), session)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("vllm")
    with world(folder, free_ports(60), sensitive_llama(folder / "model")) as made:
        started = [made.start(None), made.start(0), made.start(1)]
        yield Servers(made, *(server.wait() for server in started))


def prompt(seed: int, tokens: int = 500) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 2000) for _ in range(tokens)]


def test_answers_depend_on_the_first_chunk(servers: Servers) -> None:
    """Of the model: with one that ignores its context, no other test here would see a wrong KV."""
    other = 0
    for seed in range(20):
        tokens = prompt(seed)
        changed = list(tokens)
        changed[seed] = 2001
        other += servers.bare.complete(tokens, "s").tokens != servers.bare.complete(changed, "s").tokens
    assert other >= 18


def test_conversations_answer_alike_from_every_tier(servers: Servers) -> None:
    sizes = range(150, 700), range(20, 200)
    talks = Conversations(servers.world, servers.bare, CONVERSATIONS, TURNS, sizes)
    from_every_tier(servers.world, servers.a, servers.b, talks)
    assert servers.world.tally.alike >= 0.95 * servers.world.tally.asked


def test_what_is_loaded_answers_to_the_last_digit_like_what_vllm_kept(servers: Servers) -> None:
    a, compared = servers.a, 0
    for seed in range(800, 810):
        tokens = prompt(seed)
        a.complete(tokens, f"digits-{seed}")
        kept = a.complete(tokens, f"digits-{seed}")
        a.forget()
        _, before = a.hits()
        found = a.complete(tokens, f"digits-{seed}")
        if a.hits()[1] - before == len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS:  # else the rest was sooner computed
            assert found == kept
            compared += 1
    assert compared >= 5


def test_nobody_hits_what_another_tenant_or_salt_has_stored(servers: Servers) -> None:
    a = servers.a
    tokens = prompt(901)
    a.complete(tokens, "mine", tenant="one")
    a.forget()
    for more in ({"tenant": "two"}, {"tenant": "one", "cache_salt": "pepper"}):
        _, before = a.hits()
        a.complete(tokens, "mine", **more)
        assert a.hits()[1] == before, more
        a.forget()
    _, before = a.hits()
    a.complete(tokens, "mine", tenant="one")
    assert a.hits()[1] > before


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_store_that_dies_or_hangs_fails_no_request(servers: Servers, how: int) -> None:
    a, stack = servers.a, servers.world.stack
    prompts = [prompt(910 + how, tokens) for tokens in (300, 400, 500)]
    servers.check(a, prompts[0], "unlucky")
    stack.signal(0, how)
    began = time.monotonic()
    for tokens in prompts:
        a.forget()
        servers.check(a, tokens, "unlucky")
    assert time.monotonic() - began < 60
    if how == signal.SIGSTOP:
        os.kill(stack.processes[0].pid, signal.SIGCONT)
    else:
        stack.start(0)
    servers.world.await_store(0)
    servers.check(a, prompts[2], "unlucky")
    a.forget()
    _, before = a.hits()
    servers.check(a, prompts[2], "unlucky")
    assert a.hits()[1] > before, "the store is used again"


def test_a_server_that_is_killed_leaves_the_store_usable(servers: Servers) -> None:
    a, b = servers.a, servers.b
    tokens = prompt(920)
    servers.check(b, tokens, "left")
    b.forget()
    os.kill(b.process.pid, signal.SIGKILL)
    b.process.wait(30)
    _, before = a.hits()
    servers.check(a, tokens, "left", ("node-1",))
    assert a.hits()[1] > before
