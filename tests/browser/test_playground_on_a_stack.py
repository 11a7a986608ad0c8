"""The playground in a real Chromium before whole stacks. A module of its own: no gRPC may run in the process that
starts a stack."""

from __future__ import annotations

from pathlib import Path

import pytest
from playground_runs import named, run

from loadtest.stack import Stack

pytestmark = pytest.mark.stack


@pytest.mark.parametrize("name", named("fleet"))
async def test_the_page_with_a_whole_stack(name: str, tmp_path: Path) -> None:
    with Stack(directory=tmp_path) as whole:
        found = await run("fleet", whole.url)
    assert found[name] is None, found[name]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", named("speed"))
async def test_a_hint_is_worth_it_with_the_defaults(name: str, tmp_path: Path) -> None:
    """With the memory that `make up` gives the bundled model, and the disk as it is."""
    with Stack(directory=tmp_path) as whole:
        found = await run("speed", whole.url, limit_s=500)
    assert found[name] is None, found[name]
