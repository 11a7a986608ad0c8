"""A device that only trains: `Harvesting` with a real trainer's process, and no engine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from contracts.corun import Corun, CorunFit, Solo, StepFit
from contracts.finetune import Job, Progress, Settings
from runtime.clock import RealClock
from worker.core.balloon import Balloon
from worker.core.harvest import Harvest
from worker.core.predictor import Predictor
from worker.devices.partition import HostPartition
from worker.engine.training.harvesting import Harvesting, Trainable
from worker.memory.device_memory import host_memory

GRANULE = 1 << 19
WAIT_S = 200.0


class TrainingDevice:
    """Its model is `directory`. mib: of its memory."""

    def __init__(self, directory: Path, place: Path, mib: int = 256) -> None:
        self.memory = host_memory(mib << 20, GRANULE)
        self.balloon = Balloon(self.memory.total)
        alone = CorunFit(2, (Solo(2, StepFit(1e-3, 1e-2, 0.0)),), Corun(1.0, 0.0), ())
        model = Trainable(directory, "float32", 0.0, 1024, Harvest(Predictor(alone), idle_all=True))
        partition = HostPartition(None, 2)
        self.harvesting = Harvesting(self.memory, self.balloon, {"m": model}, partition, 8, place, RealClock())
        self.seen = list[Progress]()

    def run(self, until: Callable[[], object]) -> None:
        """Give turns until this holds."""
        deadline = time.monotonic() + WAIT_S
        while not until():
            assert time.monotonic() < deadline, self.harvesting.progress()
            self.harvesting.turn(True, lambda: None)
            self.memory.validate()
            self.balloon.validate()
            self.seen += [p for p in self.harvesting.progress() if not self.seen or p != self.seen[-1]]
            time.sleep(0.005)

    @property
    def progress(self) -> Progress:
        (progress,) = self.harvesting.progress()
        return progress

    def finish(self) -> Progress:
        """Run until the job has ended, and its memory is free."""
        self.run(lambda: self.progress.state.ended)
        assert self.memory.free == self.memory.total and self.balloon.spare == self.balloon.granules
        return self.progress

    def leave_room_for(self, layers: int) -> None:
        """Models take so much that so many of the trainer's layers fit."""
        loan = self.balloon.loan
        loan.give((loan.layers - layers) * loan.layer)
        self.balloon.granules = loan.fixed + layers * loan.layer + self.harvesting._held.reserve
        self.harvesting.make_way()

    def close(self) -> None:
        self.harvesting.close()


def examples(path: Path, count: int = 8) -> Path:
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"What is in drawer {n}?"},
                {"role": "assistant", "content": f"Drawer {n} holds {n * 7 % 10} spoons."},
            ]
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def job(place: Path, name: str = "a", **settings: float) -> Job:
    """Of twelve steps, two examples each."""
    data = examples(place / "data.jsonl")
    chosen = Settings(**{"epochs": 3, "batch_size": 2, "learning_rate": 1e-3, "checkpoint_every": 4, **settings})  # type: ignore[arg-type]
    return Job(f"ftjob-{name * 8}", "", "m", str(data), str(place / f"out-{name}"), settings=chosen)


def losses(done: Job) -> list[float]:
    """Of each step, from the job's log."""
    lines = (Path(done.out) / "trainer_log.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def adapter(done: Job) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(done.out) / "adapter_model.safetensors")
