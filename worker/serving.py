"""The models of a worker: loads their weights and builds what serves them.

A `ModelImage` exists while a model is registered on the node, a `Serving` while it is active. Both live as long as the
worker. With `sharing: static` device memory beyond the weights is split evenly: a fixed number of slabs per model. With
`elastic` each model's KV may fill all of it (`worker.core.balloon`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contracts.errors import ConfigError
from contracts.kv import KvShape
from contracts.latency_profile import Profile
from runtime import telemetry
from runtime.clock import RealClock
from runtime.config import Config
from runtime.profile_files import fitting
from runtime.registry import registered
from runtime.sections import GIB
from storelink.ends import End
from worker.core.balloon import Balloon
from worker.core.granules import Owner, Use
from worker.core.hbm import HbmCache
from worker.core.pages import PagePool
from worker.devices.device import Device
from worker.devices.runner import Steps
from worker.engine.engine import NativeEngine
from worker.engine.executor import Executor
from worker.link.ends import end_of
from worker.link.kv_loader import KvLoader
from worker.link.loads import LoadTable
from worker.measure.initial_pace import profile_of, seed, seed_loads, subject
from worker.measure.steps import BRIEF, on_free_pages
from worker.memory.device_memory import DeviceMemory
from worker.memory.paged_kv import PagedKv
from worker.models.load import Model, load_model
from worker.service.server import longest
from worker.text.codec import TextCodec

log = telemetry.logger("worker.serving")
#: Minimum number of chunks of KV for a model.
_MIN_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class ModelImage:
    """A model's weights on the device, and its text codec. config: from `runtime.registry.as_only`, for this model."""

    name: str
    config: Config
    model: Model
    codec: TextCodec

    @classmethod
    def load(cls, name: str, config: Config, device: Device) -> ModelImage:
        """Load the weights into granules of the device's memory. Raises ConfigError."""
        w, digests = config.worker, config.run_dir / "digests"
        model = load_model(
            config.model, device.memory, w.dtype, w.device, config.kv.chunk_tokens, digests, device.pack, name
        )
        return cls(name, config, model, TextCodec.load(config.model))

    @property
    def shape(self) -> KvShape:
        """Shape of its KV."""
        return self.model.shape


@dataclass(frozen=True, slots=True)
class Serving:
    """A model's engine and its KV. max_tokens: longest prompt plus output."""

    image: ModelImage
    pool: PagePool
    executor: Executor
    engine: NativeEngine
    profile: Profile
    max_tokens: int

    @property
    def loader(self) -> KvLoader:
        """Threads that copy its KV."""
        return self.executor.loader

    @property
    def end(self) -> End:
        """Receives the store's messages for this model."""
        return end_of(self.image.shape, self.engine.inbox.put, self.loader.from_store)


def serve_all(
    images: Sequence[ModelImage], device: Device, threads: int, salt_of: Callable[[str], bytes]
) -> list[Serving]:
    """One per image, in order, not yet running. Raises ConfigError if there is no room for KV."""
    free, elastic = device.memory.free, images[0].config.sharing == "elastic" and len(images) > 1
    servings = [
        _serve(
            image,
            free if elastic else free // len(images),
            itertools.count(1 + n, len(images)),
            device,
            threads,
            salt_of,
        )
        for n, image in enumerate(images)
    ]
    if elastic:
        share_all(servings, device.memory.total)
    return servings


def share_all(servings: Sequence[Serving], granules: int) -> Balloon:
    """Let the models share a device of `granules`, from now on."""
    balloon = Balloon(granules)
    for serving in servings:
        image, core, memory = serving.image, serving.engine.core, serving.executor.kv.memory
        share = balloon.join(
            image.name,
            core.state.cache,
            serving.executor.kv.slab_granules,
            -(-image.model.weight_bytes // memory.granule_bytes),
            registered(image.config)[image.name].priority,
        )
        share.yields = core
    return balloon


def _serve(
    image: ModelImage,
    granules: int,
    ids: itertools.count[int],
    device: Device,
    threads: int,
    salt_of: Callable[[str], bytes],
) -> Serving:
    config, shape, memory = image.config, image.shape, device.memory
    if granules * memory.granule_bytes < _MIN_CHUNKS * shape.chunk_bytes:
        raise ConfigError(
            f"kv.hbm_gib = {config.kv.hbm_gib}: weights take {_used_gib(memory, config):.2f} GiB, which leaves no "
            "room for KV of "
            f"{image.name}; raise it"
        )
    kv = PagedKv(memory.reserve(granules * memory.granule_bytes, Owner(Use.KV, image.name)), shape)
    pool = PagePool(kv.slab_count, kv.pages_per_slab, shape.layers)
    runner, copier = device.movers(image.model, kv)
    profile = _profile(image, kv, runner, threads, device.computes)
    table = LoadTable()
    loader = KvLoader(kv, table, lambda event: engine.inbox.put(event), copier)
    cache = HbmCache(pool, config.kv.layer_priority, config.kv.hold_hinted)
    executor = Executor(shape, kv, cache, table, loader, RealClock(), config.kv, salt_of)
    engine = NativeEngine(executor, runner, image.codec, image.model.eos_ids, image.name, config.worker, ids)
    seed(engine.core.pace, profile)
    seed_loads(engine.core.state.rates, profile, shape.piece_bytes)
    max_tokens = longest(image.model.max_tokens, pool.total, shape.layers, shape.chunk_tokens)
    return Serving(image, pool, executor, engine, profile, max_tokens)


def _used_gib(memory: DeviceMemory, config: Config) -> float:
    return (memory.total - memory.free) * config.worker.granule_bytes / GIB


def _profile(image: ModelImage, kv: PagedKv, runner: Steps, threads: int, computes: str) -> Profile:
    """The stored profile that fits, else a minimal one, measured now; the first requests already depend on it."""
    what = subject(image.shape, threads, computes)
    profile, why = fitting(image.config, what)
    if profile is not None:
        log.info("profile", model=image.name, measured_on=profile.measured_on, sources=sorted(profile.loads))
        return profile
    w, steps = image.config.worker, list[str]()
    computed = on_free_pages(
        runner, kv, BRIEF.within(w.max_batch, w.step_tokens, image.model.max_tokens), RealClock(), steps.append
    )
    log.info("no profile", model=image.name, reason=why, measured=steps)
    return profile_of(what, image.name, image.shape, computed)
