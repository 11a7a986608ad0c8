"""Servers of one rank and of two over one store: each loads what the other saved."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.vllm_plugin.checked_connector import compare
from tests.vllm_plugin.models import sensitive_llama
from tests.vllm_plugin.vllm_server import BLOCK_TOKENS, VllmServer
from tests.vllm_plugin.world import Tally, world

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
PROMPTS = 10
#: A core for each rank.
TWO_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.mark.parametrize("split", ["--tensor-parallel-size", "--pipeline-parallel-size"])
def test_servers_of_one_rank_and_of_two_load_each_others_pieces(
    split: str, tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]
) -> None:
    folder = tmp_path_factory.mktemp("split")
    with world(folder, free_ports(60), sensitive_llama(folder / "model")) as made:
        # vLLM 0.32's stages on CPU have no room for each other's results unless they are compiled.
        staged = split == "--pipeline-parallel-size"
        servers = made.start(0), made.start(0, split, "2", environment=TWO_CORES, compiled=staged)
        one, two = (server.wait() for server in servers)
        _saved_by_one_loaded_by_the_other(one, two, 0)
        _saved_by_one_loaded_by_the_other(two, one, 100)
        compared = compare(made.records)
        print(f"{split} 2: {compared.loaded} heads' shares loaded, {len(compared.different)} different")
        assert compared.loaded and not compared.different, compared.different[:5]


def _saved_by_one_loaded_by_the_other(one: VllmServer, other: VllmServer, seed: int) -> None:
    prompts = []
    for number in range(seed, seed + PROMPTS):
        rng = random.Random(number)
        prompts.append([rng.randrange(3, 2000) for _ in range(rng.randint(200, 600))])
    answers = [one.complete(tokens, f"s-{seed}-{n}") for n, tokens in enumerate(prompts)]
    one.forget()
    tally, before = Tally(), other.hits()[1]
    for n, (tokens, expected) in enumerate(zip(prompts, answers, strict=True)):
        tally.add(other.complete(tokens, f"s-{seed}-{n}"), expected, f"prompt {n}")
    loaded = int(other.hits()[1] - before)
    at_most = sum((len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for tokens in prompts)
    print(f"{tally}; {loaded} of {at_most} tokens from the store", flush=True)
    # On busy cores the ranks hold the engine up, and it gives up some of the store's answers (`core.ANSWER_S`).
    assert loaded
