"""The processes of a stack, and the order and deadlines in which they stop.

The gateway stops first, so that nothing new arrives; then workers and sidecars, which finish what runs; then vLLM's
servers; then the stores, which finish write-back; the scheduler last.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Planned:
    """One process. name: unique in the stack. program: its executable. node: its node's number, None if it belongs to
    none. device: a worker's device on its node. number: among schedulers or gateway processes."""

    name: str
    program: str
    node: int | None = None
    number: int = 0
    device: int = 0

    def arguments(self, config_file: str) -> list[str]:
        """The command line after the program."""
        node = [] if self.node is None else ["--node", str(self.node)]
        others = {"--number": self.number, "--device": self.device}
        return [
            "--config",
            config_file,
            *node,
            *(part for flag, value in others.items() if value for part in (flag, str(value))),
        ]


#: (program, seconds after the stop began at which its remaining processes are killed), in stopping order.
STOP_ORDER: tuple[tuple[str, float], ...] = (
    ("upbeat-gateway", 10.0),
    ("upbeat-worker", 18.0),
    ("upbeat-sidecar", 18.0),
    ("upbeat-vllm-server", 25.0),
    ("upbeat-kvstore", 28.0),
    ("upbeat-scheduler", 29.0),
)


def stack_plan(
    nodes: int,
    schedulers: int = 1,
    gateways: int = 1,
    devices: int = 1,
    vllm: Collection[int] = (),
    *,
    servers: bool = True,
) -> list[Planned]:
    """The processes in starting order. devices: a node; gateways: processes of the gateway. vllm: nodes whose devices
    have a vLLM server and its sidecar instead of a worker; servers: whether those are started here."""
    plan = [Planned(f"scheduler-{n}" if n else "scheduler", "upbeat-scheduler", number=n) for n in range(schedulers)]
    plan += [Planned(f"kvstore-{n}", "upbeat-kvstore", n) for n in range(nodes)]
    for n in range(nodes):
        kinds = ["worker"] if n not in vllm else ["vllm-server", "sidecar"] if servers else ["sidecar"]
        plan += [
            Planned(f"{kind}-{n}-{d}" if devices > 1 else f"{kind}-{n}", f"upbeat-{kind}", n, device=d)
            for d in range(devices)
            for kind in kinds
        ]
    return plan + [Planned(f"gateway-{n}" if n else "gateway", "upbeat-gateway", number=n) for n in range(gateways)]


def joining_plan(node: int, *, store: bool) -> list[Planned]:
    """The processes of one more node, whose vLLM server runs already: its sidecar, and its store if wanted."""
    stores = [Planned(f"kvstore-{node}", "upbeat-kvstore", node)] if store else []
    return [*stores, Planned(f"sidecar-{node}", "upbeat-sidecar", node)]


def native_plan(node: int, devices: int) -> list[Planned]:
    """The processes of one more node with our engine."""
    return [planned for planned in stack_plan(node + 1, devices=devices) if planned.node == node]


def compute_threads(configured: int, cores: int, workers: int) -> int:
    """Threads of one worker's linear algebra: as configured, or for 0 an even share of the cores, at least one."""
    return configured or max(1, cores // workers)


def own_cores(cores: Sequence[int], number: int, workers: int) -> list[int]:
    """The cores that worker `number` of so many binds its threads to: a share of its own, or one of too few."""
    each = len(cores) // workers
    return list(cores[number * each : (number + 1) * each]) if each else [cores[number % len(cores)]]
