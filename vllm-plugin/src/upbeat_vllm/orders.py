"""What the scheduler side tells the ranks with a step. Plain values: vLLM pickles them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LoadOrder:
    """The pieces of load `load_id` go into `blocks`, by chunk of the load. sync: the step's forward pass reads them,
    and waits for each layer; else the request waits outside of steps."""

    load_id: int
    request_id: str
    blocks: tuple[int, ...]
    sync: bool


@dataclass(frozen=True)
class SaveOrder:
    """The step completes `blocks`; they are copied where the store grants the save, by chunk of the save."""

    save_id: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class StepOrders:
    """drain: saves whose blocks this step may overwrite: their copies end first. ending: requests that have ended, and
    the saves after which their blocks are free. aborted: requests that ended while they waited for a load."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    drain: list[int] = field(default_factory=list)
    ending: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
