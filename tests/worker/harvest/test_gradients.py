"""Loss and gradients are those of transformers with peft, and do not depend on how rows are cut into units."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F

from runtime.model_config import load_config
from tests.worker.harvest.bench import FAMILIES, SETTINGS, AllLayers, examples, make_model, make_trainer, random_adapter
from worker.harvest.adapter import Adapter, seeded
from worker.harvest.checkpoints import write_adapter
from worker.harvest.data import Examples
from worker.harvest.lora import Deltas, Dropout, attend, finish, project
from worker.harvest.partition import Partition
from worker.models.llama import RopeTable, embed, rms_norm

LENGTHS = [29, 1 + 16, 40]


def gradients(directory: Path, data: Examples, adapter: Adapter, **more: object) -> tuple[float, torch.Tensor]:
    """Loss and whole gradient of the first step, whose batch is all of `data`; the step itself changes nothing."""
    trainer = make_trainer(directory, data, adapter=adapter, **more)
    before = adapter.flat.clone()
    done = trainer.train_step()
    gradient = trainer.optimizer._sums / min(1.0, 1.0 / (done.gradient_norm + 1e-6))
    adapter.flat.copy_(before)
    trainer.close()
    return done.loss, gradient


def loss_of(model: torch.nn.Module, data: Examples) -> torch.Tensor:
    total = torch.zeros(())
    for example in range(len(data)):
        at, labels = data.targets(example)
        logits = model(data.tokens(example)[None]).logits[0]
        total = total + F.cross_entropy(logits[at].float(), labels, reduction="sum")
    return total / sum(data.target_count(example) for example in range(len(data)))


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_of_each_family_are_those_of_peft(family: str, tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", family)
    data, adapter = examples(LENGTHS), random_adapter(load_config(tmp_path / "base"))
    write_adapter(tmp_path / "adapter", adapter, SETTINGS, "base")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    expected = loss_of(theirs, data)
    expected.backward()

    loss, gradient = gradients(tmp_path / "base", data, adapter)
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    found = Adapter(load_config(tmp_path / "base"), SETTINGS)
    found.flat.copy_(gradient)
    parameters = {
        name.replace(".default", ""): value for name, value in theirs.named_parameters() if value.requires_grad
    }
    assert parameters.keys() == found.named().keys()
    for name, ours in found.named().items():
        torch.testing.assert_close(
            ours, parameters[name].grad, atol=1e-5, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_units_of_any_size_give_the_same_gradient(family: str, tmp_path: Path) -> None:
    make_model(tmp_path, family)
    data, adapter = examples(LENGTHS), random_adapter(load_config(tmp_path))
    whole_loss, whole = gradients(tmp_path, data, adapter, partition=Partition(64, 64, 128))
    for partition in (Partition(8, 16, 32), Partition(32, 8, 100)):
        loss, gradient = gradients(tmp_path, data, adapter, partition=partition)
        assert loss == pytest.approx(whole_loss, abs=1e-5)
        torch.testing.assert_close(gradient, whole, atol=1e-5, rtol=1e-4)


def test_with_dropout_the_gradient_is_that_of_the_masked_forward_pass(tmp_path: Path) -> None:
    """The reference keeps the whole graph, so that no mask is drawn a second time."""
    make_model(tmp_path, "qwen3")
    config, frozen = load_config(tmp_path), AllLayers(tmp_path)
    settings = replace(SETTINGS, dropout=0.3, seed=5)
    data, adapter = examples(LENGTHS), random_adapter(config, settings)
    loss, gradient = gradients(tmp_path, data, adapter, settings=settings)

    leaf = adapter.flat.clone().requires_grad_()
    total = torch.zeros(())
    for example in range(len(data)):
        tokens, (at, labels) = data.tokens(example), data.targets(example)
        cos, sin = RopeTable(config, torch.float32).at(torch.arange(len(tokens)), len(tokens))
        dropout = Dropout(0.3, (5, 0, example))
        x = embed(frozen.top(), config, tokens)
        for layer, w in enumerate(frozen.layers):
            pairs = adapter.shapes.views(leaf[layer])
            parts = [slice(row, min(row + 8, len(tokens))) for row in range(0, len(tokens), 8)]
            deltas = [Deltas(pairs, adapter.scale, dropout, layer, part.start) for part in parts]
            made = [project(w, config, x[p], cos[p], sin[p], d) for p, d in zip(parts, deltas, strict=True)]
            q, k, v = (torch.cat(each) for each in zip(*made, strict=True))
            attended = attend(q, k, v, 0, 0, None)
            x = torch.cat([finish(w, config, x[p], attended[p], d) for p, d in zip(parts, deltas, strict=True)])
        logits = F.linear(rms_norm(x[at], frozen.top().norm, config.norm_eps), frozen.top().head)
        total = total + F.cross_entropy(logits, labels, reduction="sum")
    total = total / sum(data.target_count(example) for example in range(len(data)))
    total.backward()
    assert loss == pytest.approx(total.item(), abs=1e-5)
    torch.testing.assert_close(gradient, leaf.grad, atol=1e-5, rtol=1e-4)


def test_a_mask_is_drawn_again_for_the_same_place_only() -> None:
    like = torch.zeros(8, 500)

    def mask(seeds: tuple[int, ...] = (1, 2, 3), layer: int = 0, row: int = 0, module: str = "q") -> torch.Tensor:
        drawn = Dropout(0.25, seeds).mask(layer, row, module, like)
        assert drawn is not None
        return drawn

    assert torch.equal(mask(), mask())
    assert mask().unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert (mask() == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)
    others = [mask((1, 2, 4)), mask((1, 3, 3)), mask((2, 2, 3)), mask(layer=1), mask(row=8), mask(module="k")]
    assert not any(torch.equal(mask(), other) for other in others)
    assert Dropout(0.0, (1,)).mask(0, 0, "q", like) is None


def test_generators_depend_on_all_that_seeds_them() -> None:
    drawn = {torch.rand(1, generator=seeded(*parts)).item() for parts in [(1, 23), (12, 3), (1, 2, 3), ("1", 24)]}
    assert len(drawn) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_types_train_too_with_gradients_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    data, adapter = examples(LENGTHS), random_adapter(load_config(tmp_path))
    exact_loss, exact = gradients(tmp_path, data, adapter)
    loss, gradient = gradients(tmp_path, data, adapter, frozen=AllLayers(tmp_path, dtype))
    assert gradient.dtype == torch.float32
    assert loss == pytest.approx(exact_loss, rel=0.02)
    assert F.cosine_similarity(gradient.flatten(), exact.flatten(), dim=0) > 0.99
