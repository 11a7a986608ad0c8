"""LoRA adapters beside their base in one batch: each row gets what the merged model gives, whatever is beside it, and
no adapter uses the KV of another or of the base."""

from __future__ import annotations

import importlib
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from contracts.errors import ConfigError, Unavailable
from runtime.adapter_config import AdapterConfig, elements
from runtime.model_config import load_config
from tests.worker.engine_harness import Harness, random_prompt, tiny_model
from tests.worker.layers_that_take_turns import change_at_random, image
from tests.worker.lora import ALL, ATTENTION, Lora, make_adapter, merged
from tests.worker.test_kernels import WAYS, bench_by
from tests.worker.test_models_against_transformers import Bench, prompt, reference
from tests.worker.test_quantised import quantised
from worker.devices.runner import Slice
from worker.memory.device_memory import host_memory
from worker.models.circulating import Circulation, same_size
from worker.models.filling import host_copy
from worker.models.load import Model, load_model

#: Other ranks, scales, projections and layers.
KINDS = (
    Lora(rank=4, alpha=8.0),
    Lora(rank=7, alpha=3.0, targets=("q_proj", "v_proj"), rslora=True, seed=2),
    Lora(rank=1, alpha=2.0, targets=("o_proj", "down_proj"), seed=3, layers=(1,)),
)


def adapters_of(directory: Path, model: torch.nn.Module, kinds: tuple[Lora, ...] = KINDS) -> dict[str, Path]:
    return {f"a{n}": make_adapter(directory / f"a{n}", model, kind) for n, kind in enumerate(kinds)}


