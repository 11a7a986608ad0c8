"""What a store's metrics say, read from its port."""

from __future__ import annotations

import asyncio
import urllib.request

from storelink import credentials


async def store_metrics(address: str) -> dict[str, float]:
    """Samples by name and labels as Prometheus writes them, without the prefix `upbeat_kvstore_`. `address`: the
    store's gRPC address. Shows the certificate that this process uses, if any."""
    host, _, port = address.rpartition(":")
    own = credentials.own()
    context = own.client_context() if own else None
    if context is not None:
        context.check_hostname = False
    url = f"{'http' if own is None else 'https'}://{host}:{int(port) + 4}/metrics"
    answer = await asyncio.to_thread(urllib.request.urlopen, url, None, 20, context=context)
    samples: dict[str, float] = {}
    for line in answer.read().decode().splitlines():
        if line.startswith("upbeat_kvstore_"):
            name, _, value = line.rpartition(" ")
            samples[name.removeprefix("upbeat_kvstore_")] = float(value)
    return samples


async def until_nothing_is_held(address: str, limit_s: float = 90.0) -> None:
    """Wait until no slot is reserved or pinned and no lease is open; a leaked one never ends."""
    held: dict[str, float] = {}
    try:
        async with asyncio.timeout(limit_s):
            while True:
                said = await store_metrics(address)
                held = {
                    name: value
                    for name, value in said.items()
                    if name.startswith(("held{", 'queued{what="loads"')) and value
                }
                if not held:
                    return
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise AssertionError(f"still held: {held}") from None
