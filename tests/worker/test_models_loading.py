"""Loading models: what config.json may say, where weights come from, and what makes two models' caches the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from contracts.errors import ConfigError
from contracts.kv import fingerprint
from loadtest.random_model import SHAPES, make_random_model, parameters
from runtime.model_config import load_config, parse_config
from runtime.model_experts import Experts
from runtime.model_gemma import Gemma
from runtime.model_quantised import Quantisation
from runtime.model_rope import Rope
from worker.memory.device_memory import host_memory
from worker.models.checkpoint import Checkpoint
from worker.models.digest import cached_weights_digest, model_digest
from worker.models.load import Model, load_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
}
GEMMA: dict[str, Any] = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 32,
    "num_hidden_layers": 7,
}
QWEN3_MOE: dict[str, Any] = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


# ---- config.json
# -------------------------------------------------------------------------------------------------------
def test_defaults_are_those_of_the_family() -> None:
    c = parse_config(LLAMA)
    assert (c.kv_heads, c.head_dim, c.norm_eps, c.tied, c.dtype) == (4, 16, 1e-6, False, None)
    assert (c.rope.theta, c.rope.kind) == (10_000.0, "default")
    assert c.windows == (None,) * 4 and not (c.qkv_bias or c.out_bias or c.mlp_bias or c.qk_norm)


def test_rope_is_read_in_both_spellings() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
    old = parse_config(LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3"} | scaling})
    new = parse_config(LLAMA | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3"} | scaling})
    assert old.rope == new.rope and old.rope.original_tokens == 1024 and old.rope.theta == 5e5
    assert parse_config(LLAMA | {"rope_theta": 7.0, "rope_scaling": None}).rope.theta == 7.0


def test_a_stretched_context_is_as_long_as_it_was_stretched_to() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert parse_config(LLAMA | {"rope_scaling": yarn}).max_tokens == 8192
    assert parse_config(LLAMA | {"rope_scaling": yarn, "max_position_embeddings": 9000}).max_tokens == 9000


def test_windows_are_those_of_each_architecture() -> None:
    def windows(name: str, **more: Any) -> tuple[int | None, ...]:
        return parse_config(LLAMA | {"architectures": [f"{name}ForCausalLM"], "sliding_window": 32} | more).windows

    assert windows("Llama") == (None,) * 4
    assert windows("Mistral") == (32,) * 4
    assert windows("Mistral", sliding_window=None) == (None,) * 4
    assert windows("Qwen2") == (None,) * 4
    assert windows("Qwen2", use_sliding_window=True, max_window_layers=3) == (None, None, None, 32)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows("Qwen3", use_sliding_window=True, layer_types=kinds) == (32, None, 32, None)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 2.0}}, "beta_fast = 1.0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": "no"}}, "truncate = 'no'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' rotates by the sequence's length"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope' rotates by the sequence's length"),
        ({"rope_scaling": {"type": "mrope"}}, "'mrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"hidden_size": "64"}, "hidden_size = '64'"),
        ({"vocab_size": None}, "vocab_size"),
        ({"head_dim": 15}, "head_dim = 15"),
        ({"rms_norm_eps": -1}, "rms_norm_eps = -1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'"),
        ({"torch_dtype": "int8"}, "torch_dtype = 'int8'"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_what_is_wrong_or_not_computed_is_refused_by_key_and_value(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(LLAMA | change)
    assert named in str(caught.value) and "config.json" in str(caught.value)


def test_a_missing_or_broken_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        load_config(tmp_path)


def test_experts_are_read_as_both_versions_of_transformers_write_them() -> None:
    four = parse_config(QWEN3_MOE).experts
    five = parse_config({k: v for k, v in QWEN3_MOE.items() if k != "num_experts"} | {"num_local_experts": 8}).experts
    assert four == five == Experts(8, 2, 32, norm=False, layers=(True,) * 4)
    some = parse_config(QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True})
    assert some.experts == Experts(8, 2, 32, norm=True, layers=(False, True, False, False))
    assert some.mlp_sizes() == {96, 32} and parse_config(QWEN3_MOE).mlp_sizes() == {32}
    assert parse_config(QWEN3_MOE | {"num_experts": 0}).experts is None
    assert parse_config(QWEN3_MOE | {"mlp_only_layers": [0, 1, 2, 3]}).experts is None
    assert parse_config(QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 32}).windows == (32,) * 4
    assert parse_config(QWEN3_MOE).qk_norm and parse_config(QWEN3_MOE).head_dim == 16


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_experts": "8"}, "num_experts = '8'"),
        ({"num_experts": None}, "num_local_experts = None"),
        ({"num_local_experts": 4}, "num_local_experts = 4 contradicts num_experts, 8"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 must be at most the number of experts, 8"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size = None"),
        ({"norm_topk_prob": 1}, "norm_topk_prob = 1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers = '0'"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers = [True]"),
    ],
)
def test_experts_that_contradict_themselves_are_refused_by_key_and_value(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(QWEN3_MOE | change)
    assert named in str(caught.value) and "config.json" in str(caught.value)


def test_gemma_is_read_as_both_versions_of_transformers_write_it() -> None:
    c = parse_config(GEMMA)
    assert c.windows == (32,) * 5 + (None, 32) and c.head_dim == 256 and c.tied and c.qk_norm
    assert c.rope == Rope(1e6) and c.gemma == Gemma(Rope(10_000.0), 256.0) and c.attention_scale == 1 / 16
    four = GEMMA | {
        "rope_theta": 5e5,
        "rope_local_base_freq": 7.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8},
    }
    full, sliding = {"rope_type": "linear", "rope_theta": 5e5, "factor": 8}, {"rope_theta": 7.0}
    five = GEMMA | {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}
    for config in (parse_config(four), parse_config(five)):
        assert config.rope == Rope(5e5, "linear", 8.0) and config.gemma == Gemma(Rope(7.0), 256.0)
    assert parse_config(GEMMA | {"sliding_window_pattern": 2}).windows == (32, None) * 3 + (32,)
    kinds = ["full_attention"] * 6 + ["sliding_attention"]
    assert parse_config(GEMMA | {"layer_types": kinds}).windows == (None,) * 6 + (32,)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_activation": "relu"}, "hidden_activation = 'relu'"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported; serve it with --engine"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0"),
        ({"rope_parameters": {"full_attention": "yes"}}, "rope_parameters"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "longrope"}}}, "'longrope'"),
        ({"layer_types": [{}] * 7}, "layer_types"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
    ],
)
def test_what_gemma_may_not_say_is_refused_by_key_and_value(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(GEMMA | change)
    assert named in str(caught.value) and "config.json" in str(caught.value)


def test_what_the_native_engine_does_not_serve_names_the_engine_that_may() -> None:
    for change in ({"architectures": ["MixtralForCausalLM"]}, {"quantization_config": {"quant_method": "hqq"}}):
        with pytest.raises(ConfigError, match="serve it with --engine vllm"):
            parse_config(LLAMA | change)


# ---- weights
# -----------------------------------------------------------------------------------------------------------
def make(directory: Path, dtype: str = "float32", seed: int = 1, **changes: Any) -> Path:
    return make_random_model(directory, SHAPES["tiny"][0] | changes, seed, dtype)


def load(
    directory: Path, dtype: str = "auto", chunk_tokens: int = 64, cache_dir: Path | None = None, mib: int = 64
) -> Model:
    return load_model(directory, host_memory(mib << 20, 64 << 10), dtype, "auto", chunk_tokens, cache_dir)


def test_a_loaded_model_says_what_it_is(tmp_path: Path) -> None:
    directory = make(tmp_path)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    model = load(directory)
    assert (model.shape.layers, model.shape.kv_heads, model.shape.head_dim, model.shape.dtype) == (4, 2, 16, "float32")
    assert model.max_tokens == 16_384 and model.eos_ids == {2, 7}
    assert model.weight_bytes % (64 << 10) == 0 and model.weight_bytes >= Checkpoint(directory).bytes


def test_weights_in_the_pool_are_those_of_the_file(tmp_path: Path) -> None:
    directory = make(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    model = load(directory)
    prefix = "model.layers.2."
    packed = torch.cat([tensors[f"{prefix}self_attn.{n}_proj.weight"] for n in "qkv"])
    assert torch.equal(model.layers[2].qkv, packed)
    assert torch.equal(
        model.layers[2].gate_up, torch.cat([tensors[f"{prefix}mlp.{n}_proj.weight"] for n in ("gate", "up")])
    )
    assert torch.equal(model.layers[2].down, tensors[prefix + "mlp.down_proj.weight"])
    assert model.top.head is model.top.embedding


def test_sharded_weights_are_the_same_model(tmp_path: Path) -> None:
    one, many = make(tmp_path / "one"), make(tmp_path / "many")
    sharded(many)
    a, b = load(one), load(many)
    assert a.shape.fingerprint == b.shape.fingerprint
    assert torch.equal(a.layers[3].qkv, b.layers[3].qkv)


def test_auto_means_float32_for_small_models_and_the_checkpoints_type_for_others(tmp_path: Path) -> None:
    small = make(tmp_path / "small", "bfloat16")
    assert load(small).shape.dtype == "float32"
    assert load(small, "bfloat16").shape.dtype == "bfloat16"
    large = make(
        tmp_path / "large",
        "bfloat16",
        hidden_size=1024,
        num_attention_heads=64,
        intermediate_size=4096,
        vocab_size=4096,
    )
    assert Checkpoint(large).bytes > 64 << 20
    assert load(large, mib=256).shape.dtype == "bfloat16"


def test_the_fingerprint_depends_on_what_decides_the_cache_and_on_nothing_else(tmp_path: Path) -> None:
    base = load(make(tmp_path / "a")).shape.fingerprint
    assert load(make(tmp_path / "elsewhere")).shape.fingerprint == base
    assert load(make(tmp_path / "b", eos_token_id=5, max_position_embeddings=4096)).shape.fingerprint == base
    others = [
        load(make(tmp_path / "c", seed=2)),
        load(make(tmp_path / "d", rope_theta=5.0)),
        load(make(tmp_path / "e", rms_norm_eps=1e-3)),
        load(tmp_path / "a", "bfloat16"),
        load(tmp_path / "a", chunk_tokens=32),
    ]
    assert len({base, *(m.shape.fingerprint for m in others)}) == 6


def flips(whole: Any = None, name: str = "") -> Iterator[tuple[str, Any]]:
    """The same model with one field changed at a time, those of its parts included."""
    whole = CONFIG if whole is None else whole
    for field in fields(whole):
        value = getattr(whole, field.name)
        one = [(name + field.name, changed(value))] if not is_dataclass(value) else []
        for path, other in one or flips(value, f"{name}{field.name}."):
            yield path, replace(whole, **{field.name: other})


def changed(value: Any) -> Any:
    """Another value of the same kind."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value * 2
        case str():
            return "float16" if value == "bfloat16" else f"{value}2"
        case frozenset():
            return value | {77}
        case tuple():
            return (*value[:-1], 16)
    raise AssertionError(f"say how {value!r} is changed")


