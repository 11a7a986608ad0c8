"""How many CUDA devices a process sees, and which of them a worker of a node with several uses: it sees that one only, so that torch,
Triton and the driver all call it 0. Looks at files, as asking the driver would settle what the process sees.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from contracts.errors import ConfigError

_NAME = "CUDA_VISIBLE_DEVICES"


def seen() -> int:
    """CUDA devices that this process would see."""
    here = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in Path("/dev").glob("nvidia*"))
    said = os.environ.get(_NAME)
    return here if said is None else min(here, len([name for name in said.split(",") if name.strip()]))


def show_only(device: int) -> None:
    """Hide all CUDA devices but number `device` of those that are visible. To be called before CUDA is used in this process. Raises
    ConfigError when there are several, and not that one."""
    chosen = visible(os.environ.get(_NAME), seen(), device)
    if chosen is not None:
        os.environ[_NAME] = chosen


def visible(said: str | None, count: int, device: int) -> str | None:
    """What CUDA_VISIBLE_DEVICES, which is `said` now, has to say; None: what it says. count: devices that can be seen.

    Where one can be seen it is the device's: a container was given it alone, or several workers are meant to share it.
    """
    if count <= 1:
        return None
    if device >= count:
        raise ConfigError(
            f"nodes.devices: this worker has device {device}, and its process sees {count} CUDA devices "
            f"({_NAME}{f' = {said}' if said else ' is not set'}); lower nodes.devices, or let it see more"
        )
    return said.split(",")[device].strip() if said else str(device)
