"""A merged model computes like base and adapter together, and shares its KV with nobody."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import transformers

from contracts.errors import ConfigError
from contracts.kv import fingerprint
from runtime.model_config import adapter_digest, load_config
from tests.worker.harvest.bench import FAMILIES, SETTINGS, StoppingGate, make_model, random_adapter
from worker.harvest.adapter import Adapter
from worker.harvest.checkpoints import write_adapter
from worker.harvest.gate import Stopped
from worker.harvest.merge import merge
from worker.memory.device_memory import host_memory
from worker.models.checkpoint import Checkpoint
from worker.models.digest import cached_weights_digest, model_digest
from worker.models.load import load_model

TOKENS = torch.arange(40)[None] % 101


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def with_adapter(directory: Path, adapter: Adapter, name: str = "adapter") -> Path:
    write_adapter(directory / name, adapter, SETTINGS, "base")
    return directory / name


def served_fingerprint(directory: Path) -> bytes:
    return load_model(directory, host_memory(256 * 65536, 65536), "auto", "cpu", 16, None).shape.fingerprint


@pytest.mark.parametrize("family", FAMILIES)
def test_the_merged_model_s_logits_are_those_of_peft(family: str, tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", family)
    before = logits(base)
    adapter = with_adapter(tmp_path, random_adapter(load_config(tmp_path / "base")))
    merge(tmp_path / "base", adapter, tmp_path / "merged")
    merged = logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    theirs = logits(peft.PeftModel.from_pretrained(base, adapter).eval())
    torch.testing.assert_close(merged, theirs, atol=1e-4, rtol=1e-4)
    assert (merged - before).abs().max() > 0.1


def test_weights_keep_the_base_s_type_shards_and_names(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", "qwen3", torch.bfloat16)
    base.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    (tmp_path / "sharded" / "tokenizer.json").write_text("{}")
    adapter = with_adapter(tmp_path, random_adapter(load_config(tmp_path / "base")))
    merge(tmp_path / "sharded", adapter, tmp_path / "merged")
    ours, theirs = Checkpoint(tmp_path / "merged"), Checkpoint(tmp_path / "sharded")
    assert len(ours.files) > 2 and [f.name for f in ours.files] == [f.name for f in theirs.files]
    assert (tmp_path / "merged" / "tokenizer.json").read_text() == "{}"
    merge(tmp_path / "base", adapter, tmp_path / "in one file")
    whole = Checkpoint(tmp_path / "in one file").tensors
    same = {name for name, tensor in ours.tensors.items() if torch.equal(tensor, theirs.tensors[name])}
    assert len(ours.tensors) - len(same) == 3 * 7, "the projections of every layer changed"
    for name, tensor in ours.tensors.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, whole[name])


def test_models_of_one_base_share_no_kv(tmp_path: Path) -> None:
    make_model(tmp_path / "base")
    config = load_config(tmp_path / "base")
    adapters = {"zero": Adapter(config, SETTINGS), "zero-again": Adapter(config, replace(SETTINGS, seed=1))}
    adapters |= {str(seed): random_adapter(config, seed=seed) for seed in (1, 2)}
    found = {"base": served_fingerprint(tmp_path / "base")}
    for name, adapter in adapters.items():
        digest = merge(tmp_path / "base", with_adapter(tmp_path, adapter, name), tmp_path / f"merged-{name}")
        assert adapter_digest(tmp_path / f"merged-{name}").hex() == digest
        found[name] = served_fingerprint(tmp_path / f"merged-{name}")
    assert len(set(found.values())) == len(found)
    # A B of zeros changes no weight: only the adapter's digest tells them apart.
    weights = {name: cached_weights_digest(Checkpoint(tmp_path / name), None) for name in ("base", "merged-zero")}
    assert weights["base"] == weights["merged-zero"]


def test_without_an_adapter_the_fingerprint_is_what_it_was(tmp_path: Path) -> None:
    make_model(tmp_path)
    digest = model_digest(cached_weights_digest(Checkpoint(tmp_path), None), load_config(tmp_path))
    assert served_fingerprint(tmp_path) == fingerprint(digest, dtype="float32", chunk_tokens=16)


def test_the_same_merge_gives_the_same_fingerprint(tmp_path: Path) -> None:
    make_model(tmp_path / "base")
    adapter = with_adapter(tmp_path, random_adapter(load_config(tmp_path / "base")))
    first = merge(tmp_path / "base", adapter, tmp_path / "merged")
    print_first = served_fingerprint(tmp_path / "merged")
    assert merge(tmp_path / "base", adapter, tmp_path / "merged") == first, "and replaces what was there"
    assert served_fingerprint(tmp_path / "merged") == print_first


def test_a_digest_that_is_none_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    for value in ("", "ab", "G" * 64, 5, ["a"]):
        (tmp_path / "config.json").write_text(json.dumps(said | {"upbeat_adapter": value}))
        with pytest.raises(ConfigError, match=r"upbeat_adapter = .* must be 64 hexadecimal digits; merge"):
            adapter_digest(tmp_path)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "base")
    make_model(tmp_path / "other", "qwen3")
    adapter = with_adapter(tmp_path, random_adapter(load_config(tmp_path / "base")))
    with pytest.raises(ConfigError, match="layer 0's q is not of"):
        merge(tmp_path / "other", adapter, tmp_path / "merged")
    (adapter / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="holds no adapter of"):
        merge(tmp_path / "base", adapter, tmp_path / "merged")
    with pytest.raises(ConfigError, match=r"adapter_config.json does not exist"):
        merge(tmp_path / "base", tmp_path, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_merge_that_is_stopped_leaves_nothing_and_no_directory_of_others_is_replaced(tmp_path: Path) -> None:
    make_model(tmp_path / "base")
    adapter = with_adapter(tmp_path, random_adapter(load_config(tmp_path / "base")))
    with pytest.raises(Stopped):
        merge(tmp_path / "base", adapter, tmp_path / "merged", StoppingGate(9))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
    with pytest.raises(ConfigError, match="base is no merged model, and would be overwritten"):
        merge(tmp_path / "base", adapter, tmp_path / "base")