#: Every part of a configuration, whichever family has it.
CONFIG = replace(
    parse_config(QWEN3_MOE | {"torch_dtype": "bfloat16"}),
    gemma=Gemma(Rope(), 64.0),
    quantisation=Quantisation("gptq", "int4", 32, 1, 8),
)
#: They decide where an answer ends and how long it may be, which type is served where nothing says it (that type has
#: its own place in the fingerprint), or are only a name of what the other fields say.
NOT_OF_THE_CACHE = {"architecture", "eos_ids", "max_tokens", "dtype"}


def test_every_field_that_changes_what_is_computed_changes_the_digest() -> None:
    weights = bytes(32)
    base = model_digest(weights, CONFIG)
    digests = {name: model_digest(weights, config) for name, config in flips()}
    assert {name for name, digest in digests.items() if digest == base} == NOT_OF_THE_CACHE
    others = [digest for name, digest in digests.items() if name not in NOT_OF_THE_CACHE]
    assert len(set(others)) == len(others)
    assert model_digest(b"w" * 32, CONFIG) != base


def test_families_without_experts_keep_the_digest_that_they_had_before_there_were_any() -> None:
    found = model_digest(bytes(32), parse_config(LLAMA)).hex()
    assert found == "4cac1f274ccc28e08242d0f367315233c050e7742b90e5162cc909db8099e304"


