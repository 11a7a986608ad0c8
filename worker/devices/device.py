"""The device of a worker, by `worker.device`: memory, kernels, runner and copier, chosen together.

A wrong value or a missing device stops the start with key, value and remedy. CUDA modules are imported only when that
device is chosen.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from contracts.errors import ConfigError
from runtime import niceness, telemetry
from runtime.config import Config
from runtime.model_config import ModelConfig, load_config
from runtime.registry import load_links
from runtime.sections import GIB
from worker.core.granules import Owner, Use
from worker.devices.cpu.native_runner import NativeRunner
from worker.devices.partition import HostPartition, Partition
from worker.devices.runner import Runner, Steps
from worker.kernels.choice import choose_kernels
from worker.kernels.cpu_kernels import CpuKernels
from worker.memory.copier import Copier, HostCopier
from worker.memory.device_memory import DeviceMemory, host_memory
from worker.memory.paged_kv import PagedKv
from worker.models.circulating import Mark, no_mark
from worker.models.filling import PIECE_BYTES, Copy, host_copy
from worker.models.image import Lock, no_lock
from worker.models.load import Model
from worker.models.other_links import LANES, OtherLinks
from worker.models.weights import Pack

if TYPE_CHECKING:
    from worker.memory.cuda_copier import CudaCopier
    from worker.memory.cuda_links import CudaLink

log = telemetry.logger("worker.devices.device")
_WIDEST_HEAD = 256
#: Memory of a device that the context of another worker takes, of which it uses copies only.
_CONTEXT_BYTES = 512 << 20


class Device(Protocol):
    """One device. computes: its name in profiles. pack: the kernels' layout of matrices. niceness: of the thread that
    runs steps."""

    computes: str
    memory: DeviceMemory
    pack: Pack | None
    niceness: int
    #: Identifies the layout of packed weights.
    layout: str
    #: Copies weights from host memory.
    copy: Copy
    #: A point in its queued work.
    mark: Mark
    #: Page-locks host memory, so that `copy` from it is fast.
    lock: Lock
    #: Links of other devices, over which weights come too.
    others: OtherLinks
    #: Its shares for serving and training; None: nothing is trained here.
    partition: Partition | None

    def movers(self, model: Model, kv: PagedKv) -> tuple[Steps, Copier]:
        """The runner of `model` over `kv`, and the copier of kv's pages. Called once."""
        ...

    def copier(self, kv: PagedKv) -> Copier:
        """A copier of kv's pages without a runner."""
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """What this machine offers. missing: packages that the CUDA path needs and that are not installed."""

    cuda: bool
    missing: tuple[str, ...] = ()

    @staticmethod
    def here() -> Found:
        """Examines this machine."""
        return Found(
            torch.cuda.is_available(), tuple(name for name in ("triton", "cuda.bindings") if not _installed(name))
        )


def device_kind(choice: str, found: Found) -> str:
    """`cpu` or `cuda`. Raises ConfigError when `cuda` is asked for and impossible."""
    why = "" if found.cuda else "torch sees no CUDA device"
    if not why and found.missing:
        why = (
            f"not installed: {', '.join(found.missing)}; in the checkout, {sys.executable} deploy/install.py cuda; "
            f"else {sys.executable} -m pip install 'upbeat-server[cuda]'"
        )
    if choice == "cpu" or (choice == "auto" and why):
        if found.cuda and choice == "auto":
            log.warning("the CPU computes although there is a CUDA device", reason=why)
        return "cpu"
    if why:
        raise ConfigError(f"worker.device = 'cuda' is impossible here: {why}; or set worker.device: auto")
    return "cuda"


def choose_device(config: Config, threads: int, paths: Sequence[Path] = ()) -> Device:
    """The device for the models in `paths`; without paths, for the configured model. Raises ConfigError."""
    models = [load_config(path) for path in paths or [config.model]]
    if device_kind(config.worker.device, Found.here()) == "cpu":
        return _Host(config, models, threads)
    return _Cuda(config, models)


def suits_cuda(model: ModelConfig, chunk_tokens: int) -> str:
    """Why the CUDA kernels do not suit a model; empty when they do."""
    if model.head_dim % 16 or model.head_dim > _WIDEST_HEAD:
        return f"head_dim = {model.head_dim} is no multiple of 16 up to {_WIDEST_HEAD}"
    if chunk_tokens % 16:
        return f"kv.chunk_tokens = {chunk_tokens} is no multiple of 16"
    return ""


