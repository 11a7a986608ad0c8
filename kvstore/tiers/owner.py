"""The blob tier's owner: a small object with the id of the cluster secret, by which hosts that share a bucket, and
nothing else, notice that they would share no KV in it."""

from __future__ import annotations

import re

from kvstore.core.events import TierChannel
from kvstore.tiers.objects import Objects

OBJECT = "secret-id"
_ID = re.compile("[0-9a-f]{16}")


class OwnerUnknown(Exception):
    """The bucket does not answer. tier: what failed, reading or writing."""

    def __init__(self, tier: TierChannel, reason: str) -> None:
        super().__init__(reason)
        self.tier = tier


async def owner(objects: Objects, own_id: str) -> str:
    """The id in the bucket, which is `own_id` from now on if there was none, or none that can be read. Raises
    OwnerUnknown."""
    for _ in range(2):
        try:
            said = (await objects.get(OBJECT)).decode(errors="replace").strip()
        except FileNotFoundError:
            said = ""
        except Exception as e:
            raise OwnerUnknown(TierChannel.BLOB_READ, f"{OBJECT} cannot be read: {e}") from e
        if _ID.fullmatch(said):
            return said
        if not await objects.put(None, OBJECT, f"{own_id}\n".encode()):
            break
    raise OwnerUnknown(TierChannel.BLOB_WRITE, f"{OBJECT} cannot be written")