def test_type_chunks_and_adapter_change_the_fingerprint() -> None:
    said = [(bytes(32), "float32", 64, b""), (b"w" * 32, "float32", 64, b""), (bytes(32), "bfloat16", 64, b"")]
    said += [(bytes(32), "float32", 32, b""), (bytes(32), "float32", 64, b"lora")]
    assert len(
        {fingerprint(w, dtype=dtype, chunk_tokens=tokens, adapter=adapter) for w, dtype, tokens, adapter in said}
    ) == len(said)


def digest_of(directory: Path, cache: Path, later_s: float = 60.0) -> bytes:
    return cached_weights_digest(Checkpoint(directory), cache, time.time() + later_s)


def true_digest(directory: Path) -> bytes:
    return cached_weights_digest(Checkpoint(directory), None)


def test_the_digest_is_remembered_until_the_files_change(tmp_path: Path) -> None:
    directory, cache = make(tmp_path / "m"), tmp_path / "cache"
    first = digest_of(directory, cache)
    [entry] = cache.iterdir()
    entry.write_text(bytes(32).hex())
    assert digest_of(directory, cache) == bytes(32), "nothing was read"
    entry.write_text("damaged")
    assert digest_of(directory, cache) == first == true_digest(directory)
    make(directory, seed=2)
    assert digest_of(directory, cache) == true_digest(directory) != first


