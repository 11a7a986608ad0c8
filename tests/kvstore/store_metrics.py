"""What a store's metrics say, read from its port."""

from __future__ import annotations

import asyncio
import urllib.request


async def store_metrics(address: str) -> dict[str, float]:
    """Samples by name and labels as Prometheus writes them, without the prefix `upbeat_kvstore_`. `address`: the store's gRPC address."""
    host, _, port = address.rpartition(":")
    answer = await asyncio.to_thread(urllib.request.urlopen, f"http://{host}:{int(port) + 4}/metrics", None, 20)
    samples: dict[str, float] = {}
    for line in answer.read().decode().splitlines():
        if line.startswith("upbeat_kvstore_"):
            name, _, value = line.rpartition(" ")
            samples[name.removeprefix("upbeat_kvstore_")] = float(value)
    return samples
