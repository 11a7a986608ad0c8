"""`upbeat-gateway`: one gateway process."""

from __future__ import annotations

import sys

from gateway.app import Gateway
from runtime.collector import keep_what_is_here
from runtime.config import Config
from runtime.heap import give_back_large_buffers
from runtime.service import Tasks, arguments, run, serve


async def _serve(config: Config, number: int) -> int:
    tasks = Tasks()
    return await serve(Gateway(config, tasks, number=number, warm=True), tasks.failed, config.gateway.drain_s)


def main() -> None:
    """Entry point."""
    config, number, _ = arguments("gateway", numbered=True)
    if number >= config.gateway.processes:
        print(
            f"upbeat-gateway: --number {number}: gateway.processes is {config.gateway.processes}; give a smaller "
            "number, or raise it",
            file=sys.stderr,
        )
        raise SystemExit(2)
    give_back_large_buffers()
    keep_what_is_here()
    run(_serve(config, number))


if __name__ == "__main__":
    main()
