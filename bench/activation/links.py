"""What further links to host memory save, over a stand-in: copies at a fixed rate (`tests.worker.virtual_links`)."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from blake3 import blake3

from runtime.model_config import load_config
from tests.worker.virtual_links import Pace, PacedLink
from worker.kernels.choice import choose_kernels
from worker.memory.device_memory import host_memory
from worker.models import filling
from worker.models.filling import Filling
from worker.models.image import HostImage, image_of
from worker.models.load import Model, lay_out
from worker.models.other_links import OtherLinks

#: Bytes per second of a link. Far below this machine's memory, so that the links decide.
BYTES_S = 100e6
_GRANULE, _CHUNK, _THREADS = 2 << 20, 64, 2


def arms(pieces: int) -> dict[str, list[PacedLink]]:
    """The other links, by name of the arm."""
    return {
        "own link": [],
        "two links": [PacedLink("b", BYTES_S)],
        "four links": [PacedLink(name, BYTES_S) for name in "bcd"],
        "two links, the other at a quarter": [PacedLink("b", BYTES_S / 4)],
        "two links, the other fails halfway": [PacedLink("b", BYTES_S, fails_after=pieces // 4)],
        "two links, the other fails at once": [PacedLink("b", BYTES_S, fails_after=0)],
    }


def measure(directory: Path, repeats: int) -> dict[str, Any]:
    """By arm: milliseconds until the first layer is here, and until all are (medians and ranges), and the share of the
    bytes that other links carried. digests: how many different contents there were."""
    filling.PIECE_BYTES = _GRANULE  # as many pieces as a large model has
    kernels = choose_kernels("auto", load_config(directory), _CHUNK, 1)
    memory = host_memory(1 << 30, _GRANULE)
    model = lay_out(directory, memory, "auto", "cpu", _CHUNK, None, kernels and kernels.pack)
    pieces = sum(span.span.granules for span in model.spans)
    found, digests = dict[str, list[tuple[float, float, float]]](), set[bytes]()
    with TemporaryDirectory(dir="/dev/shm") as shared:
        image = image_of(Path(shared), b"bench", model.spans, 1 << 40)
        assert image is not None
        for _ in range(repeats):
            for name, links in arms(pieces).items():
                others = OtherLinks(links)
                if all(link.left is None for link in links):
                    _bring(model, image, others)  # learns the links' paces
                found.setdefault(name, []).append(_bring(model, image, others, digests))
                assert others.settled(10)
        image.close()
    memory.close()
    return {
        "settings": {"bytes_s": BYTES_S, "pieces": pieces, "repeats": repeats},
        "digests": len(digests),
        "arms": {name: _row(each) for name, each in found.items()},
    }


def _bring(
    model: Model, image: HostImage, others: OtherLinks, digests: set[bytes] | None = None
) -> tuple[float, float, float]:
    """Seconds until the first layer, and all, are here; share of other links. The weights leave again."""
    own = Pace(BYTES_S)
    began = time.monotonic()
    model.take()
    load = Filling(model.spans, image, lambda: None, copy=own.copy, threads=_THREADS, others=others)
    load.wait(1)
    first_s = time.monotonic() - began
    load.wait(len(load) - 1)
    all_s = time.monotonic() - began
    if digests is not None:
        digests.add(_digest(model))
    model.unload(keep=True)
    return first_s, all_s, sum(load.carried[1:]) / load.bytes


def _digest(model: Model) -> bytes:
    found = blake3()
    for span in model.spans:
        found.update(ctypes.string_at(span.span.address, span.packed_bytes))
    return found.digest()


def _row(each: list[tuple[float, float, float]]) -> dict[str, Any]:
    first, whole, others = zip(*each, strict=True)
    return {
        "first_layer_ms": [round(1e3 * of(first), 1) for of in (median, min, max)],
        "all_ms": [round(1e3 * of(whole), 1) for of in (median, min, max)],
        "others_share": round(median(others), 3),
    }
