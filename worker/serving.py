"""The models of a worker: loads their weights and builds what serves them.

A `ModelImage` and a `Serving` live as long as the worker. With `sharing: static` device memory beyond the weights is
split evenly: a fixed number of slabs per model. With `elastic`, and with one model whose weights stay, each model's KV
may fill all of it (`worker.core.balloon`). With the others weights come and go too (`worker.core.residency`).
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from contracts.errors import ConfigError
from contracts.kv import KvShape
from contracts.latency_profile import Profile
from contracts.models import ModelState
from contracts.residency import Never
from runtime import telemetry
from runtime.clock import RealClock
from runtime.config import Config
from runtime.profile_files import fitting
from runtime.registry import registered
from runtime.sections import GIB
from runtime.weight_images import remove_unused
from storelink.ends import End
from worker.core.arbitration import Arbitration
from worker.core.balloon import Balloon, Share
from worker.core.granules import Owner, Use
from worker.core.hbm import HbmCache
from worker.core.lending import Lending
from worker.core.pages import PagePool
from worker.core.residency import Residency
from worker.core.resident import Resident
from worker.core.turns import turns_of
from worker.core.windowed import Windowed
from worker.core.yielding import Yielding
from worker.devices.device import Device
from worker.devices.runner import Steps
from worker.engine.engine import NativeEngine
from worker.engine.executor import Executor
from worker.engine.placing import Placed, Placing
from worker.engine.policies import within
from worker.link.ends import end_of
from worker.link.kv_loader import KvLoader
from worker.link.loads import LoadTable
from worker.measure.initial_pace import profile_of, seed, seed_loads, subject
from worker.measure.steps import BRIEF, on_free_pages
from worker.memory.device_memory import DeviceMemory
from worker.memory.paged_kv import PagedKv
from worker.models.circulating import same_size, time_of_copy
from worker.models.filling import Filling
from worker.models.image import HostImage, image_of
from worker.models.load import Model, lay_out, load, too_large
from worker.models.other_links import OtherLinks
from worker.service.server import longest
from worker.text.codec import TextCodec

log = telemetry.logger("worker.serving")
#: Minimum number of chunks of KV for a model.
_MIN_CHUNKS = 4
#: Threads that copy a model's weights from its image.
_COPY_THREADS = 2
#: Tokens of the prompt whose prefill hides the copies of an idle model's layers (MIRAGE, section 5.1).
_SHORT_PROMPT = 512
#: Wait at the end for what other devices' links still read, in seconds.
_SETTLE_S = 5.0


@dataclass(frozen=True, slots=True)
class ModelImage:
    """A registered model, on the device or not, and its text codec. config: from `runtime.registry.as_only`, for this
    model."""

    name: str
    config: Config
    model: Model
    codec: TextCodec

    @classmethod
    def lay_out(cls, name: str, config: Config, device: Device) -> ModelImage:
        """The model, with places for its weights in the device's memory. Raises ConfigError."""
        w, digests = config.worker, config.run_dir / "digests"
        model = lay_out(
            config.model,
            device.memory,
            w.dtype,
            w.device,
            config.kv.chunk_tokens,
            digests,
            device.pack,
            name,
            registered(config)[name].adapters,
        )
        return cls(name, config, model, TextCodec.load(config.model))

    @property
    def shape(self) -> KvShape:
        """Shape of its KV."""
        return self.model.shape

    @property
    def pinned(self) -> bool:
        """Whether it stays on the device."""
        return registered(self.config)[self.name].pinned

    def weight_granules(self, memory: DeviceMemory) -> int:
        """Granules of its weights."""
        return self.model.weight_bytes // memory.granule_bytes


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


@dataclass(frozen=True, slots=True)
class Served:
    """The models of a device, not yet running. placing: decides whose weights are on the device; None: all are.
    images: of weights, in host memory. others: links that read them."""

    servings: list[Serving]
    placing: Placing | None = None
    #: Divides the memory; None: each model has a fixed part.
    balloon: Balloon | None = None
    images: tuple[HostImage, ...] = ()
    others: OtherLinks = field(default_factory=OtherLinks)

    def close(self) -> None:
        """Give up the images. All copies to this device must have ended."""
        if not self.others.settled(_SETTLE_S):
            log.warning("another device's link still reads weights; their images go at the next start")
            return
        for image in self.images:
            image.close()


def present(configs: Mapping[str, Config]) -> dict[str, Config]:
    """Those whose directory is there, if any: a model that vanished since the stack's start does not keep the others of
    its device from serving."""
    there = {name: config for name, config in configs.items() if config.model.is_dir()}
    for name in configs.keys() - there.keys() if there else ():
        log.error("a model's directory is gone; the others are served", model=name, path=str(configs[name].model))
    return there or dict(configs)


