"""A worker's side of fine-tuning jobs towards the schedulers: obeys their commands, and reports what runs."""

from __future__ import annotations

import asyncio

from contracts.finetune import Trains
from contracts.finetune_wire import job_from_wire, progress_to_wire
from contracts.v1 import scheduler_pb2
from runtime import telemetry

log = telemetry.logger("runtime.training")


class Training:
    """See the module. Commands are obeyed in the order in which they come, on another thread, as starting a trainer
    takes time."""

    def __init__(self, trains: Trains) -> None:
        self._trains = trains
        #: Jobs that were stopped because they go on elsewhere: not reported once they have ended here.
        self._elsewhere: set[str] = set()

    async def obey(self, command: scheduler_pb2.FinetuneCommand) -> None:
        """Begin or stop a job. An error is logged: the scheduler tries again when the job does not begin."""
        try:
            if command.HasField("start"):
                job = job_from_wire(command.start)
                await asyncio.to_thread(self._trains.start, job)
                self._elsewhere.discard(job.id)
            elif command.HasField("stop"):
                stop = command.stop
                await asyncio.to_thread(self._trains.stop, stop.id, stop.cancelled)
                if not stop.cancelled:
                    self._elsewhere.add(stop.id)
        except Exception as e:
            log.exception("a command about a fine-tuning job failed", error=str(e))

    def report(self) -> scheduler_pb2.FinetuneReport:
        """What the device says of jobs now."""
        told = self._trains.progress()
        self._elsewhere &= {progress.id for progress in told}
        shown = [p for p in told if not (p.state.ended and p.id in self._elsewhere)]
        return scheduler_pb2.FinetuneReport(
            spare=self._trains.spare(), refuses=self._trains.refuses(), jobs=[progress_to_wire(p) for p in shown]
        )
