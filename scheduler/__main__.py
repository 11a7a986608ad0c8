"""`upbeat-scheduler`: the scheduler's process."""

from __future__ import annotations

import gc
import sys

from contracts.errors import ConfigError
from runtime import telemetry
from runtime.config import Config
from runtime.metrics_page import serve_metrics
from runtime.service import Tasks, arguments, run, serve
from scheduler.metrics import METRICS_PORT, metrics_port
from scheduler.server import SchedulerService

log = telemetry.logger("scheduler.main")


class _Process(SchedulerService):
    """A scheduler with a Prometheus page; if its port is taken it serves without."""

    async def start(self) -> None:
        await super().start()
        host, _, port = self.listen.rpartition(":")
        shown = metrics_port(self.config, int(port))
        try:
            if shown is None:
                raise OSError(f"port {int(port) + METRICS_PORT} is another service's in this configuration")
            serve_metrics(host, shown)
        except OSError as e:
            log.warning("no metrics", error=str(e))


def _made(config: Config, tasks: Tasks, number: int) -> _Process:
    try:
        return _Process(config, tasks, number=number)
    except ConfigError as e:
        print(f"upbeat-scheduler: {e}", file=sys.stderr)
        raise SystemExit(2) from e


async def _main() -> int:
    config, number, _ = arguments("scheduler", numbered=True)
    tasks = Tasks()
    return await serve(_made(config, tasks, number), tasks.failed, drain_s=2.0)


def collect_seldom() -> None:
    """Make full garbage collections rare, for the whole process.

    The directory is millions of objects that are never garbage. Scanning them stops the process for a tenth of a second
    and doubles the time to fill the directory. Scans of recent objects take 10 ms at most.
    """
    gc.set_threshold(10_000, 4, 100)


def main() -> None:
    """Entry point."""
    collect_seldom()
    run(_main())


if __name__ == "__main__":
    main()
