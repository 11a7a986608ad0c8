"""This node leaves the fleet for good: nothing that only it holds is lost, and nothing is left behind.

Its workers have ended. What the blob tier lacks is written there, however long that takes, and erasures in progress
end. Then the blob tier is told that the node is gone (tiers/tombstones.py), the schedulers hear that it is over, the
process ends, and its directory is emptied. Other nodes may read from its DRAM until then.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from kvstore.metrics import log
from kvstore.node import StoreNode
from kvstore.upkeep import learn_lacking
from runtime.service import Tasks

_AGAIN_S, _FLUSH_S = 1.0, 25.0
#: The schedulers are given so long to hear that it is over, in seconds.
_TOLD_S, _LOOK_S = 20.0, 0.05


class Leaving:
    """See the module. over: it has nothing left to do. waits_for: else for what, for an operator."""

    def __init__(self, node: StoreNode, tasks: Tasks) -> None:
        self._node, self._tasks = node, tasks
        self._begun = False
        self.over, self.waits_for = False, ""
        #: Whether every scheduler that is connected has heard `over`.
        self.is_told: Callable[[], bool] = lambda: True

    @property
    def asked(self) -> bool:
        """Whether the node is to leave."""
        return self._begun

    def begin(self) -> None:
        """A scheduler says that the node is to leave. Again changes nothing."""
        if not self._begun:
            self._begun = True
            log.info("the node is to leave the fleet")
            self._tasks.start(self._run(), "leave")

    async def _run(self) -> None:
        node = self._node
        while why := await self._attempt():
            if why != self.waits_for:
                log.info("leaving waits", what=why)
            self.waits_for = why
            await node.clock.sleep(_AGAIN_S)
        self.over, self.waits_for = True, ""
        begun = node.clock.now()
        while not self.is_told() and node.clock.now() - begun < _TOLD_S:
            await node.clock.sleep(_LOOK_S)
        log.info("the node has left the fleet")
        self._tasks.left.set()

    async def _attempt(self) -> str:
        """Do what is left to do; for what that must wait, empty when it is done."""
        node = self._node
        if not await node.settle(_FLUSH_S):
            return "write-back to slower tiers"
        if not node.knows_ssd:
            return "its SSD, or the blob tier to learn what was erased while the node was down"
        if not await learn_lacking(node):
            return "the blob tier, which does not answer"
        complete, _ = await node.flush(_FLUSH_S)
        if not complete or node.store.saves.owed_to_blob or node.write_back.owes:
            return "the blob tier, which lacks some of what is here"
        if node.erasing.open():
            return "erasures that have not ended"
        node.heeding.leaves = True
        if not await node.blob.tombstones.put_gone(node.name):
            return "the blob tier, to note that the node is gone"
        return ""


def empty(directory: Path) -> None:
    """Delete what a node that has left has in its directory, except locks."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                elif not entry.name.endswith("lock"):
                    os.unlink(entry.path)
