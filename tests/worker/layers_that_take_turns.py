"""A model of nine layers whose layers take turns, on any runner: what tests of circulation share."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from worker.memory.device_memory import DeviceMemory
from worker.models.circulating import MOST_SLOTS, Circulation
from worker.models.filling import Copy, Filling, host_copy
from worker.models.image import HostImage, image_of
from worker.models.load import Model

LAYERS = 9


def nine_layers(directory: Path) -> Path:
    """A random Llama."""
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def image(directory: Path, model: Model) -> HostImage:
    """The model's image."""
    found = image_of(directory, b"key", model.spans, 1 << 30)
    assert found is not None
    return found


def change_at_random(
    model: Model,
    memory: DeviceMemory,
    circulation: Circulation,
    host: HostImage,
    step: Callable[[], torch.Tensor],
    fail: Callable[[int], object],
    seed: int,
    rounds: int,
    copy: Copy = host_copy,
) -> None:
    """Lends, takes back, unloads and loads again, with steps in between, some of which fail on the way. Each other one
    gives the bits that it gave with all layers here, and no granule is lost. fail(layer): the next step raises there.
    """
    draw, expected = random.Random(seed), step()
    layer, total = model.layers.layer_granules(0), memory.free
    lent = 0
    for _ in range(rounds):
        what = draw.random()
        if what < 0.1:
            circulation.leave()
            model.unload()
            assert memory.free == total + model.weight_bytes // memory.granule_bytes
            model.take()
            filling = Filling(model.spans, host, lambda: None, copy=copy)
            filling.wait(len(filling) - 1)
            lent = 0
        elif what < 0.6:
            slots = draw.randint(1, MOST_SLOTS)
            lent = draw.randint(0, LAYERS - slots)
            circulation.change(lent, slots if lent else 0)
        assert memory.free == total + lent * layer
        memory.validate()
        for _ in range(draw.randint(0, 2)):
            if draw.random() < 0.2:
                fail(draw.randrange(LAYERS))
                with contextlib.suppress(InterruptedError):
                    step()
            assert torch.equal(step(), expected)
    circulation.change(0, 0)
    assert torch.equal(step(), expected) and memory.free == total
    circulation.close()
