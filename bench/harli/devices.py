"""The paper's two GPUs and four pairs of models (sections 8.1 and 8.2), and the memory that each has."""

from __future__ import annotations

from dataclasses import dataclass, replace

from loadtest.simulate.contention import DecodeWork, SharedGpu, TrainWork
from loadtest.simulate.harvested import HarvestedKind
from loadtest.simulate.presets import A100_40, ADA_6000, LLAMA_3_8B, QWEN_25_7B, USABLE
from loadtest.simulate.training import Training
from worker.core.window import Window, reserve_bytes

GRANULE_BYTES = 2 << 20
#: PCIe 4.0 x16 as reached (`loadtest.simulate.presets`). An SM of an A100 has twice the memory bandwidth of one of an
#: Ada6000, so fewer of these saturate memory.
GPUS = {
    "Ada6000": SharedGpu(ADA_6000, 0.10, 0.45, 0.40, 0.50, 25e9),
    "A100": SharedGpu(replace(A100_40, mfu=0.60), 0.20, 0.50, 0.40, 0.50, 25e9),
}
VOCABULARY = {LLAMA_3_8B.name: 128_256, QWEN_25_7B.name: 152_064}
MODELS = {"Llama": LLAMA_3_8B, "Qwen": QWEN_25_7B}
#: Inference, fine-tuning.
PAIRS = [(serves, trains) for serves in MODELS for trains in MODELS]
#: Activations of decode steps.
_STEP_BYTES = 1e9
#: Of the paper's trainer, and of ours: examples that a layer computes before the next one.
PAPER_EXAMPLES, EXAMPLES = 2, 8
#: Time until a layer's memory is free: nothing is copied back.
LEAVE_S = 0.001
#: Longer steps of a model on two GPUs: 64 reductions over PCIe (ours).
_JOIN_S = 0.002


@dataclass(frozen=True, slots=True)
class Pair:
    """A model that serves and one that trains, on a GPU. devices: the first is divided over so many. part: of the
    memory that inference has; 1: it has what it needs, training the rest. steep: see `SharedGpu`; 0: the GPU's."""

    gpu: str
    serves: str
    trains: str
    examples: int = PAPER_EXAMPLES
    devices: int = 1
    part: float = 1.0
    steep: float = 0.0

    @property
    def shared(self) -> SharedGpu:
        """The GPU."""
        gpu = GPUS[self.gpu]
        return replace(gpu, steep=self.steep) if self.steep else gpu

    @property
    def work(self) -> TrainWork:
        """Training's."""
        shape = MODELS[self.trains]
        return TrainWork(shape, VOCABULARY[shape.name], examples=self.examples)

    @property
    def kind(self) -> HarvestedKind:
        """The device. Training's tensors that stay have their memory where it is not divided."""
        return self._kind(self.work.fixed_bytes if self.part == 1 else 0.0)

    @property
    def serving(self) -> HarvestedKind:
        """The device without training."""
        return self._kind(0.0)

    def _kind(self, fixed_bytes: float) -> HarvestedKind:
        shape, gpu = MODELS[self.serves], self.shared
        join_s = _JOIN_S if self.devices > 1 else 0.0
        mine = gpu.device.memory_bytes * USABLE * self.part
        kind = HarvestedKind(
            gpu,
            DecodeWork(shape, self.devices, join_s),
            mine - shape.weight_bytes / self.devices - _STEP_BYTES - fixed_bytes,
        )
        kept = reserve_bytes(LEAVE_S, kind.most_running, shape.token_bytes // self.devices)
        return replace(kind, kept_granules=-(-kept // GRANULE_BYTES))

    def training(self, all_here: bool = False) -> Training:
        """A trainer at its beginning. all_here: no window."""
        work, gpu = self.work, self.shared
        if all_here:
            return Training(work, None, 0.0)
        return Training(work, self._window(work), work.layer_bytes / gpu.copy_bytes_per_s)

    @staticmethod
    def _window(work: TrainWork) -> Window:
        return Window(work.shape.layers, -(-int(work.layer_bytes) // GRANULE_BYTES))

    @property
    def static_layers_bytes(self) -> float:
        """Memory of frozen layers where memory is divided: the rest, less what stays."""
        return self.shared.device.memory_bytes * USABLE * (1 - self.part) - self.work.fixed_bytes