@pytest.mark.parametrize("case", ["llama-biased", "qwen2", "qwen3", "mistral-window", "gemma3"])
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_base_and_adapters_in_one_batch_give_what_the_merged_models_give(
    kernels: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "computes", kernels)
    base = reference(tmp_path, case)
    adapters = adapters_of(tmp_path, base)
    models = [base, *(merged(base, path, kind) for path, kind in zip(adapters.values(), KINDS, strict=True))]
    bench, tokens = Bench(tmp_path, adapters=adapters), prompt(40)
    with torch.no_grad():
        theirs = torch.stack([model(torch.tensor([tokens])).logits[0] for model in models])
    assert min((theirs[i] - theirs[j]).abs().max() for i, j in itertools.combinations(range(4), 2)) > 0.1
    pages = [bench.pages(40) for _ in models]
    for start, end in ((0, 29), (29, 39), (39, 40)):
        rows = [bench.cut(pages[n], tokens, start, end, adapter=n - 1) for n in (2, 0, 3, 1)]
        got = bench.step(*rows)
        torch.testing.assert_close(got, theirs[[2, 0, 3, 1], end - 1], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("form", ["gptq-4-act-order", "fp8-blocks"])
def test_adapters_beside_a_base_of_few_bits(
    form: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "computes", kernels)
    base = quantised(tmp_path, form, "qwen3", num_hidden_layers=2)
    adapters = adapters_of(tmp_path, base)
    models = [base, *(merged(base, path, kind) for path, kind in zip(adapters.values(), KINDS, strict=True))]
    bench, tokens = Bench(tmp_path, adapters=adapters), prompt(40)
    with torch.no_grad():
        theirs = torch.stack([model(torch.tensor([tokens])).logits[0, -1] for model in models])
    bench_pages = [bench.pages(40) for _ in models]
    got = bench.step(*(bench.cut(bench_pages[n], tokens, 0, 40, adapter=n - 1) for n in (2, 0, 3, 1)))
    torch.testing.assert_close(got, theirs[[2, 0, 3, 1]], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("way", WAYS)
def test_a_row_has_the_same_bits_with_any_adapters_beside_it(way: str, tmp_path: Path) -> None:
    base = reference(tmp_path, "qwen3-wide")
    bench, tokens = bench_by(way, tmp_path, adapters=adapters_of(tmp_path, base)), prompt(70)
    alone = {n: bench.step(bench.cut(bench.pages(70), tokens, 0, 70, adapter=n))[0] for n in (-1, 0, 1, 2)}
    pages = {n: bench.pages(70) for n in alone}
    for start, end in ((0, 33), (33, 69)):
        bench.step(*(bench.cut(pages[n], tokens, start, end, adapter=n) for n in (1, -1, 2, 0)))
    got = bench.step(*(bench.cut(pages[n], tokens, 69, 70, adapter=n) for n in (2, 0, -1, 1)))
    for row, n in zip(got, (2, 0, -1, 1), strict=True):
        assert torch.equal(row, alone[n])
    plain = bench_by(way, tmp_path)
    assert torch.equal(plain.step(plain.cut(plain.pages(70), tokens, 0, 70))[0], alone[-1]), "as without adapters"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path], list[Path]]:
    """A model with a tokenizer, its adapters, and the models into which they are merged."""
    directory = tmp_path_factory.mktemp("served")
    tiny_model(directory / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(directory / "base")
    adapters, whole = adapters_of(directory, base, KINDS[:2]), []
    for (name, path), kind in zip(adapters.items(), KINDS[:2], strict=True):
        whole.append(directory / f"merged-{name}")
        merged(base, path, kind).save_pretrained(whole[-1])
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (whole[-1] / file).write_text((directory / "base" / file).read_text())
    return directory / "base", adapters, whole


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_batched_cached_loaded_and_evicted_answers_are_those_of_the_merged_models(
    kernels: str, served: tuple[Path, dict[str, Path], list[Path]]
) -> None:
    base, adapters, whole = served
    draw, asked = random.Random(5), list[tuple[str, list[int]]]()
    for length in (70, 33):
        tokens = random_prompt(draw, length)
        asked += [(name, tokens) for name in ("", "a0", "a1")]
    expected = {}
    for name, path in (("", base), *zip(adapters, whole, strict=True)):
        alone = Harness(path, store=False, cache=False, kernels=kernels)
        expected |= {(name, len(t)): alone.run(t, 12).tokens for asked_name, t in asked if asked_name == name}
        alone.close()
    assert len({tuple(tokens) for tokens in expected.values()}) == 6, "each gives another text"

    harness = Harness(base, kernels=kernels, adapters=adapters, step_tokens=24)

    def all_of_them() -> list[tuple[list[int], int]]:
        ids = [harness.submit(tokens, 12, adapter=name, session=f"{name}-{len(tokens)}") for name, tokens in asked]
        return [(result.tokens, result.cached) for result in harness.wait(*ids)]

    texts = [expected[name, len(tokens)] for name, tokens in asked]
    assert all_of_them() == [(text, 0) for text in texts], "nothing of one is used by another"
    kept = [64] * 3 + [32] * 3
    assert all_of_them() == list(zip(texts, kept, strict=True))
    harness.purge()
    assert all_of_them() == list(zip(texts, kept, strict=True)), "loaded from the store"
    assert harness.store is not None
    by_session = {m.session.session_id: m for m in harness.store.manifests}
    harness.purge()
    manifest = by_session["a0-70"]
    harness.store.hint("a0-70", manifest.keys)
    harness.settle()
    delivered = harness.store.delivered
    assert harness.run(asked[1][1], 12, adapter="a0", session="a0-70").cached == 64
    assert harness.store.delivered == delivered, "the hint had brought it"
    harness.store.erase("a0-70", manifest.keys)
    harness.settle()
    assert harness.run(asked[1][1], 12, adapter="a0", session="a0-70").cached == 0
    assert harness.run(asked[0][1], 12, session="-70").cached == 64, "the base's is another's"
    harness.settle()
    harness.close()


def test_a_request_for_an_adapter_that_is_not_here_may_go_to_another_node(
    served: tuple[Path, dict[str, Path], list[Path]],
) -> None:
    harness = Harness(served[0], store=False, adapters={"a0": served[1]["a0"]})
    request = harness.submit([5, 6, 7], 1, adapter="a0")
    harness.wait(request)
    for name in ("a1", "tiny"):
        with pytest.raises(AssertionError, match="does not serve the adapter"):
            harness.run([5, 6, 7], 1, adapter=name)
    harness.close()
    assert Unavailable.status == 503


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_adapters_lend_their_memory_with_their_layer_and_come_back_from_the_image(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "computes", kernels)
    base = reference(tmp_path, "qwen3", num_hidden_layers=9)
    bench, tokens, fails = Bench(tmp_path, adapters=adapters_of(tmp_path, base)), prompt(20), [-1]
    pages = [bench.pages(20) for _ in range(2)]

    def before(layer: int) -> None:
        if layer == fails[0]:
            fails[0] = -1
            raise InterruptedError

    def step() -> torch.Tensor:
        rows = [bench.cut(pages[n], tokens, 0, 20, adapter=n) for n in range(2)]
        return bench.runner.step(rows, before, lambda layer: None)

    host = image(tmp_path, bench.model)
    assert same_size(bench.model)
    circulation = Circulation(bench.model, host, host_copy)
    change_at_random(
        bench.model, bench.pool, circulation, host, step, lambda n: fails.__setitem__(0, n), seed=1, rounds=12
    )
    host.close()


def loaded(directory: Path, adapters: dict[str, Path] | None = None) -> Model:
    return load_model(directory, host_memory(64 << 20, 1 << 12), "float32", "cpu", 16, None, adapters=adapters)


def test_their_memory_is_counted_with_the_weights(tmp_path: Path) -> None:
    base = reference(tmp_path, "llama")
    adapters = adapters_of(tmp_path, base)
    plain, beside = loaded(tmp_path), loaded(tmp_path, adapters)
    told = [AdapterConfig(kind.rank, kind.scale, frozenset(kind.targets)) for kind in KINDS]
    packed = sum(span.packed_bytes for span in beside.spans) - sum(span.packed_bytes for span in plain.spans)
    assert 0 <= packed - 4 * elements(plain.config, told) < 8 * 3 * 256, "but for rounding up each tensor"
    assert beside.weight_bytes >= plain.weight_bytes + packed - (1 << 12) * len(beside.spans)


def test_their_identity_is_what_they_compute_not_their_name_or_place(tmp_path: Path) -> None:
    base = reference(tmp_path, "llama")
    one, two = make_adapter(tmp_path / "one", base, KINDS[0]), make_adapter(tmp_path / "two", base, KINDS[0])
    other = make_adapter(tmp_path / "other", base, Lora(alpha=9.0))
    found = loaded(tmp_path, {"x": one, "y": two, "z": other}).adapters
    digests = [found.by_name[name].digest for name in "xyz"]
    assert digests[0] == digests[1] != digests[2] and len(digests[0]) == 32
    assert loaded(tmp_path).shape.fingerprint == loaded(tmp_path, {"x": one}).shape.fingerprint, "the base's KV stays"


def changed(directory: Path, **config: Any) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"use_dora": True}, "use_dora.*merge it"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save.*merge it"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern.*merge it"),
        ({"a_key_of_tomorrow": {"x": 1}}, "a_key_of_tomorrow.*merge it"),
        ({"bias": "lora_only"}, "bias.*merge it"),
        ({"peft_type": "IA3"}, "peft_type.*served: LORA"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights.*path_initial_model_for_weight_conversion"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens is not served"),
        ({"target_modules": ["lm_head"]}, "lm_head is not served"),
        ({"target_modules": []}, "target_modules.*must be a list"),
        ({"r": 0}, "r = 0"),
        ({"r": 257}, "r = 257.*256"),
        ({"r": 5}, "lora_A.weight is torch.float32.*with r = 5"),
        ({"lora_alpha": "x"}, "lora_alpha"),
        ({"lora_alpha": 1e400}, "lora_alpha"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(config: dict[str, Any], match: str, tmp_path: Path) -> None:
    base = reference(tmp_path, "llama")
    path = make_adapter(tmp_path / "one", base, KINDS[0])
    changed(path, **config)
    with pytest.raises(ConfigError, match=match):
        loaded(tmp_path, {"one": path})


def test_tensors_that_are_no_adapter_of_the_model_are_refused_by_name(tmp_path: Path) -> None:
    base = reference(tmp_path, "llama")
    path = make_adapter(tmp_path / "one", base, KINDS[0])
    file = path / "adapter_model.safetensors"
    whole = load_file(file)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

    def refused(tensors: dict[str, torch.Tensor], match: str) -> None:
        save_file(tensors, file)
        with pytest.raises(ConfigError, match=match):
            loaded(tmp_path, {"one": path})

    refused(whole | {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 96)}, "lm_head.lora_A.weight is not")
    refused(whole | {name.replace("lora_A", "lora_magnitude_vector"): torch.zeros(4)}, "magnitude_vector.* is not")
    refused({k: v for k, v in whole.items() if k != name}, "one matrix only for q_proj of layer 0")
    refused(whole | {name: whole[name][:, :-1].contiguous()}, "give the adapter of this model")
    refused(whole | {name.replace("layers.0", "layers.3"): whole[name].clone()}, "of 3 layers")
    refused(whole | {name: whole[name].to(torch.int32)}, "int32")
    refused({k: v for k, v in whole.items() if "v_proj" not in k}, "nothing for v_proj")
    refused({}, "no matrices")
    file.write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        loaded(tmp_path, {"one": path})
    file.unlink()
    with pytest.raises(ConfigError, match=r"it has no adapter_model\.safetensors"):
        loaded(tmp_path, {"one": path})
    with pytest.raises(ConfigError, match="no such directory"):
        loaded(tmp_path, {"one": tmp_path / "nowhere"})


