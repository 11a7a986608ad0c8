"""`upbeat-scheduler`: wires the scheduler's process."""

from __future__ import annotations

from runtime.service import Tasks, arguments, run, serve
from scheduler.server import SchedulerService


async def _main() -> int:
    config, _ = arguments("scheduler", with_node=False)
    tasks = Tasks()
    return await serve(SchedulerService(config, tasks), tasks.failed, drain_s=2.0)


def main() -> None:
    """Entry point."""
    run(_main())


if __name__ == "__main__":
    main()
