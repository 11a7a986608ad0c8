"""Makes small checkpoints in the layouts of AutoGPTQ, AutoAWQ, compressed-tensors and FP8, and reads them back by an
implementation of its own, an element at a time, so that a transformers model with the same numbers is the reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Format:
    """config: quantization_config. encode: a weight `[outputs, inputs]` as a module's tensors; decode: the weight that
    they are, by `config`."""

    config: dict[str, Any]
    encode: Callable[[np.ndarray, dict[str, Any]], Tensors]
    decode: Callable[[Tensors, dict[str, Any]], np.ndarray]


def rounded(w: np.ndarray, bits: int, group_of: np.ndarray, symmetric: bool) -> tuple[np.ndarray, ...]:
    """Codes `[outputs, inputs]`, zeros and float16 scales `[outputs, groups]` of round-to-nearest."""
    most, groups = 2**bits - 1, int(group_of.max()) + 1
    codes = np.zeros(w.shape, np.int64)
    zeros, scales = np.zeros((len(w), groups), np.int64), np.zeros((len(w), groups), np.float16)
    for g in range(groups):
        part = w[:, group_of == g]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            high = np.maximum(high, -low)
            low = -high
        scale = ((high - low) / most).astype(np.float16)
        zero = np.full(len(w), 2 ** (bits - 1)) if symmetric else np.rint(-low / scale)
        zeros[:, g], scales[:, g] = np.clip(zero, 0, most), scale
        codes[:, group_of == g] = np.clip(np.rint(part / scale[:, None]) + zeros[:, g, None], 0, most)
    return codes, zeros, scales


def packed(values: np.ndarray, bits: int, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """int32 `[rows, n * bits / 32]` of `values [rows, n]`: of few neighbours, number order[i] is in the bits from
    i * `bits` on."""
    each = 32 // bits
    made = np.zeros((len(values), values.shape[1] // each), np.uint32)
    for column in range(made.shape[1]):
        for i in range(each):
            made[:, column] |= (values[:, column * each + order[i]].astype(np.uint32)) << np.uint32(i * bits)
    return made.view(np.int32)


def at(words: np.ndarray, index: int, bits: int, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Of each row of `words`, the value number `index`."""
    each = 32 // bits
    place = order.index(index % each)
    return (words[:, index // each].view(np.uint32) >> np.uint32(place * bits)) & np.uint32(2**bits - 1)


def torched(**tensors: np.ndarray) -> Tensors:
    return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in tensors.items()}


def in_order(inputs: int, group: int) -> np.ndarray:
    return np.arange(inputs, dtype=np.int32) // (group if group > 0 else inputs)


def gptq(w: np.ndarray, c: dict[str, Any]) -> Tensors:
    bits, group_of = c["bits"], in_order(w.shape[1], c["group_size"])
    if c["desc_act"]:
        group_of = np.random.default_rng(w.shape[1]).permutation(group_of)
    codes, zeros, scales = rounded(w, bits, group_of, c["sym"])
    if c.get("checkpoint_format") != "gptq_v2":
        zeros = (zeros - 1) & (2**bits - 1)
    words = torched(qweight=packed_rows(codes.T, bits))
    words |= torched(qzeros=packed(zeros.T, bits), scales=scales.T, g_idx=group_of.astype(np.int32))
    return words | ({"bias": torch.zeros(len(w), dtype=torch.float16)} if not c["desc_act"] else {})


def packed_rows(values: np.ndarray, bits: int) -> np.ndarray:
    return packed(values.T, bits).T


def gptq_weight(t: Tensors, c: dict[str, Any]) -> np.ndarray:
    words, zeros, scales, group_of = (t[name].numpy() for name in ("qweight", "qzeros", "scales", "g_idx"))
    offset = 0 if c.get("checkpoint_format") == "gptq_v2" else 1
    made = np.zeros((words.shape[1], len(group_of)), np.float32)
    for i, g in enumerate(group_of):
        codes = at(np.ascontiguousarray(words.T), i, c["bits"]).astype(np.int64)
        for o in range(len(made)):
            zero = (int(at(zeros[g : g + 1], o, c["bits"])[0]) + offset) % 2 ** c["bits"]
            made[o, i] = (int(codes[o]) - zero) * np.float32(scales[g, o])
    return made


def awq(w: np.ndarray, c: dict[str, Any]) -> Tensors:
    codes, zeros, scales = rounded(w, 4, in_order(w.shape[1], c["group_size"]), symmetric=False)
    return torched(qweight=packed(codes.T, 4, AWQ_ORDER), qzeros=packed(zeros.T, 4, AWQ_ORDER), scales=scales.T)


def awq_weight(t: Tensors, c: dict[str, Any]) -> np.ndarray:
    words, zeros, scales = (t[name].numpy() for name in ("qweight", "qzeros", "scales"))
    group_of = in_order(len(words), c["group_size"])
    made = np.zeros((scales.shape[1], len(words)), np.float32)
    for o in range(len(made)):
        codes, zero = (at(part, o, 4, AWQ_ORDER).astype(np.int64) for part in (words, zeros))
        made[o] = (codes - zero[group_of]) * scales[:, o].astype(np.float32)[group_of]
    return made


def compressed(w: np.ndarray, c: dict[str, Any]) -> Tensors:
    weights = c["config_groups"]["group_0"]["weights"]
    group_of = in_order(w.shape[1], weights.get("group_size") or -1)
    if weights.get("actorder") == "group":
        group_of = np.random.default_rng(w.shape[1]).permutation(group_of)
    codes, zeros, scales = rounded(w, weights["num_bits"], group_of, weights["symmetric"])
    found = torched(weight_packed=packed(codes, weights["num_bits"]), weight_shape=np.array(w.shape, np.int64))
    found |= {"weight_scale": torch.from_numpy(scales).bfloat16()}
    if not weights["symmetric"]:
        found |= torched(weight_zero_point=packed_rows(zeros, weights["num_bits"]))
    return found | (torched(weight_g_idx=group_of.astype(np.int32)) if weights.get("actorder") == "group" else {})


def compressed_weight(t: Tensors, c: dict[str, Any]) -> np.ndarray:
    weights = c["config_groups"]["group_0"]["weights"]
    (rows, inputs), bits = t["weight_shape"].tolist(), weights["num_bits"]
    group_of = t["weight_g_idx"].numpy() if "weight_g_idx" in t else in_order(inputs, weights.get("group_size") or -1)
    scales = t["weight_scale"].float().numpy()
    zeros = np.full(scales.shape, 2 ** (bits - 1), np.int64)
    if "weight_zero_point" in t:
        words = np.ascontiguousarray(t["weight_zero_point"].numpy().T)
        zeros = np.stack([at(words, o, bits) for o in range(rows)]).astype(np.int64)
    codes = np.stack([at(t["weight_packed"].numpy(), i, bits) for i in range(inputs)], axis=1).astype(np.int64)
    return (codes - zeros[:, group_of]).astype(np.float32) * scales[:, group_of]


def fp8(w: np.ndarray, c: dict[str, Any]) -> Tensors:
    block = c.get("weight_block_size") or [len(w), w.shape[1]]
    if c["quant_method"] == "compressed-tensors":
        block = [1, w.shape[1]]
    counts = [-(-n // size) for n, size in zip(w.shape, block, strict=True)]
    scales, made = np.zeros(counts, np.float32), np.zeros(w.shape, np.float32)
    for i in range(counts[0]):
        for j in range(counts[1]):
            part = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scales[i, j] = np.abs(w[part]).max() / 448
            made[part] = w[part] / scales[i, j]
    found: Tensors = {"weight": torch.from_numpy(made).to(torch.float8_e4m3fn)}
    if c.get("weight_block_size"):
        return found | {"weight_scale_inv": torch.from_numpy(scales)}
    shape = [len(w), 1] if c["quant_method"] == "compressed-tensors" else []
    extra = {"input_scale": torch.tensor(0.5)} if c.get("activation_scheme") == "static" else {}
    return found | {"weight_scale": torch.from_numpy(scales).reshape(shape)} | extra


def fp8_weight(t: Tensors, c: dict[str, Any]) -> np.ndarray:
    codes = t["weight"].view(torch.uint8).numpy().astype(np.int64)
    scales = (t.get("weight_scale_inv") if "weight_scale_inv" in t else t["weight_scale"]).numpy()
    block = c.get("weight_block_size") or ([1, codes.shape[1]] if scales.size > 1 else list(codes.shape))
    scales = scales.reshape([-(-n // size) for n, size in zip(codes.shape, block, strict=True)])
    made = np.zeros(codes.shape, np.float32)
    for o in range(len(made)):
        for i in range(codes.shape[1]):
            sign, exponent, fraction = codes[o, i] >> 7, codes[o, i] >> 3 & 15, codes[o, i] & 7
            size = (1 + fraction / 8) * 2.0 ** (exponent - 7) if exponent else fraction / 8 * 2.0**-6
            made[o, i] = (-size if sign else size) * scales[o // block[0], i // block[1]]
    return made


def _gptq(**more: Any) -> Format:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False} | more
    return Format(config, gptq, gptq_weight)


def _compressed(**weights: Any) -> Format:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32} | weights
    group = {"weights": weights, "input_activations": None, "targets": ["Linear"]}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    return Format(config | {"ignore": ["lm_head"]}, compressed, compressed_weight)


FP8_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
FORMATS = {
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, awq, awq_weight
    ),
    "gptq-4": _gptq(sym=True),
    "gptq-4-act-order": _gptq(desc_act=True),
    "gptq-4-column": _gptq(group_size=-1),
    "gptq-4-v2": _gptq(checkpoint_format="gptq_v2"),
    "gptq-8": _gptq(bits=8, sym=True),
    "gptq-8-act-order": _gptq(bits=8, desc_act=True, group_size=16),
    "packed-4": _compressed(),
    "packed-4-zeros": _compressed(symmetric=False, actorder="group"),
    "packed-8": _compressed(num_bits=8, strategy="channel", group_size=None),
    "fp8-blocks": Format(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 64]},
        fp8,
        fp8_weight,
    ),
    "fp8-tensor": Format({"quant_method": "fp8", "activation_scheme": "static"}, fp8, fp8_weight),
    "fp8-channel": Format(
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {"weights": FP8_WEIGHTS, "input_activations": {"num_bits": 8, "type": "float"}}
            },
        },
        fp8,
        fp8_weight,
    ),
}


def quantise(directory: Path, name: str, model: torch.nn.Module, left: tuple[str, ...] = ()) -> None:
    """Quantises the checkpoint in `directory`, whose model is `model`, which gets the quantised numbers. left: parts of
    names of modules that stay as they are."""
    form, file = FORMATS[name], directory / "model.safetensors"
    tensors = load_file(file)
    for key in [key for key in tensors if key.endswith("_proj.weight") and not any(part in key for part in left)]:
        module = key.removesuffix(".weight")
        made = form.encode(tensors.pop(key).float().numpy(), form.config)
        if f"{module}.bias" in tensors:
            made.pop("bias", None)
        with torch.no_grad():
            weight = model.get_submodule(module).weight
            weight.copy_(torch.from_numpy(form.decode(made, form.config)).to(weight.dtype))
        tensors |= {f"{module}.{part}": value.contiguous() for part, value in made.items()}
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config |= {"quantization_config": form.config}
    (directory / "config.json").write_text(json.dumps(config))
