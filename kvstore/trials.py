"""Tries a degraded tier with one small operation (TryTier). When a tier is tried is decided in core/health.py."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from kvstore.core.events import TierChannel, Wrote
from kvstore.core.instructions import TryTier
from kvstore.host import StoreHost


async def try_tier(node: StoreHost, trial: TryTier, recover: Callable[[], Awaitable[bool]] | None) -> tuple[Wrote, int]:
    """The outcome, and the bytes moved. recover: how to try reading an SSD that has not been recovered; None: it has
    been."""
    match trial.tier:
        case TierChannel.SSD_READ:
            if recover is None:
                works = await asyncio.to_thread(node.ssd.try_read, trial.size)
            else:
                works = node.may_write() and await recover()
        case TierChannel.SSD_WRITE:
            if node.sizes.ssd_space.lacks(trial.size):
                return Wrote.RESERVED, 0
            if not node.may_write():
                return Wrote.FAILED, 0
            return await node.write_back.on_thread(partial(node.ssd.try_write, trial.size)), trial.size
        case TierChannel.BLOB_READ:
            works = await node.blob.answers()
        case TierChannel.BLOB_WRITE:
            if node.sizes.blob_space.lacks(trial.size):
                return Wrote.RESERVED, 0
            works = await node.blob.try_write(node.name)
    return Wrote.OK if works else Wrote.FAILED, 0
