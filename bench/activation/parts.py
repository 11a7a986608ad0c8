"""What bringing a model's weights onto the device takes, by where they are and what memory they get."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from runtime.model_config import load_config
from worker.kernels.choice import choose_kernels
from worker.memory.device_memory import host_memory
from worker.models.filling import Filling
from worker.models.image import HostImage, image_of
from worker.models.load import Model, lay_out

_GRANULE, _CHUNK, _THREADS = 2 << 20, 64, 2


def measure(directory: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds by way: from the checkpoint (in the page cache), and from an image, each into fresh memory and into
    memory that another model has used."""
    kernels = choose_kernels("auto", load_config(directory), _CHUNK, 1)
    memory = host_memory(1 << 30, _GRANULE)
    model = lay_out(directory, memory, "auto", "cpu", _CHUNK, None, kernels and kernels.pack)
    found: dict[str, list[float]] = {}
    with TemporaryDirectory(dir="/dev/shm") as shared:
        image = image_of(Path(shared), b"bench", model.spans, 1 << 40)
        assert image is not None
        for _ in range(repeats):
            for name, source, warm in (
                ("checkpoint, fresh memory", None, False),
                ("checkpoint, warm memory", None, True),
                ("image, fresh memory", image, False),
                ("image, warm memory", image, True),
            ):
                _bring(model, image)  # so that there is memory to be used again
                model.unload(keep=warm)
                memory.cool(memory.total if not warm else 0)
                found.setdefault(name, []).append(_bring(model, source))
                model.unload()
        image.close()
    memory.close()
    return found


def _bring(model: Model, image: HostImage | None) -> float:
    began = time.monotonic()
    model.take()
    Filling(model.spans, image, lambda: None, threads=_THREADS).wait(len(model.spans) - 1)
    return time.monotonic() - began
