"""Weights of few bits: each format gives the numbers of transformers with dequantised weights, in every runner; bits,
caches, images and lent layers are as with any model; and what is malformed or not supported is refused by name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cli.settings import weights_gib
from contracts.errors import ConfigError
from runtime.config import Config
from runtime.model_config import load_config, parse_config
from tests.worker.engine_harness import DEMO, VOCAB, Harness, random_prompt
from tests.worker.layers_that_take_turns import LAYERS, change_at_random, image
from tests.worker.quantised_checkpoints import FORMATS, quantise
from tests.worker.test_models_against_transformers import Bench, prompt, reference
from tests.worker.test_models_loading import LLAMA, QWEN3_MOE
from worker.harvest.adapter import check_trainable
from worker.memory.device_memory import host_memory
from worker.models.circulating import Circulation, same_size
from worker.models.filling import host_copy
from worker.models.load import Model, load_model
from worker.models.quantised import QuantisedMatrix

WIDTH = 160  # of the MLP: five groups of 32, and two and a half blocks of 64


def quantised(
    directory: Path, name: str, case: str = "qwen3", left: tuple[str, ...] = (), **sizes: int
) -> transformers.PreTrainedModel:
    """A quantised model in `directory`; returns the unquantised model of the same numbers."""
    model = reference(directory, case, **({"intermediate_size": WIDTH} | sizes))
    quantise(directory, name, model, left)
    return model


@pytest.fixture(scope="module", params=FORMATS)
def each(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, str]:
    """A model of two layers in each format, what transformers makes of it, and the format."""
    directory = tmp_path_factory.mktemp(request.param)
    case = "qwen2" if request.param in ("awq", "gptq-4-act-order") else "qwen3"
    return directory, quantised(directory, request.param, case, num_hidden_layers=2), request.param


def greedy(bench: Bench, tokens: list[int], count: int) -> list[int]:
    """What a model says after `tokens`, a token a step."""
    pages, said = bench.pages(len(tokens) + count), list(tokens)
    logits = bench.step(bench.cut(pages, said, 0, len(said)))
    for _ in range(count):
        said.append(int(logits[0].argmax()))
        logits = bench.step(bench.cut(pages, said, len(said) - 1, len(said)))
    return said[len(tokens) :]


@pytest.mark.parametrize("computes", ["torch", "native"])
def test_logits_and_greedy_tokens_are_those_of_transformers_with_the_same_numbers(
    each: tuple[Path, Any, str], computes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "computes", computes)
    directory, theirs_model, _ = each
    bench, tokens = Bench(directory), prompt(50)
    with torch.no_grad():
        theirs = theirs_model(torch.tensor([tokens])).logits[0]
        said = theirs_model.generate(torch.tensor([tokens]), max_new_tokens=8, do_sample=False, eos_token_id=-1)
    pages = bench.pages(50)
    for start, end in ((0, 37), (37, 38), (38, 40), (40, 50)):
        got = bench.step(bench.cut(pages, tokens, start, end))
        torch.testing.assert_close(got[0], theirs[end - 1], atol=1e-4, rtol=1e-4)
    assert greedy(bench, tokens, 8) == said[0, 50:].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_have_the_same_bits_however_they_are_cut_and_whatever_is_beside(
    each: tuple[Path, Any, str], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "computes", "native")
    bench, tokens = Bench(each[0], dtype), prompt(150)
    whole = bench.step(bench.cut(bench.pages(150), tokens, 0, 150))[0]
    pages, other, beside = bench.pages(150), bench.pages(40), prompt(40, 1)
    bench.step(bench.cut(pages, tokens, 0, 100))
    bench.step(bench.cut(other, beside, 0, 38), bench.cut(pages, tokens, 100, 146))
    bench.step(bench.cut(pages, tokens, 146, 148))
    bench.step(bench.cut(other, beside, 38, 39), bench.cut(pages, tokens, 148, 149))
    got = bench.step(bench.cut(other, beside, 39, 40), bench.cut(pages, tokens, 149, 150))
    assert torch.equal(got[1], whole)
    if dtype != "float32":
        with torch.no_grad():
            theirs = each[1](torch.tensor([tokens])).logits[0, 149]
        assert torch.nn.functional.cosine_similarity(whole, theirs, dim=0) > 0.99


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantised model with the demo model's tokenizer."""
    directory = tmp_path_factory.mktemp("talking")
    quantised(
        directory, "gptq-4-act-order", "qwen3", num_hidden_layers=2, vocab_size=VOCAB, max_position_embeddings=2048
    )
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (directory / file).write_text((DEMO / file).read_text())
    return directory


