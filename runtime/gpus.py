"""Which CUDA devices a worker sees: its own, which torch, Triton and the driver then all call 0, and those through
whose links it loads weights too (`worker.load_links`).

Counts devices by files in /dev, because asking the driver would fix what the process sees.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from contracts.errors import ConfigError

_NAME = "CUDA_VISIBLE_DEVICES"


def seen() -> int:
    """Number of CUDA devices that this process would see."""
    here = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in Path("/dev").glob("nvidia*"))
    said = os.environ.get(_NAME)
    return here if said is None else min(here, len([name for name in said.split(",") if name.strip()]))


def others(device: int, devices: int, links: int) -> list[int]:
    """The devices through whose links device number `device` of `devices` loads, beside its own of `links` in all. Each
    device is used by as many others."""
    return [(device + n) % devices for n in range(1, links)]


def show_only(device: int, others: Sequence[int] = ()) -> None:
    """Hides all visible CUDA devices but number `device`, which becomes number 0, and `others`, which follow. Call it
    before this process uses CUDA. Raises ConfigError when several are visible, but not these; with `others` also when
    one is."""
    chosen = visible(os.environ.get(_NAME), seen(), device, others)
    if chosen is not None:
        os.environ[_NAME] = chosen


def visible(said: str | None, count: int, device: int, others: Sequence[int] = ()) -> str | None:
    """The new value of CUDA_VISIBLE_DEVICES, which is `said` now; None: unchanged. count: visible devices.

    A single visible device is used by every worker: either a container has only that one, or workers share it.
    """
    sees = f"its process sees {count} CUDA device{'s' if count > 1 else ''} ({_NAME}"
    sees += f" = {said})" if said else " is not set)"
    if others and 0 < count <= max(others):
        raise ConfigError(
            f"worker.load_links = {len(others) + 1}: this worker would load through device {max(others)}, and {sees}; "
            "set it to 1, or let it see all devices of the node"
        )
    if count <= 1:
        return None
    if device >= count:
        raise ConfigError(
            f"nodes.devices: this worker has device {device}, and {sees}; lower nodes.devices, or let it see more"
        )
    names = said.split(",") if said else [str(n) for n in range(count)]
    return ",".join(names[n].strip() for n in (device, *others))