def serve_all(configs: Mapping[str, Config], device: Device, threads: int, salt_of: Callable[[str], bytes]) -> Served:
    """The models of these configurations (`runtime.registry.as_only`), by `sharing`. Raises ConfigError when there is
    no room."""
    images = [ModelImage.lay_out(name, config, device) for name, config in configs.items()]
    ids = [itertools.count(1 + n, len(images)) for n in range(len(images))]
    config = images[0].config
    sharing = config.sharing
    if len(images) == 1 and config.worker.remap == "off":
        # Its weights stay; its KV leaves room for a trainer.
        sharing = "elastic" if config.worker.harvest != "off" and device.partition is not None else "static"
    if sharing not in ("static", "elastic"):
        return _serve_in_turns(images, ids, device, threads, salt_of)
    for image in images:
        load(image.model, image.config.model, device.memory)
    free = device.memory.free if sharing == "elastic" else device.memory.free // len(images)
    servings = [_serve(image, free, each, device, threads, salt_of) for image, each in zip(images, ids, strict=True)]
    _meet_targets(servings, lambda name: 0.0)
    balloon = Balloon(device.memory.total) if sharing == "elastic" else None
    if balloon is not None:
        for serving in servings:
            _join(balloon, serving).weights = serving.image.weight_granules(device.memory)
        balloon.limits_changed()
        servings = [_bounded(serving) for serving in servings]
    return Served(servings, balloon=balloon)