@pytest.mark.parametrize(("kernels", "dtype"), [("native", "bfloat16"), ("torch", "float32")])
def test_chunked_batched_cached_and_loaded_answers_are_those_of_cold_runs(
    talking: Path, kernels: str, dtype: str
) -> None:
    draw = random.Random(3)
    prompts = [random_prompt(draw, length) for length in (70, 33, 90)]
    alone = Harness(talking, store=False, cache=False, kernels=kernels, dtype=dtype)
    expected = [alone.run(tokens, 12).tokens for tokens in prompts]
    alone.close()
    harness = Harness(talking, kernels=kernels, dtype=dtype, step_tokens=24)
    batched = harness.wait(*(harness.submit(tokens, 12) for tokens in prompts))
    assert [result.tokens for result in batched] == expected
    cached = harness.wait(*(harness.submit(tokens, 12) for tokens in prompts))
    assert [(r.tokens, r.cached) for r in cached] == [(t, c) for t, c in zip(expected, (64, 32, 80), strict=True)]
    harness.purge()
    loaded = harness.wait(*(harness.submit(tokens, 12) for tokens in prompts))
    assert [(r.tokens, r.cached) for r in loaded] == [(t, c) for t, c in zip(expected, (64, 32, 80), strict=True)]
    assert harness.store is not None
    spoiled = list(harness.store.chunks)[2]
    harness.purge()
    harness.store.fault = lambda key, layer: not (key == spoiled and layer == 1)
    assert [r.tokens for r in harness.wait(*(harness.submit(tokens, 12) for tokens in prompts))] == expected
    harness.settle()
    harness.close()


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_quantised_layers_lend_their_memory_and_come_back_from_the_image(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "computes", kernels)
    quantised(tmp_path, "awq", "llama", num_hidden_layers=LAYERS, hidden_size=64, num_attention_heads=4)
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
        bench.model, bench.pool, circulation, host, step, lambda n: fails.__setitem__(0, n), seed=1, rounds=15
    )
    host.close()


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_modules_that_are_left_as_they_are_are_served_and_layers_of_two_sizes_share_no_slots(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "computes", kernels)
    theirs_model = quantised(tmp_path, "gptq-4-v2", left=("1.mlp.down_proj", "2.self_attn"))
    bench, tokens = Bench(tmp_path), prompt(30)
    with torch.no_grad():
        theirs = theirs_model(torch.tensor([tokens])).logits[0, -1]
    got = bench.step(bench.cut(bench.pages(30), tokens, 0, 30))[0]
    torch.testing.assert_close(got, theirs, atol=1e-4, rtol=1e-4)
    assert isinstance(bench.model.layers[0].down, QuantisedMatrix)
    assert isinstance(bench.model.layers[1].down, torch.Tensor)
    assert not same_size(bench.model)


def loaded(directory: Path, dtype: str = "auto") -> Model:
    return load_model(directory, host_memory(64 << 20, 4 << 10), dtype, "cpu", 16, None)


def test_layers_take_the_bytes_of_their_codes_and_estimates_say_so(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 512}
    reference(tmp_path / "plain", "llama", torch.float16, **sizes)
    reference(tmp_path / "few", "llama", torch.float16, **sizes)
    quantise(tmp_path / "few", "awq", reference(tmp_path / "scratch", "llama", torch.float16, **sizes))
    plain, few = (loaded(tmp_path / name, "float16") for name in ("plain", "few"))
    each = [sum(span.packed_bytes for span in model.spans[1:]) for model in (plain, few)]
    assert 0.25 < each[1] / each[0] < 0.36, "4 bits of 16, and a scale of 2 bytes and a zero for 32 of them"
    estimates = [
        weights_gib(config_of(tmp_path / "few", dtype), "m", tmp_path / "few") * 2**30 for dtype in (None, "float32")
    ]
    held = [loaded(tmp_path / "few", dtype).weight_bytes for dtype in ("float16", "float32")]
    assert estimates == pytest.approx(held, rel=0.15)
    assert loaded(tmp_path / "few").dtype is torch.float32, "as for any small model"


