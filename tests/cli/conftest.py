from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stand_in_stack import UpbeatUp


@pytest.fixture
def up(tmp_path: Path, free_ports: Callable[[int], int]) -> Iterator[UpbeatUp]:
    """A launcher over stand-ins that nothing survives."""
    made = UpbeatUp(tmp_path / "stack", free_ports(50))
    yield made
    made.close()
