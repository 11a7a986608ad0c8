"""Families whose layers differ from Llama's: whatever is cut, batched, cached, moved or lent, greedy tokens and bits
are those of a cold run."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from contracts.errors import ConfigError
from runtime.model_config import load_config, parse_config
from tests.worker.engine_harness import DEMO, VOCAB, Harness, random_prompt
from tests.worker.layers_that_take_turns import change_at_random, image
from tests.worker.test_kernels import WAYS, bench_by
from tests.worker.test_models_against_transformers import Bench, prompt, reference
from worker.devices.runner import Slice
from worker.harvest.adapter import check_trainable, module_widths
from worker.kernels.cpu_kernels import CpuKernels
from worker.memory.device_memory import host_memory
from worker.models.circulating import Circulation, same_size
from worker.models.filling import host_copy
from worker.models.load import Model, load_model

EXPERT = "model.layers.0.mlp.experts."
#: Each family's class in transformers, and the keys of its configuration.
FAMILIES = {
    "experts": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    # With tied embeddings, a random model repeats its last token whatever else it sees.
    "gemma": (
        "Gemma3",
        {
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "tie_word_embeddings": False,
        },
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_model(request.param, tmp_path_factory.mktemp(request.param))


def family_model(family: str, directory: Path) -> Path:
    """A random model of 4 layers with the demo model's tokenizer, saved to `directory`."""
    name, extra = FAMILIES[family]
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "eos_token_id": 2}
    torch.manual_seed(7)
    config = transformers.Gemma3TextConfig if name == "Gemma3" else getattr(transformers, f"{name}Config")
    made = getattr(transformers, f"{name}ForCausalLM")(config(**sizes | {"initializer_range": 0.2} | extra))
    made.save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (directory / file).write_text((DEMO / file).read_text())
    return directory


@pytest.mark.parametrize(("kernels", "dtype"), [("native", "bfloat16"), ("native", "float32"), ("torch", "float32")])
def test_chunked_batched_cached_and_loaded_answers_are_those_of_cold_runs(
    model: Path, kernels: str, dtype: str
) -> None:
    draw = random.Random(3)
    prompts = [random_prompt(draw, length) for length in (70, 33, 90)]
    alone = Harness(model, store=False, cache=False, kernels=kernels, dtype=dtype)
    expected = [alone.run(tokens, 16).tokens for tokens in prompts]
    alone.close()

    harness = Harness(model, kernels=kernels, dtype=dtype, step_tokens=24)
    batched = harness.wait(*(harness.submit(tokens, 16) for tokens in prompts))
    assert [result.tokens for result in batched] == expected
    cached = harness.wait(*(harness.submit(tokens, 16) for tokens in prompts))
    assert [(r.tokens, r.cached) for r in cached] == [(t, c) for t, c in zip(expected, (64, 32, 80), strict=True)]
    harness.purge()
    loaded = harness.wait(*(harness.submit(tokens, 16) for tokens in prompts))
    assert [(r.tokens, r.cached) for r in loaded] == [(t, c) for t, c in zip(expected, (64, 32, 80), strict=True)]
    assert harness.store is not None and harness.store.delivered >= sum(
        len(layers) or 4 for chunks in (4, 2, 5) for layers in harness.store.shape.read_after(chunks)
    ), "all that is read: layers with a window do not read the first chunks"
    spoiled = list(harness.store.chunks)[2]
    harness.purge()
    harness.store.fault = lambda key, layer: not (key == spoiled and layer == 1)
    assert [r.tokens for r in harness.wait(*(harness.submit(tokens, 16) for tokens in prompts))] == expected
    harness.settle()
    harness.close()


@pytest.mark.parametrize(("family", "kernels"), [("qwen3moe", "native"), ("qwen3moe", "torch"), ("gemma3", "native")])
def test_layers_lend_their_memory_and_come_back_from_the_image(
    family: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "computes", kernels)
    reference(tmp_path, family, num_hidden_layers=9, layer_types=None)
    bench, tokens, fails = Bench(tmp_path), prompt(20), [-1]
    pages = bench.pages(20)

    def before(layer: int) -> None:
        if layer == fails[0]:
            fails[0] = -1
            raise InterruptedError

    def step() -> torch.Tensor:
        return bench.runner.step([bench.cut(pages, tokens, 0, 20)], before, lambda layer: None)

    host = image(tmp_path, bench.model)
    assert same_size(bench.model)
    circulation = Circulation(bench.model, host, host_copy)
    change_at_random(
        bench.model, bench.pool, circulation, host, step, lambda n: fails.__setitem__(0, n), seed=1, rounds=20
    )
    host.close()


def test_layers_with_and_without_experts_are_of_two_sizes_and_share_no_slots(tmp_path: Path) -> None:
    reference(tmp_path, "qwen3moe-some-dense")
    assert not same_size(Bench(tmp_path).model)


