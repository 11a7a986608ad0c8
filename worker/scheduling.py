"""Who is on the device and what the next step computes: carries out what `core.batching` decides, over real pages."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.config import WorkerSection
from worker.admission import Admission
from worker.core.batching import choose, victim
from worker.core.sequence import Event, Sequence, State
from worker.core.shared_prompt import awaits_prompt


class Scheduling:
    """Admits waiting sequences and puts batches together; mutates sequences and the device's cache. Engine thread only."""

    def __init__(self, admission: Admission, settings: WorkerSection) -> None:
        self.admission, self.settings = admission, settings

    def admit(self, sequences: Iterable[Sequence]) -> None:
        """Give waiting sequences their blocks as far as there is room, and start those whose first layers are near."""
        live = list(sequences)
        device = self.admission.device
        for sequence in sorted((s for s in live if s.state is State.WAITING), key=lambda s: s.priority):
            if device.settings.cache and awaits_prompt(sequence, live, device.shape.chunk_tokens):
                continue
            if not self.admission.admit(sequence):
                break
        for sequence in live:
            if sequence.state is State.LOADING:
                self.admission.try_start(sequence)

    def batch(self, sequences: Iterable[Sequence]) -> list[tuple[Sequence, int]]:
        """(sequence, tokens) of the next step; their blocks are there. Preempts when pages run out."""
        live = list(sequences)
        while True:
            running = [s for s in live if s.state is State.RUNNING]
            chosen = choose(running, self.settings.max_batch, self.settings.step_tokens)
            if all(self.admission.extend(s, s.computed + count) for s, count in chosen):
                return chosen
            self.admission.restart(victim(running), Event.PREEMPTED)
