from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from runtime.vllm_places import vllm_places
from tests.sidecar.fake_vllm import FakeVllm, serving
from tests.sidecar.node import Node, configured

Made = tuple[Node, FakeVllm]


@pytest.fixture
async def make_node(tmp_path: Path, free_ports: Callable[[int], int]) -> AsyncIterator[Callable[..., Any]]:
    """A function: a node and its server. config: over the usual; server: settings of the fake, None: none runs."""
    async with AsyncExitStack() as stack:

        async def make(config: dict[str, Any] | None = None, server: dict[str, Any] | None = {}) -> Made:  # noqa: B006
            made = configured(tmp_path, free_ports(30), **(config or {}))
            node, fake = Node(made), FakeVllm(vllm_places(made, 0).socket, **(server or {}))
            if server is not None:
                fake = await stack.enter_async_context(serving(fake.place, **server))
            await node.start()
            stack.push_async_callback(node.stop)
            if server is not None:
                await node.up()
            return node, fake

        yield make


@pytest.fixture
async def node(make_node: Callable[..., Any]) -> Made:
    """A node whose server is up."""
    made: Made = await make_node()
    return made
