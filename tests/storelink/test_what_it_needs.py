"""What engines share runs where little is installed, on a Python older than ours, and beside a real store."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kvstore.conftest import Stack, make_stack
from tests.storelink.only_these import OnlyThese

__all__ = ["make_stack"]
ROOT = Path(__file__).parents[2]
PYTHON = (3, 10)
SOURCES = sorted(path for package in ("contracts", "storelink") for path in ROOT.glob(f"{package}/**/*.py"))


async def only_these(module: str, *arguments: str) -> str:
    """What the module prints where nothing else can be imported."""
    command = [sys.executable, "-m", "tests.storelink.only_these", module, *arguments]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    said, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return said.decode()


async def test_all_of_it_is_imported_where_there_is_nothing_but_its_four_packages() -> None:
    assert int(await only_these("tests.storelink.import_all")) >= 20


@pytest.mark.parametrize("name", ["numpy", "torch", "structlog", "pydantic", "runtime.rpc", "worker"])
def test_whatever_else_it_imported_would_be_noticed(name: str) -> None:
    with pytest.raises(ImportError, match=name):
        OnlyThese().find_spec(name)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_older_python_can_read_it(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=PYTHON)


def test_it_takes_nothing_of_the_standard_library_that_came_later() -> None:
    """mypy knows of every name since which version it is there."""
    version = ".".join(map(str, PYTHON))
    command = [sys.executable, "-m", "mypy", "--python-version", version, "-p", "contracts", "-p", "storelink"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


async def test_an_engine_made_of_it_alone_saves_and_loads_through_a_real_store(
    make_stack: Callable[..., Stack],
) -> None:
    stack = make_stack(nodes=1)
    stack.start(0)
    assert await only_these("tests.storelink.plain_client", stack.address(0)) == "2 chunks, 6 pieces\n"
    assert '"models": 1' in stack.log(0)