@pytest.mark.parametrize("family", ["qwen3moe-wide", "gemma3-wide"])
@pytest.mark.parametrize("way", WAYS)
def test_rows_have_the_same_bits_however_they_are_cut_and_whatever_is_beside(
    way: str, family: str, tmp_path: Path
) -> None:
    reference(tmp_path, family)
    bench, tokens = bench_by(way, tmp_path), prompt(150)
    whole = bench.step(bench.cut(bench.pages(150), tokens, 0, 150))[0]
    pages, other, beside = bench.pages(150), bench.pages(40), prompt(40, 1)
    bench.step(bench.cut(pages, tokens, 0, 100))
    bench.step(bench.cut(other, beside, 0, 39), bench.cut(pages, tokens, 100, 149))
    got = bench.step(bench.cut(other, beside, 39, 40), bench.cut(pages, tokens, 149, 150))
    assert torch.equal(got[1], whole)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_experts_that_no_token_takes_are_not_read(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "computes", kernels)
    reference(tmp_path, "qwen3moe")
    bench, tokens = Bench(tmp_path), prompt(9)
    expected = bench.step(bench.cut(bench.pages(9), tokens, 0, 9))
    c, used = bench.model.config, 0
    assert c.experts is not None
    for layer in range(c.layers):
        w = bench.model.layers[layer]
        for matrix in (w.gate_up, w.down):
            for expert in range(c.experts.count):
                part = matrix.view(c.experts.count, -1)[expert]
                kept = part.clone()
                part.fill_(float("nan"))
                if torch.equal(bench.step(bench.cut(bench.pages(9), tokens, 0, 9)), expected):
                    continue  # unused: it stays NaN
                part.copy_(kept)
                used += 1
    assert 0 < used < c.layers * c.experts.count * 2
    assert torch.equal(bench.step(Slice(tokens, 0, bench.pages(9), True)), expected)


def test_a_step_of_many_sequences_gives_each_what_it_gets_alone(tmp_path: Path) -> None:
    reference(tmp_path, "qwen3moe")
    bench = Bench(tmp_path)
    prompts = [prompt(n, n) for n in range(1, 21)]
    alone = [bench.step(bench.cut(bench.pages(len(p)), p, 0, len(p)))[0] for p in prompts]
    bench.free = np.random.default_rng(2).permutation(bench.kv.max_pages)
    together = bench.step(*(bench.cut(bench.pages(len(p)), p, 0, len(p)) for p in prompts))
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-4, rtol=1e-4)


def checkpoint_of(directory: Path) -> tuple[dict[str, torch.Tensor], Callable[[dict[str, torch.Tensor]], None]]:
    """The tensors of a model with experts, and what writes others in their place."""
    reference(directory, "qwen3moe", num_hidden_layers=1)
    file = directory / "model.safetensors"
    return load_file(file), lambda tensors: save_file(tensors, file)


def loaded(directory: Path) -> Model:
    return load_model(directory, host_memory(64 << 20, 64 << 10), "float32", "cpu", 16, None)


def test_experts_in_two_tensors_a_layer_are_the_same_as_each_by_itself(tmp_path: Path) -> None:
    tensors, write = checkpoint_of(tmp_path)
    prefix, one = "model.layers.0.mlp.experts.", loaded(tmp_path).layers[0]
    each = [{n: tensors.pop(f"{prefix}{e}.{n}_proj.weight") for n in ("gate", "up", "down")} for e in range(7)]
    tensors[f"{prefix}gate_up_proj"] = torch.stack([torch.cat((e["gate"], e["up"])) for e in each])
    tensors[f"{prefix}down_proj"] = torch.stack([e["down"] for e in each])
    write(tensors)
    both = loaded(tmp_path).layers[0]
    assert torch.equal(one.gate_up, both.gate_up) and torch.equal(one.down, both.down)
    assert torch.equal(both.gate_up.view(7, 96, 96)[3, :48], each[3]["gate"])
    assert torch.equal(both.down.view(7, 96, 48)[6], each[6]["down"])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop(EXPERT + "6.up_proj.weight"), "no tensor .*experts.6.up_proj.weight"),
        (lambda t: t.update({EXPERT + "2.down_proj.weight": torch.ones(48, 96)}), r"implies \[96, 48\]"),
        (lambda t: t.update({EXPERT + "7.up_proj.weight": torch.ones(48, 96)}), "experts.7.up_proj.weight, which"),
        (lambda t: t.pop("model.layers.0.mlp.gate.weight"), "no tensor model.layers.0.mlp.gate.weight"),
        (lambda t: t.update({EXPERT + "gate_up_proj": torch.ones(7, 96, 96)}), "no tensor .*experts.down_proj"),
        (lambda t: t.update({EXPERT + "gate_up_proj": torch.ones(7, 48, 96)}), r"implies \[7, 96, 96\]"),
    ],
)
def test_a_checkpoint_whose_experts_do_not_fit_its_config_is_refused(
    damage: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path
) -> None:
    tensors, write = checkpoint_of(tmp_path)
    damage(tensors)
    write(tensors)
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path)


def test_sizes_of_experts_that_the_kernels_do_not_suit_are_named() -> None:
    config: dict[str, object] = {
        "hidden_size": 64,
        "intermediate_size": 100,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    config |= {"vocab_size": 9, "max_position_embeddings": 99, "architectures": ["Qwen3MoeForCausalLM"]}
    config |= {"num_experts": 4, "num_experts_per_tok": 2}
    suits = {size: CpuKernels.suits(parse_config(config | {"moe_intermediate_size": size}), 16) for size in (24, 32)}
    assert suits == {24: "moe_intermediate_size = 24 is no multiple of 16", 32: ""}, "no layer is as wide as 100"


@pytest.mark.parametrize("family", ["qwen3moe", "gemma3"])
def test_fine_tuning_refuses_families_that_it_does_not_train(family: str, tmp_path: Path) -> None:
    reference(tmp_path, family)
    config = load_config(tmp_path)
    for refuses in (check_trainable, module_widths):
        with pytest.raises(ConfigError, match=f"does not train {config.architecture}; train it elsewhere"):
            refuses(config)
