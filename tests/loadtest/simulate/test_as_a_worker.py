"""A simulated device gives its models' requests what a worker's own assembly gives them: the same steps at the same
times. The worker here is production's engine and device loop in virtual time (`tests/worker/virtual_device.py`)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import NamedTuple

import pytest

from contracts.kv import KvShape
from loadtest.simulate import store
from loadtest.simulate.costs import NodeKind
from loadtest.simulate.many import ManyRun, ModelRequest, simulate_many
from loadtest.simulate.shared_device import SharedDevice, Sharing
from loadtest.simulate.shared_kind import GRANULE_BYTES, SharedKind, SharedModel
from tests.worker.virtual_device import VirtualDevice
from tests.worker.virtual_model import CHUNK, LAYERS, random_prompt

#: As `HashRunner`'s, and time for a layer's weights: short, as two models that come together share the simulated bus
#: and not the virtual one.
STEP_S, TOKEN_S, LAYER_S = 0.002, 0.001, 0.005
SLABS, WEIGHTS = 40, 8


class HashCosts:
    """Steps of the hash model."""

    def decode(self, batch: int, context_tokens: float) -> tuple[float, float]:
        return STEP_S + TOKEN_S * batch, 0.0

    def mixed_s(self, batch: int, context_tokens: float, prefills: Iterable[tuple[int, int]]) -> float:
        return STEP_S + TOKEN_S * (batch + sum(count for count, _ in prefills))

    def prefill_s(self, tokens: int, context_tokens: int) -> float:
        return STEP_S + TOKEN_S * tokens


class Times(NamedTuple):
    first_s: float
    end_s: float


def kind(models: int) -> SharedKind:
    """The virtual device's: a slab of a granule holds a page of each layer."""
    made = []
    for n in range(models):
        shape = KvShape.of_heads(bytes([n + 1]) * 32, LAYERS, 5, 4369, CHUNK, "float32")
        node = NodeKind("hash", f"m{n}", shape, HashCosts(), 0.0, 1e12, 0.0, 1e12, 1e12, 1e12, 1e12)
        made.append(SharedModel(node, WEIGHTS * GRANULE_BYTES))
    rate = WEIGHTS * GRANULE_BYTES / (LAYERS * LAYER_S)
    return SharedKind("virtual", SLABS, tuple(made), rate, map_s=0.0, unmap_s=0.0)


def requests(seed: int, models: int, count: int, span_s: float) -> list[ModelRequest]:
    dice = random.Random(seed)
    found = [
        ModelRequest(dice.random() * span_s, f"m{dice.randrange(models)}", dice.randint(2, 24), dice.randint(1, 20))
        for _ in range(count)
    ]
    return sorted(found, key=lambda asked: asked.time_s)


def as_a_worker(asked: list[ModelRequest], models: int, sharing: Sharing) -> tuple[list[Times], list[int]]:
    """Times by request, and activations by model."""
    moves = sharing != "elastic"
    weights, policy = (WEIGHTS, sharing) if moves else (0, "prism")
    device = VirtualDevice(models, SLABS, weights=weights, sharing=policy, store=False, layerwise=True)
    if device.placing is not None:
        device.placing.layer_s = LAYER_S
        device.residency.copy_bytes_s = int(WEIGHTS * 2e7) / (LAYERS * LAYER_S)  # bytes as the virtual device's
    answers = []
    for n, each in enumerate(asked):
        model = device.models[int(each.model[1:])]
        prompt = random_prompt(random.Random(n), each.input_tokens)

        def submit(model: object = model, prompt: list[int] = prompt, count: int = each.output_tokens) -> None:
            name = model.submit(prompt, count)  # type: ignore[attr-defined]
            answers.append(model.answers[name])  # type: ignore[attr-defined]

        device.world.at(each.time_s, submit)
    device.go(until=lambda: len(answers) == len(asked) and all(answer.end for answer in answers))
    moved = [each.activations for each in device.residency.models.values()]
    return [Times(answer.times_s[0], answer.times_s[-1]) for answer in answers], moved


def simulated(asked: list[ModelRequest], models: int, sharing: Sharing) -> tuple[list[Times], list[int]]:
    found = simulate_many(ManyRun(kind(models), 1, sharing, lead_s=0.0), asked)
    residency = found.fleet.devices["device-0"].residency
    moved = [each.activations for each in residency.models.values()] if residency is not None else []
    return [Times(a.first_s, a.end_s) for a in found.answers], moved


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
@pytest.mark.parametrize("sharing", ["elastic", "prism", "swap", "serverless"])
def test_requests_are_answered_when_a_worker_would_answer_them(
    sharing: Sharing, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedDevice, "_first_here", lambda device: [])
    monkeypatch.setattr(store, "_PROBE_S", 0.0)  # the virtual device has no store that would be asked
    models = 3 if sharing != "elastic" else 2
    asked = requests(seed, models, 30, 6.0)
    theirs, moved = as_a_worker(asked, models, sharing)
    ours, moved_here = simulated(asked, models, sharing)
    # An idle model leaves after about 20 ms by `serverless`: a request may come in that very moment.
    extra = sum(abs(a - b) for a, b in zip(moved_here, moved, strict=True))
    assert extra <= (sharing == "serverless")
    late = [abs(a.first_s - b.first_s) + abs(a.end_s - b.end_s) for a, b in zip(ours, theirs, strict=True)]
    # They may differ where layers of two models come together, and where a preempted request finds its KV in a store.
    assert sum(each < 1e-6 for each in late) >= len(late) / 3
    assert max(late) < 0.15 * (1 + extra)
    by_end = sorted(range(len(asked)), key=lambda n: theirs[n].end_s)
    apart = [b for a, b in itertools.pairwise(by_end) if theirs[b].end_s - theirs[a].end_s > 2 * max(late)]
    assert sorted(apart, key=lambda n: ours[n].end_s) == apart


def test_the_kind_is_the_virtual_device_s() -> None:
    model = kind(1).models[0]
    assert (model.slab_granules, model.pages_per_slab, model.granules) == (1, LAYERS, WEIGHTS)
    assert kind(1).activation_s(model) == pytest.approx(LAYERS * LAYER_S)