def test_experts_take_no_adapters_but_their_attention_does(tmp_path: Path) -> None:
    base = reference(tmp_path, "qwen3moe")
    path = make_adapter(tmp_path / "all", base, Lora(targets=ALL))
    with pytest.raises(ConfigError, match="target_modules has down_proj: adapters of the experts of Qwen3Moe"):
        loaded(tmp_path, {"all": path})
    changed(path, target_modules="all-linear")
    save_file({"base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight": torch.zeros(4, 96)},
              path / "adapter_model.safetensors")  # fmt: skip
    with pytest.raises(ConfigError, match=r"experts\.0\.up_proj.*adapters of the experts"):
        loaded(tmp_path, {"all": path})
    kind = Lora(targets=ATTENTION)
    path = make_adapter(tmp_path / "attention", base, kind)
    whole, bench, tokens = merged(base, path, kind), Bench(tmp_path, adapters={"one": path}), prompt(20)
    with torch.no_grad():
        theirs = whole(torch.tensor([tokens])).logits[0]
    got = bench.step(bench.cut(bench.pages(20), tokens, 0, 20, adapter=0))
    torch.testing.assert_close(got[0], theirs[19], atol=2e-4, rtol=2e-4)


def test_an_adapter_that_is_not_the_model_s_is_no_slice_of_a_step(tmp_path: Path) -> None:
    reference(tmp_path, "llama")
    bench = Bench(tmp_path)
    with pytest.raises(ValueError, match="there is no adapter 0"):
        bench.step(Slice([1], 0, bench.pages(1), True, 0))


def test_what_peft_writes_is_read(tmp_path: Path) -> None:
    peft = importlib.import_module("peft")  # slow to import
    base, config = reference(tmp_path, "llama"), load_config(tmp_path)
    for number, more in enumerate(({}, {"use_rslora": True, "target_modules": "all-linear"})):
        made = peft.get_peft_model(base, peft.LoraConfig(**{"r": 3, "target_modules": ["q_proj"]} | more))
        made.save_pretrained(tmp_path / f"peft-{number}")
        model = loaded(tmp_path, {"one": tmp_path / f"peft-{number}"})
        assert model.adapters.rank == 3 and model.config == config
        assert {module for _, module in model.adapters.each[0].pairs} == (set(ALL) if number else {"q_proj"})
        base = made.unload()
