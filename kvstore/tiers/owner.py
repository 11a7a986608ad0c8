"""The blob tier's owner: a small object with the id of the cluster secret, by which hosts that share a bucket, and
nothing else, notice that they would share no KV in it."""

from __future__ import annotations

import re

from kvstore.tiers.objects import Objects

OBJECT = "secret-id"
_ID = re.compile("[0-9a-f]{16}")


async def owner(objects: Objects, own_id: str) -> str | None:
    """The id in the bucket, which is `own_id` from now on if there was none, or none that can be read; None when the
    bucket does not answer."""
    for _ in range(2):
        try:
            said = (await objects.get(OBJECT)).decode(errors="replace").strip()
        except FileNotFoundError:
            said = ""
        except Exception:
            return None
        if _ID.fullmatch(said):
            return said
        if not await objects.put(None, OBJECT, f"{own_id}\n".encode()):
            return None
    return None
