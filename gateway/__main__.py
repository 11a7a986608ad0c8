"""`upbeat-gateway`: one gateway process."""

from __future__ import annotations

from gateway.app import Gateway
from runtime.config import Config
from runtime.service import Tasks, arguments, run, serve

#: How long running streams may take to end.
DRAIN_S = 25.0


async def _serve(config: Config) -> int:
    tasks = Tasks()
    return await serve(Gateway(config, tasks), tasks.failed, DRAIN_S)


def main() -> None:
    """Entry point."""
    config, _ = arguments("gateway", with_node=False)
    run(_serve(config))


if __name__ == "__main__":
    main()