def config_of(directory: Path, dtype: str | None) -> Config:
    worker = {"worker": {"dtype": dtype}} if dtype else {}
    return Config.model_validate({"model": str(directory), "model_name": "m"} | worker)


def test_what_decodes_codes_differently_is_another_model_to_the_cache(tmp_path: Path) -> None:
    quantised(tmp_path, "gptq-4-column", num_hidden_layers=1)
    first = loaded(tmp_path).shape.fingerprint
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    path.write_text(json.dumps(config))
    assert loaded(tmp_path).shape.fingerprint != first


def test_fine_tuning_refuses_quantised_weights_by_name(tmp_path: Path) -> None:
    quantised(tmp_path, "awq", num_hidden_layers=1)
    with pytest.raises(ConfigError, match=r"does not train quantised weights .awq.; train the unquantised model"):
        check_trainable(load_config(tmp_path))


AWQ, GPTQ, FP8 = (
    {"quant_method": name} | more for name, more in {"awq": {"bits": 4}, "gptq": {"bits": 4}, "fp8": {}}.items()
)
PACKED, FLOATS = FORMATS["packed-4"].config, FORMATS["fp8-channel"].config


def with_weights(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    group = config["config_groups"]["group_0"]
    return config | {"config_groups": {"group_0": group | {"weights": group["weights"] | changes}}}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("awq", "quantization_config = 'awq'"),
        ({"quant_method": ["awq"]}, "quantization_config"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        (AWQ | {"bits": 8}, "bits = 8 is not supported; supported: 4; or serve it with --engine vllm"),
        (AWQ | {"bits": True}, "bits = True"),
        (AWQ | {"version": "gemv"}, "version = 'gemv'"),
        (AWQ | {"zero_point": False}, "zero_point = False"),
        (AWQ | {"group_size": 0}, "group_size = 0 must be -1 or a multiple of 8"),
        (AWQ | {"group_size": 100}, "group_size = 100"),
        (AWQ | {"group_size": "32"}, "group_size = '32'"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert = 'lm_head' must be a list"),
        (GPTQ | {"bits": 3}, "bits = 3 is not supported; supported: 4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format = True"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "modules have different bits"),
        (FP8 | {"fmt": "e5m2"}, "fmt = 'e5m2'"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size = [128] must be two positive numbers"),
        (FP8 | {"ignored_layers": [1]}, "ignored_layers = [1]"),
        (PACKED | {"format": "marlin-24"}, "format = 'marlin-24'"),
        (PACKED | {"config_groups": {}}, "config_groups = {}"),
        (PACKED | {"ignore": "lm_head"}, "ignore = 'lm_head'"),
        (PACKED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (with_weights(PACKED, num_bits=2), "num_bits = 2"),
        (with_weights(PACKED, strategy="tensor"), "strategy = 'tensor'"),
        (with_weights(FLOATS, num_bits=4), "num_bits = 4"),
        (
            PACKED | {"config_groups": PACKED["config_groups"] | {"b": {"weights": {"num_bits": 8}}}},
            "different weights",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_key_and_value(config: Any, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(LLAMA | {"quantization_config": config})
    assert named in str(caught.value) and "config.json: " in str(caught.value)


def test_experts_of_few_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match="not supported for models with experts; serve it with --engine vllm"):
        parse_config(QWEN3_MOE | {"quantization_config": AWQ})


Q, DOWN = "model.layers.0.self_attn.q_proj.", "model.layers.0.mlp.down_proj."


def put(**tensors: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    """Damages a checkpoint: DOWN's tensors become these."""
    return lambda t: t.update({DOWN + name: value for name, value in tensors.items()})


def none_of(*names: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda t: [t.pop(name) for name in names]


def unquantised(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    """The module has an ordinary weight."""

    def change(t: dict[str, torch.Tensor]) -> None:
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            del t[name + part]
        t[name + "weight"] = torch.ones(96, 96)

    return change


DAMAGES: list[tuple[str, Callable[[dict[str, torch.Tensor]], object], str]] = [
    ("gptq-4", none_of(DOWN + "scales"), "no tensor .*down_proj.scales"),
    ("gptq-4", none_of(DOWN + "qweight"), "no tensor .*down_proj.weight"),
    ("gptq-4", put(qweight=torch.ones(21, 96, dtype=torch.int32)), r"down_proj.qweight .*implies \[20, 96\]"),
    ("gptq-4", put(qzeros=torch.ones(5, 12, dtype=torch.int64)), r"down_proj.qzeros is torch.int64 .*of torch.int32"),
    ("gptq-4", put(scales=torch.ones(5, 96, dtype=torch.int32)), r"down_proj.scales .*of torch.float16 or"),
    ("gptq-4", put(g_idx=torch.full([160], 5, dtype=torch.int32)), "down_proj.g_idx must have numbers from 0 to 4"),
    ("gptq-4", put(bias=torch.ones(96)), "down_proj.bias is not zero, and config.json implies no bias"),
    ("gptq-4", put(more=torch.ones(1)), "has tensor .*down_proj.more"),
    (
        "gptq-4",
        lambda t: t.update({Q + "g_idx": t[Q + "g_idx"].flip(0)}),
        "k_proj has other groups of inputs.* than .*q_proj.*serve it with --engine vllm",
    ),
    (
        "gptq-4",
        unquantised(Q),
        "module .*q_proj is not quantised, but .*k_proj is.*serve it with --engine vllm",
    ),
    (
        "gptq-4",
        lambda t: t.update({"lm_head.qweight": torch.ones(12, 211, dtype=torch.int32)}),
        "tensor lm_head.qweight .*lm_head must be floating; serve it with --engine vllm",
    ),
    (
        "packed-4",
        put(weight_shape=torch.tensor([96, 161])),
        r"weight_shape says \[96, 161\], config.json implies \[96, 160\]",
    ),
    ("packed-4", put(weight_scale=torch.ones(96, 4)), r"down_proj.weight_scale .*implies \[96, 5\]"),
    ("fp8-blocks", none_of(DOWN + "weight_scale_inv"), "no tensor .*down_proj.weight_scale"),
    ("fp8-blocks", put(weight_scale_inv=torch.ones(3, 2)), r"weight_scale_inv .*implies \[3, 3\]"),
    ("fp8-blocks", put(weight=torch.ones(96, 160).to(torch.float8_e5m2)), "float8_e5m2 .*of torch.float8_e4m3fn"),
    (
        "fp8-blocks",
        put(weight=torch.full((96, 160), float("nan")).to(torch.float8_e4m3fn)),
        "elements that are not numbers",
    ),
    ("fp8-tensor", put(weight_scale=torch.ones(3)), r"weight_scale .*implies \[96, 1\]"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model of one layer in a format, made once."""
    made = dict[str, Path]()

    def of(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            quantised(made[name], name, num_hidden_layers=1)
        return made[name]

    return of


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGES)
def test_a_checkpoint_that_does_not_fit_its_config_is_refused_by_tensor(
    name: str,
    damage: Callable[[dict[str, torch.Tensor]], object],
    message: str,
    whole: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((whole(name) / file).read_bytes())
    loaded(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path)


def test_groups_that_do_not_divide_the_inputs_are_refused(whole: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((whole("awq") / "model.safetensors").read_bytes())
    config = json.loads((whole("awq") / "config.json").read_text())
    config["quantization_config"]["group_size"] = 40
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"group_size = 40 does not divide .*q_proj.s 96 inputs"):
        loaded(tmp_path)


def test_float8_tensors_without_a_quantization_config_are_refused(tmp_path: Path) -> None:
    reference(tmp_path, "llama", num_hidden_layers=1)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[DOWN + "weight"] = tensors[DOWN + "weight"].to(torch.float8_e4m3fn)
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"down_proj.weight is torch.float8_e4m3fn"):
        loaded(tmp_path)
