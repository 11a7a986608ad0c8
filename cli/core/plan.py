"""The processes of a stack, and the order and deadlines in which they stop.

The gateway stops first, so that nothing new arrives; then the workers, which hand their last KV to the stores; then the
stores, which finish write-back; the scheduler last.
"""

from __future__ import annotations

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
    ("upbeat-kvstore", 28.0),
    ("upbeat-scheduler", 29.0),
)


def stack_plan(nodes: int, schedulers: int = 1, gateways: int = 1, devices: int = 1) -> list[Planned]:
    """The processes in starting order. devices: a node; gateways: processes of the gateway."""
    plan = [Planned(f"scheduler-{n}" if n else "scheduler", "upbeat-scheduler", number=n) for n in range(schedulers)]
    plan += [Planned(f"kvstore-{n}", "upbeat-kvstore", n) for n in range(nodes)]
    for n in range(nodes):
        plan += [
            Planned(f"worker-{n}-{d}" if devices > 1 else f"worker-{n}", "upbeat-worker", n, device=d)
            for d in range(devices)
        ]
    return plan + [Planned(f"gateway-{n}" if n else "gateway", "upbeat-gateway", number=n) for n in range(gateways)]


def compute_threads(configured: int, cores: int, workers: int) -> int:
    """Threads of one worker's linear algebra: as configured, or for 0 an even share of the cores, at least one."""
    return configured or max(1, cores // workers)
