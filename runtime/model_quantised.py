"""Weights of few bits, as the `quantization_config` of a config.json describes them: AWQ, GPTQ, compressed-tensors and
FP8. Only weights are taken from it: activations and KV stay in the model's type.

Which modules are quantised is decided by the checkpoint's tensors (`worker.models.quantised_formats`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from runtime.elsewhere import VLLM, server_of_quantisation
from runtime.model_keys import Keys

#: What a code is: an integer of so many bits, from which a zero point is subtracted, or a float8 (e4m3).
Code = Literal["int4", "int8", "fp8"]
_INTEGERS: dict[int, Code] = {4: "int4", 8: "int8"}
#: Keys that list modules which are left as they are.
_LISTS = ("modules_to_not_convert", "ignored_layers", "ignore")


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the weights of a checkpoint are stored.

    method: awq, gptq, compressed-tensors or fp8. group: inputs of an output that share a scale; 0: all. zero_offset: to
    add to stored zero points. block_rows: outputs that share a scale; 0: none or all, as the scale's shape says.
    """

    method: str
    code: Code
    group: int = 0
    zero_offset: int = 0
    block_rows: int = 0


def read_quantisation(get: Keys) -> Quantisation | None:
    """The quantisation of a model; None: it has none. Raises ConfigError for what is not supported, by name."""
    section = get.data.get("quantization_config")
    mlx = bool(get.data.get("quantization"))
    if not section and not mlx:
        return None
    method = section.get("quant_method") if isinstance(section, dict) else None
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None or not isinstance(section, dict):
        who = server_of_quantisation("mlx" if method is None and mlx else method)
        key = "quantization_config" if section else "quantization"
        raise get.wrong(key, f"is not supported; use the unquantised weights, or {who}")
    keys = Keys(section, f"{get.where}: quantization_config")
    for name in _LISTS:
        modules = section.get(name)
        if modules is not None and not (isinstance(modules, list) and all(isinstance(m, str) for m in modules)):
            raise keys.wrong(name, "must be a list of modules' names; download config.json again")
    return reader(keys)


def _awq(get: Keys) -> Quantisation:
    _allow(get, "bits", 4)
    _allow(get, "version", None, "gemm", "GEMM")
    _allow(get, "format", None, "gemm", "GEMM")
    _allow(get, "zero_point", None, True)
    return Quantisation("awq", "int4", _group(get))


def _gptq(get: Keys) -> Quantisation:
    _allow(get, "bits", *_INTEGERS)
    _allow(get, "checkpoint_format", None, "gptq", "gptq_v2")
    _allow(get, "format", None, "gptq", "gptq_v2")
    _allow(get, "is_marlin_format", None, False)
    rules = get.data.get("dynamic") or {}
    if not isinstance(rules, dict) or any(not rule.startswith("-:") for rule in rules):
        raise get.wrong("dynamic", f"is not supported: modules have different bits; {VLLM}")
    # The first version stores zero points less one.
    newer = "gptq_v2" in (get.data.get("checkpoint_format"), get.data.get("format"))
    return Quantisation("gptq", _INTEGERS[get.integer("bits")], _group(get), zero_offset=0 if newer else 1)


def _fp8(get: Keys) -> Quantisation:
    _allow(get, "fmt", None, "e4m3", "float8_e4m3fn")
    _allow(get, "activation_scheme", None, "dynamic", "static")
    return Quantisation("fp8", "fp8", **_block(get, "weight_block_size"))


def _compressed(get: Keys) -> Quantisation:
    groups = get.data.get("config_groups")
    found = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    each = [group.get("weights") for group in found]
    if not each or not all(isinstance(weights, dict) for weights in each):
        raise get.wrong("config_groups", "must describe the weights of each group; download config.json again")
    if any(weights != each[0] for weights in each):
        raise get.wrong("config_groups", f"has groups of different weights, which is not supported; {VLLM}")
    for key in ("kv_cache_scheme", "transform_config"):
        if get.data.get(key):
            raise get.wrong(key, f"is not supported; {VLLM}")
    sparsity = get.data.get("sparsity_config")
    if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format") not in (None, "dense")):
        raise get.wrong("sparsity_config", f"is not supported; {VLLM}")
    weights = Keys(each[0] or {}, f"{get.where}: weights")
    if weights.data.get("type", "int") == "float":
        _allow(get, "format", "float-quantized", "naive-quantized")
        _allow(weights, "num_bits", 8)
        _allow(weights, "strategy", "tensor", "channel", "block")
        if weights.data["strategy"] == "block":
            return Quantisation(get.data["quant_method"], "fp8", **_block(weights, "block_structure"))
        return Quantisation(get.data["quant_method"], "fp8")
    _allow(get, "format", "pack-quantized")
    _allow(weights, "type", None, "int")
    _allow(weights, "num_bits", *_INTEGERS)
    _allow(weights, "strategy", "group", "channel")
    if any(group.get("input_activations") for group in found):
        raise get.wrong("config_groups", f"quantises activations of integer weights, which is not supported; {VLLM}")
    group = _group(weights) if weights.data["strategy"] == "group" else 0
    return Quantisation(get.data["quant_method"], _INTEGERS[weights.integer("num_bits")], group)


_READERS = {"awq": _awq, "gptq": _gptq, "fp8": _fp8, "compressed-tensors": _compressed}


def _allow(get: Keys, key: str, *values: object) -> None:
    """Raises ConfigError unless the key has one of these values, None standing for a missing one."""
    value = get.data.get(key)
    if not any(type(value) is type(other) and value == other for other in values):
        said = ", ".join(str(other) for other in values if other is not None)
        raise get.wrong(key, f"is not supported; supported: {said}; or {VLLM}")


def _group(get: Keys) -> int:
    """Inputs of a group; 0: all."""
    size = get.data.get("group_size", 128)
    if size == -1 and not isinstance(size, bool):
        return 0
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0 or size % 8:
        raise get.wrong("group_size", f"must be -1 or a multiple of 8; or {VLLM}")
    return size


def _block(get: Keys, key: str) -> dict[str, Any]:
    """`group` and `block_rows` of blocks `[outputs, inputs]` that share a scale."""
    block = get.data.get(key)
    if block is None:
        return {}
    sizes = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if not sizes or block[1] % 8:
        raise get.wrong(key, f"must be two positive numbers, the second a multiple of 8; or {VLLM}")
    return {"block_rows": block[0], "group": block[1]}
