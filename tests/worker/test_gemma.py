"""Gemma 3: answers are those of transformers, and those of a cold run whatever was cached, preempted, evicted or lost
while layers with a window and layers without one share the cache. Checkpoints of models that also read images serve
text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from contracts.errors import ConfigError
from runtime.model_config import parse_config
from runtime.model_gemma import Gemma
from runtime.model_rope import Rope
from tests.worker.engine_harness import Harness, random_prompt
from tests.worker.test_engine_properties import PROPERTY, Cold, check, mixed
from tests.worker.test_families import family_model
from tests.worker.test_models_against_transformers import SIZES, Bench, prompt

#: What google/gemma-3-4b-it says of its text model; the rest is transformers' default.
FOUR_B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_model("gemma", tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def cold(model: Path) -> Iterator[Cold]:
    made = Cold(model)
    yield made
    for dtype in ("float32", "bfloat16"):
        made.harness(dtype, "native").close()


def test_greedy_tokens_are_those_of_transformers_far_beyond_the_window(model: Path, cold: Cold) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = random_prompt(random.Random(1), 100)
    got = cold.answer("float32", "native", tuple(tokens), 40).tokens
    with torch.no_grad():
        logits = theirs(torch.tensor([tokens + got])).logits[0]
    assert logits[99:-1].argmax(-1).tolist() == got
    assert len(set(got)) > 10, "a model that repeats a token shows nothing"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@settings(PROPERTY, max_examples=4)
@given(seed=st.integers(0, 1 << 40))
def test_any_mix_gives_the_answers_of_a_cold_run(model: Path, cold: Cold, dtype: str, seed: int) -> None:
    mixed(model, cold, dtype, "native", seed, requests=8)


def test_sequences_that_were_preempted_come_back_with_the_same_tokens(model: Path, cold: Cold) -> None:
    harness = Harness(model, pages=64, dtype="bfloat16", kernels="native", step_tokens=64)
    prompts = [random_prompt(random.Random(100 + i), 60) for i in range(6)]
    names = [harness.submit(p, 60, session=f"p{i}", logprobs=0) for i, p in enumerate(prompts)]
    for tokens, result in zip(prompts, harness.wait(*names), strict=True):
        check(cold, "bfloat16", "native", tokens, 60, result)
    harness.settle()
    assert harness.engine.core.scheduling.preemptions, "there was pressure"
    harness.close()


def test_a_published_model_that_reads_images_is_read_as_its_text_model() -> None:
    c = parse_config(FOUR_B)
    assert (c.vocab_size, c.hidden_size, c.layers, c.heads, c.kv_heads, c.head_dim) == (262_208, 2560, 34, 8, 4, 256)
    assert c.windows == tuple(None if layer % 6 == 5 else 1024 for layer in range(34))
    assert c.rope == Rope(1e6, "linear", 8.0) and c.gemma == Gemma(Rope(10_000.0), 256.0)
    assert c.tied and c.dtype == "bfloat16" and c.eos_ids == {1, 106} and c.max_tokens == 131_072


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"text_config": None}, "config.json: text_config = None must be an object"),
        ({"text_config": {"hidden_size": "wide"}}, "config.json: text_config: hidden_size = 'wide'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"eos_token_id": "</s>"}, "eos_token_id = '</s>'"),
        ({"text_config": {"layer_types": [{}] * 26}}, "layer_types"),
        ({"text_config": {"sliding_window": None}}, "sliding_window = None"),
        ({"text_config": {"rope_scaling": [8]}}, "rope_scaling = [8] must be an object"),
        ({"text_config": {"rope_parameters": {"rope_type": "linear"}}}, "rope_parameters = {'rope_type': 'linear'}"),
    ],
)
def test_what_a_model_that_reads_images_may_not_say_is_refused_by_key_and_value(
    change: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(FOUR_B | change)
    assert named in str(caught.value)


def with_images(directory: Path, *, tied: bool = True) -> transformers.PreTrainedModel:
    """A random model that reads images, saved to `directory`."""
    torch.manual_seed(5)
    text = SIZES | {"head_dim": 16, "sliding_window": 24, "sliding_window_pattern": 3, "tie_word_embeddings": tied}
    text |= {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    images = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    images |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=images, mm_tokens_per_image=4, tie_word_embeddings=tied
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() == 1:
                value.add_(torch.randn_like(value) * 0.2)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_text_of_a_model_that_reads_images_gives_the_logits_of_transformers(tied: bool, tmp_path: Path) -> None:
    theirs_model, tokens = with_images(tmp_path, tied=tied), prompt(60)
    bench = Bench(tmp_path)
    assert bench.model.config.tied is tied
    with torch.no_grad():
        theirs = theirs_model(torch.tensor([tokens])).logits[0]
    got = bench.step(bench.cut(bench.pages(60), tokens, 0, 60))
    torch.testing.assert_close(got[0], theirs[59], atol=1e-4, rtol=1e-4)


def test_every_spelling_of_a_checkpoint_with_images_is_read_and_no_other(tmp_path: Path) -> None:
    with_images(tmp_path)
    file, tokens = tmp_path / "model.safetensors", prompt(20)
    tensors = load_file(file)

    def logits() -> torch.Tensor:
        bench = Bench(tmp_path)
        return bench.step(bench.cut(bench.pages(20), tokens, 0, 20))

    expected = logits()
    assert all(name.startswith(("language_model.model.", "vision_tower.", "multi_modal_")) for name in tensors)
    other = {
        name.replace("language_model.model.", "model.language_model.")
        if name.startswith("language_model")
        else f"model.{name}": tensor
        for name, tensor in tensors.items()
    }
    save_file(other, file)
    assert torch.equal(logits(), expected)
    save_file(tensors | {"audio_tower.weight": torch.ones(1)}, file)
    with pytest.raises(ConfigError, match="audio_tower"):
        Bench(tmp_path)
    del other["model.language_model.layers.2.post_feedforward_layernorm.weight"]
    save_file(other, file)
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.2\.post_feedforward_layernorm"):
        Bench(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(text | {"architectures": ["Gemma3ForCausalLM"]}))
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.0"):
        Bench(tmp_path)
