"""300 conversations with a Llama of 131 M parameters, whose KV comes from everywhere (`make test-vllm-slow`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loadtest.random_model import SHAPES
from tests.vllm_plugin.models import sensitive_llama
from tests.vllm_plugin.tiers import TURNS, from_every_tier
from tests.vllm_plugin.world import Conversations, world

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(5400)]
CONVERSATIONS = 300


def test_300_conversations_answer_alike_from_every_tier(
    tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]
) -> None:
    folder = tmp_path_factory.mktemp("long")
    model = sensitive_llama(folder / "model", SHAPES["131m"][0])
    with world(folder, free_ports(60), model, dram_gib=1.0) as made:
        servers = [made.start(None), made.start(0), made.start(1)]
        bare, a, b = (server.wait() for server in servers)
        talks = Conversations(made, bare, CONVERSATIONS, TURNS, (range(130, 180), range(64, 90)))
        bare.stop()
        from_every_tier(made, a, b, talks)
        assert made.tally.alike >= 0.95 * made.tally.asked
