"""Chooses the CPU kernels by `worker.kernels`, the model's shape and this machine's compiler."""

from __future__ import annotations

from contracts.errors import ConfigError
from runtime import native, telemetry
from runtime.model_config import ModelConfig
from worker.core.kernel_speed import complaint
from worker.kernels.build import NoKernels, library
from worker.kernels.cpu_kernels import PRODUCTS, CpuKernels

log = telemetry.logger("worker.kernels")


def ways_to_multiply(choice: str) -> list[str]:
    """The kinds of bfloat16 products that `worker.kernels` allows, fastest first."""
    return ["portable"] if choice == "portable" else list(PRODUCTS)


def choose_kernels(choice: str, config: ModelConfig, chunk_tokens: int, threads: int) -> CpuKernels | None:
    """The compiled kernels, or None for torch. Raises ConfigError when `native` or `portable` is configured and
    impossible."""
    if choice == "torch":
        return None
    why = CpuKernels.suits(config, chunk_tokens)
    if not why:
        try:
            kernels = CpuKernels(library(), threads, ways_to_multiply(choice))
        except (NoKernels, OSError) as e:
            why = str(e)
        else:
            _report(kernels, threads)
            return kernels
    if choice in ("native", "portable"):
        raise ConfigError(f"worker.kernels = {choice!r} is impossible here: {why}; or set worker.kernels: auto")
    log.warning("torch computes instead of compiled kernels", reason=why)
    return None


def _report(kernels: CpuKernels, threads: int) -> None:
    speed = kernels.speed()
    log.info(
        "compiled kernels compute",
        threads=threads,
        registers=speed.registers,
        bfloat16_products=speed.products,
        gflops_a_thread=round(speed.product_gflops, 1),
        share_of_peak=round(speed.share, 2),
    )
    if why := complaint(speed, native.abilities()):
        log.warning(
            "compiled kernels are far from what this processor should reach; `upbeat doctor` measures again", reason=why
        )
