"""Builds what trains beside the models of a device."""

from __future__ import annotations

from dataclasses import dataclass

from contracts.corun import Corun, CorunFit, Solo, StepFit
from contracts.finetune import Job, Progress
from contracts.latency_profile import Profile
from runtime.clock import RealClock
from runtime.config import Config
from runtime.registry import registered
from worker.core.harvest import Harvest
from worker.core.predictor import Predictor
from worker.devices.partition import Partition
from worker.engine.training.harvesting import Harvesting, Trainable
from worker.memory.device_memory import DeviceMemory
from worker.serving import Served, Serving


def harvesting_of(
    served: Served, memory: DeviceMemory, partition: Partition | None, config: Config
) -> Harvesting | None:
    """What runs jobs on this device; None: nothing does (`why_not`)."""
    if served.balloon is None or partition is None or config.worker.harvest == "off":
        return None
    models = {s.image.name: _trainable(s, partition) for s in served.servings}
    return Harvesting(memory, served.balloon, models, partition, config.worker.max_batch, config.run_dir, RealClock())


def why_not(served: Served, partition: Partition | None, config: Config) -> str:
    """Why nothing is trained here; empty: something is."""
    if config.worker.harvest == "off":
        return "worker.harvest is off; set it to auto"
    if partition is None:
        return "its device is CUDA, beside which nothing is trained yet"
    if served.balloon is None:
        return "sharing: static gives each model a fixed part of the memory; set sharing: elastic or prism"
    return ""


@dataclass(frozen=True, slots=True)
class NoTraining:
    """`Trains` of a device on which nothing is trained."""

    why: str

    def start(self, job: Job) -> None:
        """See `Trains.start`: refused, as `refuses` says."""

    def stop(self, job_id: str, cancelled: bool) -> None:
        """See `Trains.stop`."""

    def progress(self) -> list[Progress]:
        """See `Trains.progress`."""
        return []

    def spare(self) -> float:
        """See `Trains.spare`."""
        return -1.0

    def refuses(self) -> str:
        """See `Trains.refuses`."""
        return self.why


def _trainable(serving: Serving, partition: Partition) -> Trainable:
    image, profile = serving.image, serving.profile
    fit = profile.corun if partition.divisible else None
    if fit is None or fit.shares != partition.shares:
        # Its steps beside training were not measured: it trains only while nothing is served.
        fit = _alone(profile, partition.shares)
    return Trainable(
        image.config.model,
        partition.dtype(image.model.dtype),
        registered(image.config)[image.name].tpot_s,
        image.shape.token_bytes,
        Harvest(Predictor(fit), idle_all=True),
    )


def _alone(profile: Profile, shares: int) -> CorunFit:
    """Steps with all shares, roughly; no pair."""
    batch, context = profile.decode_step_s.rows[-1], profile.decode_step_s.columns[0]
    first_s, last_s = profile.decode_s(1, context), profile.decode_s(batch, context)
    slope_s = max(last_s - first_s, 0.0) / max(batch - 1, 1)
    return CorunFit(shares, (Solo(shares, StepFit(slope_s, max(first_s - slope_s, 0.0), 0.0)),), Corun(1.0, 0.0), ())