def _serve_in_turns(
    images: Sequence[ModelImage],
    ids: Sequence[itertools.count[int]],
    device: Device,
    threads: int,
    salt_of: Callable[[str], bytes],
) -> Served:
    """Models whose weights come and go. Each is loaded once, to make its image and perhaps to measure its speed; the
    last ones, and pinned ones after all others, stay as far as they fit."""
    memory, config = device.memory, images[0].config
    servings, placed, packed = list[Serving](), dict[str, Placed](), list[HostImage]()
    speeds, packing, lendings = list[float](), dict[str, float](), dict[str, Lending | Never]()
    remove_unused(config.shm_dir)
    room = _image_bytes(config)
    for image, each in sorted(zip(images, ids, strict=True), key=lambda pair: pair[0].pinned):
        key = image.shape.fingerprint + image.model.adapters.digest + device.layout.encode()
        host = image_of(config.shm_dir, key, image.model.spans, room, device.lock)
        room -= host.bytes if host else 0
        packed += [host] if host else []
        need = image.weight_granules(memory) + -(-_MIN_CHUNKS * image.shape.chunk_bytes // memory.granule_bytes)
        for before in servings:
            if memory.free < need:
                before.image.model.unload()
        if memory.free < need:
            raise too_large(image.config.model, image.model, memory)
        image.model.take()
        filling = Filling(
            image.model.spans, host, lambda: None, copy=device.copy, threads=_COPY_THREADS, others=device.others
        )
        filling.wait(len(image.model.spans) - 1)
        if filling.seconds > 0 and host is not None:
            speeds.append(filling.bytes / filling.seconds)
        elif filling.seconds > 0:
            packing[image.name] = filling.bytes / filling.seconds
        placed[image.name] = Placed(image.model, host)
        servings.append(_serve(image, memory.total, each, device, threads, salt_of))
        lendings[image.name] = _lending(servings[-1], placed[image.name], device)
    balloon = Balloon(memory.total)
    residency = Residency(balloon, turns_of(config.sharing))
    _meet_targets(servings, residency.activation_s)
    residency.copy_bytes_s = max(speeds, default=residency.copy_bytes_s)
    for serving in servings:
        model, core = serving.image.model, serving.engine.core
        resident = Resident(
            _join(balloon, serving),
            core,
            Yielding(core),
            serving.image.weight_granules(memory),
            sum(span.packed_bytes for span in model.spans),
            serving.image.pinned,
            packing.get(serving.image.name),
        )
        if isinstance(lending := lendings[serving.image.name], Lending):
            resident.lending = lending
        else:
            resident.never = lending
        if residency.turns.one_at_a_time and serving is not servings[-1]:
            model.unload()
        state = ModelState.ACTIVE if model.spans[0].loaded else ModelState.COLD
        residency.join(resident, state, RealClock().now())
    for resident in residency.models.values():
        _check_reach(resident, residency, config)
    servings = [_bounded(serving) for serving in servings]
    servings.sort(key=lambda serving: images.index(serving.image))
    placing = Placing(residency, placed, device.copy, device.mark, _COPY_THREADS, device.others)
    return Served(servings, placing, balloon, tuple(packed), device.others)


def _lending(serving: Serving, placed: Placed, device: Device) -> Lending | Never:
    """What the model, which is loaded, may lend, or why it never does."""
    w, model = serving.image.config.worker, placed.model
    most = min(int(w.remap_cap * len(model.layers)), len(model.layers) - 1)
    if w.remap == "off":
        return Never.OFF
    if placed.image is None:
        return Never.NO_IMAGE
    if not same_size(model):
        return Never.SIZES
    if most < 1:
        return Never.CAP
    transfer_s, pace = time_of_copy(model, placed.image, device.copy), serving.engine.core.pace
    step_s = pace.decode_s(1)
    log.info("may lend", model=serving.image.name, copy_ms=transfer_s * 1e3, layer_ms=step_s / len(model.layers) * 1e3)
    prefill_s = _SHORT_PROMPT * pace.prefill_token_s
    return Lending(len(model.layers), model.layers.layer_granules(0), transfer_s, prefill_s, most, pace)


def _meet_targets(servings: Sequence[Serving], activation_s: Callable[[str], float]) -> None:
    """Where models have targets: order the device's prefills by those for the first token, and bound steps by the
    tightest one for a token."""
    entries = [registered(s.image.config)[s.image.name] for s in servings]
    arbitration = Arbitration() if any(entry.ttft_s for entry in entries) else None
    token_s = min((entry.tpot_s for entry in entries if entry.tpot_s), default=0.0)
    for serving, entry in zip(servings, entries, strict=True):
        core, coming_s = serving.engine.core, functools.partial(activation_s, serving.image.name)
        core.state.policy = within(core.state.policy, token_s)
        if arbitration is not None:
            core.state.order.arbitrate(arbitration, entry.ttft_s, core.live.values, core.pace, coming_s)


def _check_reach(resident: Resident, residency: Residency, config: Config) -> None:
    """Raises ConfigError when the model could never be on the device: its requests would wait for ever."""
    if resident.share.pool.reach * resident.share.slab_granules < resident.least:
        pinned = [each.name for each in residency.models.values() if each.pinned and each is not resident]
        beside = f" beside {' and '.join(pinned)}, which is pinned," if pinned else ""
        raise ConfigError(
            f"kv.hbm_gib = {config.kv.hbm_gib}: {resident.name} needs {resident.granules} granules for weights and "
            f"{resident.least} for KV, which{beside} the device's {residency.balloon.granules} do not hold; raise it"
            + (", or pin fewer models" if pinned else "")
        )


def _bounded(serving: Serving) -> Serving:
    """With the tokens that fit beside the weights that are always here: a longer request would wait for ever."""
    model, pool, shape = serving.image.model, serving.pool, serving.image.shape
    return replace(serving, max_tokens=longest(model.max_tokens, pool.total, shape.layers, shape.chunk_tokens))


def _join(balloon: Balloon, serving: Serving) -> Share:
    """Let the model's KV grow and shrink."""
    core, entry = serving.engine.core, registered(serving.image.config)[serving.image.name]
    share = balloon.join(
        serving.image.name, core.state.cache, serving.executor.kv.slab_granules, priority=entry.priority
    )
    share.yields = Yielding(core)
    return share


def _image_bytes(config: Config) -> int:
    """Bytes of images that may be kept in host memory. The stores' arenas may not be allocated yet."""
    try:
        config.shm_dir.mkdir(parents=True, exist_ok=True)
        found = os.statvfs(config.shm_dir)
    except OSError as error:
        log.warning("no images of weights in host memory", path=str(config.shm_dir), error=str(error))
        return 0
    if config.worker.images_gib is not None:
        return int(config.worker.images_gib * GIB)
    arenas = config.nodes.on_each_host * int(config.kv.dram_gib * GIB)
    return max(found.f_bavail * found.f_frsize - arenas, 0) // 2


def _serve(
    image: ModelImage,
    granules: int,
    ids: itertools.count[int],
    device: Device,
    threads: int,
    salt_of: Callable[[str], bytes],
) -> Serving:
    """granules: of address space for its KV."""
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
    cache = HbmCache(pool, config.kv.layer_priority, config.kv.hold_hinted, Windowed.of(shape))
    executor = Executor(shape, kv, cache, table, loader, RealClock(), config.kv, salt_of)
    engine = NativeEngine(
        executor, runner, image.codec, image.model.eos_ids, image.name, config.worker, ids, image.model.adapters.by_name
    )
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