def test_other_weights_with_equal_size_and_time_have_another_digest(tmp_path: Path) -> None:
    directory, other, cache = make(tmp_path / "m"), make(tmp_path / "other", seed=2), tmp_path / "cache"
    file, theirs = directory / "model.safetensors", other / "model.safetensors"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    os.utime(theirs, ns=times)
    first = digest_of(directory, cache)
    for put in (
        lambda: shutil.copy2(theirs, file),
        lambda: (shutil.copy2(theirs, tmp_path / "new"), (tmp_path / "new").replace(file)),
    ):
        make(directory)
        os.utime(file, ns=times)
        assert digest_of(directory, cache) == first
        size = file.stat().st_size
        put()
        assert (file.stat().st_size, file.stat().st_mtime_ns) == (size, times[1]), "nothing shows but who looks closer"
        assert digest_of(directory, cache) == true_digest(other) != first


def test_files_that_have_just_been_written_are_read_again_next_time(tmp_path: Path) -> None:
    directory, cache = make(tmp_path / "m"), tmp_path / "cache"
    assert digest_of(directory, cache, later_s=0.0) == true_digest(directory)
    assert not cache.exists(), "a change within the same tick of the file system's clock would not show"


def test_weights_that_change_while_they_are_read_are_refused_and_replaced_ones_are_not_mixed_up(tmp_path: Path) -> None:
    directory, cache = make(tmp_path / "m"), tmp_path / "cache"
    old, opened = true_digest(directory), Checkpoint(directory)
    make_random_model(tmp_path / "new", SHAPES["tiny"][0], 2, "float32")
    (tmp_path / "new" / "model.safetensors").replace(directory / "model.safetensors")
    new = digest_of(directory, cache)
    assert cached_weights_digest(opened, cache, time.time() + 60) == old != new == digest_of(directory, cache)
    opened = Checkpoint(directory)
    with (directory / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"abcd")
    with pytest.raises(ConfigError, match="was changed while it was read; start again when it is whole"):
        cached_weights_digest(opened, cache, time.time() + 60)


