"""What computes on the CPU: `worker.kernels`, the model's shape and this machine's compiler decide."""

from __future__ import annotations

from contracts.errors import ConfigError
from runtime import telemetry
from runtime.model_config import ModelConfig
from worker.kernels.build import NoKernels, library
from worker.kernels.cpu_kernels import PRODUCTS, CpuKernels

log = telemetry.logger("worker.kernels")


def choose_kernels(choice: str, config: ModelConfig, chunk_tokens: int, threads: int) -> CpuKernels | None:
    """The compiled kernels, or None for torch. Raises ConfigError when `native` or `portable` is asked for and impossible."""
    if choice == "torch":
        return None
    why = CpuKernels.suits(config, chunk_tokens)
    if not why:
        try:
            kernels = CpuKernels(library(), threads, ["portable"] if choice == "portable" else list(PRODUCTS))
        except (NoKernels, OSError) as e:
            why = str(e)
        else:
            log.info("compiled kernels compute", threads=threads, bfloat16_products=kernels.products[0])
            return kernels
    if choice in ("native", "portable"):
        raise ConfigError(f"worker.kernels = {choice!r} is impossible here: {why}; or set worker.kernels: auto")
    log.warning("torch computes instead of compiled kernels", reason=why)
    return None