class _Host:
    """The CPU: compiled kernels, or torch."""

    def __init__(self, config: Config, models: Sequence[ModelConfig], threads: int) -> None:
        if load_links(config, len(models)) > 1:
            raise ConfigError(
                f"worker.load_links = {config.worker.load_links}: the CPU computes here, and has no links; set it "
                "to 1, or worker.device: cuda"
            )
        granule = config.worker.granule_bytes
        self.memory: DeviceMemory = host_memory(int(config.kv.hbm_gib * GIB) // granule * granule, granule)
        self.niceness = niceness.ENGINE
        chunk_tokens = config.kv.chunk_tokens
        hardest = next((model for model in models if CpuKernels.suits(model, chunk_tokens)), models[0])
        kernels = config.worker.kernels, hardest, chunk_tokens, threads
        # The kernels' threads inherit the niceness.
        self._kernels = niceness.stepped_back(self.niceness, choose_kernels, *kernels)
        if config.worker.batch_invariant and self._kernels is None:
            raise ConfigError(
                "worker.batch_invariant = true needs the compiled kernels on the CPU, and torch would compute (the "
                "log says why); "
                "set worker.kernels: native to see it named, or worker.batch_invariant: false"
            )
        self.computes = "native" if self._kernels else "torch"
        self.pack: Pack | None = self._kernels.pack if self._kernels else None
        self.layout = f"{self.computes}/{self._kernels.products[0] if self._kernels else ''}"
        self.copy: Copy = host_copy
        self.mark: Mark = no_mark
        self.lock: Lock = no_lock
        self.others = OtherLinks()
        self.partition: Partition | None = HostPartition(self._kernels, threads)

    def movers(self, model: Model, kv: PagedKv) -> tuple[Steps, Copier]:
        """See `Device.movers`."""
        if self._kernels is None:
            return Runner(model, kv), self.copier(kv)
        torch.set_num_threads(1)  # torch's threads would spin beside the kernels' threads
        return NativeRunner(model, kv, self._kernels), self.copier(kv)

    def copier(self, kv: PagedKv) -> Copier:
        """See `Device.copier`."""
        return HostCopier(kv)


class _Cuda:
    """CUDA device 0 of those visible to the process (CUDA_VISIBLE_DEVICES). Weights may come through the others."""

    def __init__(self, config: Config, models: Sequence[ModelConfig]) -> None:
        from worker.devices.cuda.queue import CudaQueue
        from worker.memory.cuda_driver import CudaDriver
        from worker.memory.cuda_memory import cuda_memory
        from worker.memory.cuda_streams import CudaMark
        from worker.memory.cuda_weights import WeightCopies

        for model in models:
            if why := suits_cuda(model, config.kv.chunk_tokens):
                raise ConfigError(
                    f"worker.device: the CUDA kernels do not suit this model: {why}; set worker.device: cpu"
                )
        self._worker, granule = config.worker, config.worker.granule_bytes
        self._queue, self._driver = CudaQueue(), CudaDriver()
        wanted = int(config.kv.hbm_gib * GIB) // granule * granule
        free, total = self._driver.free_bytes()
        if wanted > free:
            raise ConfigError(
                f"kv.hbm_gib = {config.kv.hbm_gib}: the device has {free / GIB:.1f} of {total / GIB:.1f} GiB free; "
                "set less, and leave "
                "some for activations"
            )
        links = load_links(config, len(models))
        lent = (links - 1) * (_CONTEXT_BYTES + LANES * max(PIECE_BYTES, granule))
        if wanted + lent > total:
            raise ConfigError(
                f"kv.hbm_gib = {config.kv.hbm_gib}: the device has {total / GIB:.1f} GiB, of which other workers need "
                f"{lent / GIB:.1f} to load their weights through it (worker.load_links = {links}); set either lower"
            )
        try:
            self.memory: DeviceMemory = cuda_memory(self._driver, wanted, granule, self._queue.device)
        except ValueError as e:
            raise ConfigError(f"worker.granule_bytes = {granule}, kv.hbm_gib = {config.kv.hbm_gib}: {e}") from e
        self.computes = self.layout = "cuda"
        weights = WeightCopies(self._driver, self._queue.device)
        self.copy: Copy = weights.copy
        self.mark: Mark = lambda: CudaMark(self._queue.stream).wait
        self.lock: Lock = weights.lock
        self.others = OtherLinks(self._links(links))
        if lent:
            self.memory.count_beside(Owner(Use.WEIGHTS, "other workers"), "links", lambda: lent)
        self.partition: Partition | None = None
        self.pack: Pack | None = None
        self.niceness = 0  # the thread launches kernels and computes little itself

    def movers(self, model: Model, kv: PagedKv) -> tuple[Steps, Copier]:
        """See `Device.movers`."""
        from worker.devices.cuda.runner import CudaRunner

        w, copier = self._worker, self._copier(kv)
        runner = CudaRunner(
            model, kv, self._queue, copier, max(w.step_tokens, w.max_batch), w.max_batch, w.batch_invariant
        )
        for what, bytes_ in (
            ("activations", runner.activation_bytes),
            ("tables", runner.table_bytes),
            ("graphs", runner.graph_bytes),
        ):
            self.memory.count_beside(kv.span.owner, what, bytes_)
        return runner, copier

    def copier(self, kv: PagedKv) -> Copier:
        """See `Device.copier`."""
        return self._copier(kv)

    def _links(self, count: int) -> list[CudaLink]:
        """Those through the other visible devices, of `count` with the own one. Opens a context on each."""
        from worker.memory.cuda_driver import CudaDriver
        from worker.memory.cuda_links import CudaLink
        from worker.memory.cuda_streams import CudaStream

        found, own, device = [], self._driver, self._queue.device
        for number in range(1, count):
            peer, name = CudaDriver(number), f"cuda:{number}"
            if not own.reach(peer):
                log.warning(
                    "weights do not come through this device, because its memory can only be read through the host",
                    device=name,
                )
                continue
            staging = CudaStream(peer, torch.device("cuda", number))
            found.append(CudaLink(name, peer, staging, CudaStream(own, device, peer=peer)))
        return found

    def _copier(self, kv: PagedKv) -> CudaCopier:
        from worker.memory.cuda_copier import CudaCopier
        from worker.memory.cuda_streams import CudaStream

        driver, device = self._driver, self._queue.device
        return CudaCopier(
            kv,
            driver,
            CudaStream(driver, device, self._queue.stream),
            CudaStream(driver, device),
            CudaStream(driver, device),
        )


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
