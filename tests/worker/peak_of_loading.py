"""`peak_of_loading.py MODEL native|torch`: prints the bytes of the model's weights, and how much more memory was
resident at the most while it was loaded than before. A program of its own: what is resident is a process's."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

from runtime import telemetry
from runtime.model_config import load_config
from worker.kernels.choice import choose_kernels
from worker.memory.device_memory import host_memory
from worker.models.checkpoint import Checkpoint
from worker.models.load import load_model


def resident(what: str) -> int:
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def main() -> None:
    telemetry.configure_logs("peak", "error")
    directory, choice = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    kernels = choose_kernels(choice, load_config(directory), 64, 1)
    pool = host_memory(1 << 30, 2 << 20)
    # what torch allocates at first
    torch.randn(256, 256, dtype=torch.float32).bfloat16() @ torch.ones(256, 256, dtype=torch.bfloat16)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = resident("VmRSS")
    load_model(directory, pool, "bfloat16", "cpu", 64, None, kernels and kernels.pack)
    print(Checkpoint(directory).bytes, resident("VmHWM") - before)


if __name__ == "__main__":
    main()
