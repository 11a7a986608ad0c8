"""The playground in a real Chromium before whole stacks. A module of its own: no gRPC may run in the process that starts a stack."""

from __future__ import annotations

from pathlib import Path

import pytest
from playground_runs import named, run

from loadtest.stack import Stack

pytestmark = pytest.mark.stack
#: A session of two thousand tokens fits into HBM once, and those of others push it out.
LITTLE = {"hbm_gib": 0.03, "dram_gib": 0.012}


@pytest.mark.parametrize("name", named("fleet"))
async def test_the_page_with_a_whole_stack(name: str, tmp_path: Path) -> None:
    with Stack(nodes=1, directory=tmp_path, **LITTLE) as whole:
        found = await run("fleet", whole.url)
    assert found[name] is None, found[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", named("speed"))
async def test_the_page_with_a_slow_disk(name: str, tmp_path: Path) -> None:
    """Each read of the SSD takes 150 ms longer, so that bringing this small model's cache takes time as a large one's does."""
    slow_disk = {"kv": {"failpoints": {"ssd.after_read": "delay:150"}}}
    with Stack(nodes=2, directory=tmp_path, settings=slow_disk, **LITTLE) as whole:
        found = await run("speed", whole.url)
    assert found[name] is None, found[name]
