"""Nodes that leave, and the file that keeps the fleet's membership across restarts (DATA/members/NUMBER.json).

Order of a leave: workers finish what runs and end; then the store writes what the blob tier lacks, and ends; then the
node is no member. Each step is ordered again until it is done, so a restart of any process on either side loses
nothing. Every scheduler has a file and is told by itself.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from contracts.errors import InvalidRequest, NotFound
from contracts.v1 import scheduler_pb2
from runtime import telemetry
from scheduler.core.control import Control
from scheduler.core.membership import is_name
from scheduler.reports import Reports

log = telemetry.logger("scheduler.members")


class Members:
    """See the module."""

    def __init__(self, control: Control, reports: Reports, path: Path) -> None:
        self._control, self._reports, self._path = control, reports, path
        self._core = control.membership
        self._said: dict[str, scheduler_pb2.StoreLeaving] = {}  #: what leaving stores last reported
        self._writing = asyncio.Lock()
        reports.store_leaving = self._heard

    async def load(self) -> None:
        """Read the file. One that is not understood is logged; configured nodes and those that report are members
        then."""
        try:
            self._core.restore(json.loads(await asyncio.to_thread(self._path.read_text)))
        except FileNotFoundError:
            return
        except (OSError, ValueError, AttributeError) as e:
            log.warning("the file of the fleet's members is not understood", path=str(self._path), error=str(e))

    async def write(self) -> bool:
        """Write what has changed. False when that failed; the next call tries again."""
        async with self._writing:
            if not self._core.changed:
                return True
            self._core.changed, data = False, json.dumps(self._core.stored())
            try:
                await asyncio.to_thread(_replace, self._path, data)
            except OSError as e:
                self._core.changed = True
                log.warning("the fleet's members cannot be kept", path=str(self._path), error=str(e))
                return False
            return True

    async def tick(self) -> None:
        """Order the next step of every leave, and write what has changed."""
        for name in sorted(self._core.leaving):
            self._order(name)
        await self.write()

    async def leave(self, request: scheduler_pb2.LeaveNodeRequest) -> scheduler_pb2.LeaveNodeReply:
        """Let a node leave, or say how far it is. Raises NotFound when it never was here, InvalidRequest when it cannot
        leave now."""
        name, core, fleet = request.node, self._core, self._control.fleet
        if request.lost and is_name(name):  # also of nodes that this scheduler does not know: their disks may return
            self._check_lost(name)
            self._end(name)
            log.info("a node was declared lost", node=name)
        elif name not in core.members:
            if name not in core.former and name not in fleet.nodes:
                shown = ", ".join(sorted(core.members)[:20])
                raise NotFound(f"no node is called {name[:60]!r}; nodes: {shown}", param="node", code="unknown_node")
        elif name not in core.leaving:
            self._check_may_leave(name)
            core.leave(name)
            log.info("a node is to leave", node=name)
            self._order(name)
        await self.write()  # before it is said: a restart must not forget it
        return self._state(name)

    def _check_lost(self, name: str) -> None:
        node = self._control.fleet.nodes.get(name)
        if node is not None and (node.store_here or any(device.worker_here for device in node.devices)):
            raise InvalidRequest(f"{name} is running; let it leave without --lost", param="lost")

    def _check_may_leave(self, name: str) -> None:
        """Raise InvalidRequest unless its store is here, and each of its models is served by a node that stays."""
        nodes, leaving = self._control.fleet.nodes, self._core.leaving
        node = nodes.get(name)
        if node is None or not node.store_here:
            raise InvalidRequest(
                f"{name} is not running, and what it alone holds could not be moved; start it again, or say --lost if "
                "it will never come back",
                param="node",
            )
        staying = [other for other in nodes.values() if other.name not in {name, *leaving}]
        there = {m.name for other in staying for device in other.devices if device.serving for m in device.models}
        alone = sorted({m.name for device in node.devices for m in device.models} - there)
        if alone or not staying:
            what = " and ".join(alone) or "anything"
            raise InvalidRequest(
                f"{name} is the last node that serves {what}; let another node join first (`upbeat join`)", param="node"
            )

    def _order(self, name: str) -> None:
        node = self._control.fleet.nodes.get(name)
        if node is None:
            return
        working = [device.name for device in node.devices if device.worker_here]
        for device in working:
            self._control.fleet.drain(device)
            self._reports.command_worker(device, scheduler_pb2.WorkerCommand(leave=True))
        if not working:
            self._reports.command(name, scheduler_pb2.StoreCommand(leave=True))

    def _heard(self, name: str, said: scheduler_pb2.StoreLeaving) -> None:
        if name not in self._core.leaving:
            return
        if not said.over:
            self._said[name] = said
            return
        self._end(name)
        log.info("a node has left", node=name)

    def _end(self, name: str) -> None:
        self._said.pop(name, None)
        self._core.end(name)
        self._control.node_gone(name)
        self._reports.members_changed(gone=[name])

    def _state(self, name: str) -> scheduler_pb2.LeaveNodeReply:
        if name not in self._core.members:
            return scheduler_pb2.LeaveNodeReply(state="left")
        node = self._control.fleet.nodes.get(name)
        devices = node.devices if node is not None else []
        if any(device.worker_here for device in devices):
            requests = sum(len(device.outstanding) for device in devices)
            return scheduler_pb2.LeaveNodeReply(state="draining", requests=requests)
        said = self._said.get(name, scheduler_pb2.StoreLeaving())
        return scheduler_pb2.LeaveNodeReply(state="writing", waits_for=said.waits_for, pending_bytes=said.pending_bytes)


def _replace(path: Path, text: str) -> None:
    """Replace the file atomically and durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with part.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
