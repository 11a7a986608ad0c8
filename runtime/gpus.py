"""Which CUDA device a worker uses. It makes only that device visible, so that torch, Triton and the driver all call it
0.

Counts devices by files in /dev, because asking the driver would fix what the process sees.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from contracts.errors import ConfigError

_NAME = "CUDA_VISIBLE_DEVICES"


def seen() -> int:
    """Number of CUDA devices that this process would see."""
    here = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in Path("/dev").glob("nvidia*"))
    said = os.environ.get(_NAME)
    return here if said is None else min(here, len([name for name in said.split(",") if name.strip()]))


def show_only(device: int) -> None:
    """Hides all visible CUDA devices but number `device`. Call it before this process uses CUDA. Raises ConfigError
    when several are visible, but not that one."""
    chosen = visible(os.environ.get(_NAME), seen(), device)
    if chosen is not None:
        os.environ[_NAME] = chosen


def visible(said: str | None, count: int, device: int) -> str | None:
    """The new value of CUDA_VISIBLE_DEVICES, which is `said` now; None: unchanged. count: visible devices.

    A single visible device is used by every worker: either a container has only that one, or workers share it.
    """
    if count <= 1:
        return None
    if device >= count:
        raise ConfigError(
            f"nodes.devices: this worker has device {device}, and its process sees {count} CUDA devices "
            f"({_NAME}{f' = {said}' if said else ' is not set'}); lower nodes.devices, or let it see more"
        )
    return said.split(",")[device].strip() if said else str(device)
