"""What computes on the CPU: `worker.kernels`, the model's shape and this machine's compiler decide."""

from __future__ import annotations

from contracts.errors import ConfigError
from runtime import telemetry
from worker.kernels.build import NoKernels, library
from worker.kernels.cpu_kernels import CpuKernels
from worker.models.config import ModelConfig

log = telemetry.logger("worker.kernels")


def choose_kernels(choice: str, config: ModelConfig, chunk_tokens: int, threads: int) -> CpuKernels | None:
    """The compiled kernels, or None for torch. Raises ConfigError when `native` is asked for and impossible."""
    if choice == "torch":
        return None
    why = CpuKernels.suits(config, chunk_tokens)
    if not why:
        try:
            return CpuKernels(library(), threads)
        except (NoKernels, OSError) as e:
            why = str(e)
    if choice == "native":
        raise ConfigError(f"worker.kernels = 'native' is impossible here: {why}; or set worker.kernels: auto")
    log.warning("torch computes instead of compiled kernels", reason=why)
    return None