def test_unloading_and_loading_a_layer_moves_granules_and_restores_every_byte(tmp_path: Path) -> None:
    model = load(make(tmp_path, "bfloat16"), "float32")
    pool = model.layers._spans[0].memory
    before, free = model.layers[1].down.clone(), pool.free
    assert model.unload_layer(1) == model.layers.layer_granules(1) == pool.free - free
    assert model.unload_layer(1) == 0 and not model.layers.is_loaded(1)
    model.load_layer(1)
    model.load_layer(1)
    assert pool.free == free and torch.equal(model.layers[1].down, before)
    pool.validate()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop("model.layers.3.mlp.up_proj.weight"), "no tensor model.layers.3.mlp.up_proj.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"model.norm.weight is torch.float32 \[3\]"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}),
            "model.norm.weight is torch.int32",
        ),
        (
            lambda t: t.update({"model.layers.1.self_attn.q_proj.bias": torch.ones(64)}),
            "has tensor model.layers.1.self_attn.q_proj.bias, which",
        ),
        (
            lambda t: t.update({"model.layers.4.mlp.x": torch.ones(1), "zz": torch.ones(1)}),
            "has tensor model.layers.4.mlp.x and 1 more",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_config_is_refused(damage: Any, message: str, tmp_path: Path) -> None:
    directory = make(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    damage(tensors)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load(directory)


def test_what_old_checkpoints_repeat_or_keep_beside_the_weights_changes_nothing(tmp_path: Path) -> None:
    plain, old = make(tmp_path / "plain"), make(tmp_path / "old")
    tensors = load_file(old / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, old / "model.safetensors")
    a, b = load(plain), load(old)
    assert torch.equal(a.top.head, b.top.head) and torch.equal(a.layers[0].qkv, b.layers[0].qkv)


def sharded(directory: Path) -> dict[str, str]:
    """Spread the model's tensors over three files with an index; returns which file has which."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({n: tensors[n] for n in names if where[n] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return where


def test_a_truncated_missing_or_contradicting_shard_is_refused_by_name(tmp_path: Path) -> None:
    cut = make(tmp_path / "cut")
    sharded(cut)
    second = cut / "model-1.safetensors"
    second.write_bytes(second.read_bytes()[:-100])
    with pytest.raises(
        ConfigError, match=r"model-1\.safetensors is not a readable safetensors file.*download it again"
    ):
        load(cut)
    second.unlink()
    with pytest.raises(
        ConfigError, match=r"model-1\.safetensors does not exist; model\.safetensors\.index\.json names it"
    ):
        load(cut)
    wrong = make(tmp_path / "wrong")
    where = sharded(wrong)
    (wrong / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": where | {"model.layers.9.x": "model-2.safetensors"}})
    )
    with pytest.raises(ConfigError, match=r"model-2\.safetensors has no tensor model\.layers\.9\.x, which"):
        load(wrong)
    twice = make(tmp_path / "twice")
    sharded(twice)
    save_file(load_file(twice / "model-0.safetensors"), twice / "model-2.safetensors")
    with pytest.raises(ConfigError, match=r"model-2\.safetensors has tensor .*, which another file has too"):
        load(twice)


def test_float16_weights_under_a_bfloat16_config_are_served_as_they_are(tmp_path: Path) -> None:
    shape = {"hidden_size": 1024, "num_attention_heads": 64, "intermediate_size": 4096, "vocab_size": 4096}
    directory = make(tmp_path, "float16", **shape)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}))
    down = load_file(directory / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    model = load(directory, mib=256)
    assert model.shape.dtype == "float16" and torch.equal(model.layers[1].down, down)
    asked = load(directory, "bfloat16", mib=256)
    assert asked.shape.dtype == "bfloat16" and torch.equal(asked.layers[1].down, down.bfloat16())


def test_every_end_token_of_the_generation_config_ends_an_answer(tmp_path: Path) -> None:
    directory = make(tmp_path, eos_token_id=[2, 3])
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 128, 130]}))
    assert load(directory).eos_ids == {2, 3, 128, 130}
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, "x"]}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id"):
        load(directory)


def test_only_a_files_own_memory_is_forgotten_and_reading_brings_it_back(tmp_path: Path) -> None:
    checkpoint = Checkpoint(make(tmp_path))
    name = "model.embed_tokens.weight"
    kept, own = checkpoint.tensors[name].clone(), torch.ones(100_000)
    checkpoint.forget(checkpoint.tensors[name])
    checkpoint.forget(own)
    assert torch.equal(checkpoint.tensors[name], kept) and bool(own.all()), (
        "memory that is no mapped file stays as it is"
    )


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("parameters_m", [40, pytest.param(250, marks=pytest.mark.slow)])
def test_loading_needs_no_second_copy_of_the_weights(kernels: str, parameters_m: int, tmp_path: Path) -> None:
    layers = parameters_m // 10
    shape = {
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 2592,
    }
    directory = make(tmp_path, "bfloat16", **shape, num_hidden_layers=layers)
    script = Path(__file__).with_name("peak_of_loading.py")
    done = subprocess.run(
        [sys.executable, str(script), str(directory), kernels], capture_output=True, text=True, check=True, timeout=240
    )
    weights, grew = map(int, done.stdout.split())
    assert weights == Checkpoint(directory).bytes >= 2e6 * parameters_m
    # Above the weights themselves: what one layer takes of the file, whole granules, and the allocator's own.
    assert weights <= grew < weights + (64 << 20), f"{grew >> 20} MiB for {weights >> 20} MiB of weights"


def test_damaged_and_missing_files_are_refused(tmp_path: Path) -> None:
    directory = make(tmp_path)
    whole = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        load(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        load(directory)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(ConfigError, match="must be a file beside the index"):
        load(directory)


def test_too_little_memory_names_the_setting_and_the_need(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv\.hbm_gib: the weights of"):
        load(make(tmp_path), mib=1)


def test_a_device_without_a_pool_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"worker\.device = 'cuda'"):
        load_model(make(tmp_path), host_memory(64 << 20, 64 << 10), "auto", "cuda", 64, None)


# ---- random models
# -----------------------------------------------------------------------------------------------------
def test_the_131m_shape_has_about_131_million_parameters() -> None:
    config, dtype = SHAPES["131m"]
    assert 129e6 < parameters(config) < 133e6 and dtype == "bfloat16"


def test_random_models_repeat_themselves(tmp_path: Path) -> None:
    a, b, other = make(tmp_path / "a"), make(tmp_path / "b"), make(tmp_path / "c", seed=2)
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
    assert (a / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_a_vocabulary_below_the_tokenizers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab_size 100"):
        make(tmp_path, vocab_size=100)
