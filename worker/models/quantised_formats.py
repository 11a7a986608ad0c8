"""The formats of checkpoints in few bits, read as `worker.models.quantised.Module`.

- GPTQ (AutoGPTQ, GPTQModel): qweight int32 `[inputs / n, outputs]`, n codes of neighbouring inputs in each, the first
  in the lowest bits; qzeros int32 `[groups, outputs / n]` likewise, less one in the first version; scales `[groups,
  outputs]`; g_idx `[inputs]`: the group of each input (act-order).
- AWQ (AutoAWQ, gemm): qweight int32 `[inputs, outputs / 8]` and qzeros `[groups, outputs / 8]`, with outputs in the
  order 0, 2, 4, 6, 1, 3, 5, 7; scales `[groups, outputs]`.
- compressed-tensors: weight_packed int32 `[outputs, inputs / n]`, weight_scale `[outputs, groups]`, weight_zero_point
  int32 `[outputs / n, groups]`, weight_g_idx; codes and zeros are stored plus half of their range.
- FP8: weight float8 `[outputs, inputs]`; weight_scale_inv or weight_scale, a factor for each block, output or matrix.

A module whose weight is an ordinary tensor is not quantised.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from contracts.errors import ConfigError
from runtime.elsewhere import VLLM
from runtime.model_quantised import Quantisation
from worker.models.checkpoint import Checkpoint
from worker.models.quantised import Module, QuantisedPart

_SCALES = (torch.float16, torch.bfloat16, torch.float32)
#: Where an AWQ checkpoint has each of eight outputs.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
_BITS = {"int4": 4, "int8": 8, "fp8": 8}
_TOP = ("lm_head.", "embed_tokens.")


def quantised_part(
    checkpoint: Checkpoint, q: Quantisation, field: str, modules: dict[str, int], inputs: int, biased: bool
) -> QuantisedPart | None:
    """The matrix of these modules, which have so many outputs each; None: the checkpoint has them unquantised.

    biased: they have biases; else a bias must be zero, as AutoGPTQ writes it. Raises ConfigError naming the tensor.
    """
    found = [_READERS[q.method](checkpoint, q, name, rows, inputs) for name, rows in modules.items()]
    present = [module for module in found if module is not None]
    if not present:
        return None
    if len(present) < len(found):
        left, other = next(name for name, module in zip(modules, found, strict=True) if module is None), present[0].name
        raise _wrong(checkpoint, f"module {left} is not quantised, but {other} is, with which it is multiplied; {VLLM}")
    for module in present:
        bias = f"{module.name}.bias"
        if not biased and checkpoint.has(bias) and checkpoint.get(bias, [module.rows]).count_nonzero():
            raise _wrong(checkpoint, f"tensor {bias} is not zero, and config.json implies no bias; {VLLM}")
    return QuantisedPart(field, q.code, inputs, present, checkpoint.forget)


def refuse_quantised_top(checkpoint: Checkpoint) -> None:
    """Raises ConfigError when the embedding or the head is quantised."""
    for name, tensor in checkpoint.tensors.items():
        if any(part in name for part in _TOP) and tensor.dtype not in _SCALES:
            raise _wrong(checkpoint, f"tensor {name} is {tensor.dtype}: embedding and lm_head must be floating; {VLLM}")


def _gptq(checkpoint: Checkpoint, q: Quantisation, name: str, rows: int, inputs: int) -> Module | None:
    if not checkpoint.has(f"{name}.qweight"):
        return None
    bits, (group, groups) = _BITS[q.code], _groups(checkpoint, q, name, inputs)
    each = _codes_each(checkpoint, name, bits, rows, inputs)
    codes = checkpoint.get(f"{name}.qweight", [inputs // each, rows], [torch.int32])
    zeros = checkpoint.get(f"{name}.qzeros", [groups, rows // each], [torch.int32])
    scales = checkpoint.get(f"{name}.scales", [groups, rows], _SCALES)
    group_of = _group_of(checkpoint, f"{name}.g_idx", inputs, group, groups)
    mask = (1 << bits) - 1
    return Module(
        name,
        rows,
        lambda: codes.view(torch.uint8).view(-1, rows, 4).transpose(0, 1).reshape(rows, -1),
        lambda: scales.t(),
        lambda: ((_unpacked(zeros, bits) + q.zero_offset) & mask).t(),
        group_of,
        group,
        groups,
        scales.dtype,
        (codes, zeros, scales),
    )


def _awq(checkpoint: Checkpoint, q: Quantisation, name: str, rows: int, inputs: int) -> Module | None:
    if not checkpoint.has(f"{name}.qweight"):
        return None
    group, groups = _groups(checkpoint, q, name, inputs)
    each = _codes_each(checkpoint, name, 4, rows, inputs)
    codes = checkpoint.get(f"{name}.qweight", [inputs, rows // each], [torch.int32])
    zeros = checkpoint.get(f"{name}.qzeros", [groups, rows // each], [torch.int32])
    scales = checkpoint.get(f"{name}.scales", [groups, rows], _SCALES)

    def in_order(packed: torch.Tensor) -> torch.Tensor:
        """`[outputs, ...]`"""
        return _unpacked(packed, 4).view(len(packed), -1, 8)[..., _AWQ_PLACES].flatten(1).t()

    def halves() -> torch.Tensor:
        numbers = in_order(codes)
        return numbers[:, ::2] | numbers[:, 1::2] << 4

    parts = lambda: scales.t(), lambda: in_order(zeros)
    return Module(name, rows, halves, *parts, None, group, groups, scales.dtype, (codes, zeros, scales))


def _compressed(checkpoint: Checkpoint, q: Quantisation, name: str, rows: int, inputs: int) -> Module | None:
    if q.code == "fp8":
        return _fp8(checkpoint, q, name, rows, inputs)
    if not checkpoint.has(f"{name}.weight_packed"):
        return None
    bits, (group, groups) = _BITS[q.code], _groups(checkpoint, q, name, inputs)
    each = _codes_each(checkpoint, name, bits, rows, inputs)
    codes = checkpoint.get(f"{name}.weight_packed", [rows, inputs // each], [torch.int32])
    scales = checkpoint.get(f"{name}.weight_scale", [rows, groups], _SCALES)
    group_of = _group_of(checkpoint, f"{name}.weight_g_idx", inputs, group, groups)
    if checkpoint.has(f"{name}.weight_shape"):
        said = checkpoint.get(f"{name}.weight_shape", [2], [torch.int64, torch.int32]).tolist()
        if said != [rows, inputs]:
            raise _wrong(checkpoint, f"tensor {name}.weight_shape says {said}, config.json implies {[rows, inputs]}")
    zeros: torch.Tensor | None = None
    if checkpoint.has(f"{name}.weight_zero_point"):
        zeros = checkpoint.get(f"{name}.weight_zero_point", [rows // each, groups], [torch.int32])

    def zero_points() -> torch.Tensor:
        if zeros is None:
            return torch.full((rows, groups), 1 << (bits - 1), dtype=torch.uint8)
        return _unpacked(zeros.t().contiguous(), bits).t()

    parts = lambda: codes.view(torch.uint8), lambda: scales, zero_points
    return Module(name, rows, *parts, group_of, group, groups, scales.dtype, (codes, scales))


def _fp8(checkpoint: Checkpoint, q: Quantisation, name: str, rows: int, inputs: int) -> Module | None:
    weight = checkpoint.find(f"{name}.weight")
    if weight is None or weight.dtype in _SCALES:
        return None
    weight = checkpoint.get(f"{name}.weight", [rows, inputs], [torch.float8_e4m3fn])
    key = next((k for k in ("weight_scale_inv", "weight_scale") if checkpoint.has(f"{name}.{k}")), "weight_scale")
    for unused in ("input_scale", "activation_scale"):
        if (scale := checkpoint.find(f"{name}.{unused}")) is not None:
            checkpoint.get(f"{name}.{unused}", scale.shape, _SCALES)
    group, tensor = q.group or inputs, checkpoint.find(f"{name}.{key}")
    groups = -(-inputs // group)
    shapes = [[-(-rows // q.block_rows), groups]] if q.block_rows else [[], [1], [1, 1], [rows], [rows, 1]]
    shape = next((s for s in shapes if tensor is not None and list(tensor.shape) == s), shapes[-1])
    scales = checkpoint.get(f"{name}.{key}", shape, _SCALES)

    def factors() -> torch.Tensor:
        if q.block_rows:
            return scales.repeat_interleave(q.block_rows, 0)[:rows]
        return scales.reshape(-1, 1).expand(rows, 1)

    def codes() -> torch.Tensor:
        numbers = weight.view(torch.uint8)
        if ((numbers & 0x7F) == 0x7F).any():
            raise _wrong(checkpoint, f"tensor {name}.weight has elements that are not numbers; download it again")
        return numbers

    return Module(name, rows, codes, factors, lambda: None, None, group, groups, scales.dtype, (weight, scales))


_READERS: dict[str, Callable[[Checkpoint, Quantisation, str, int, int], Module | None]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
}


def _unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 `[rows, n]` of int32 `[rows, n * bits / 32]`, from the lowest bits on."""
    found = packed.view(torch.uint8)
    return found if bits == 8 else torch.stack((found & 15, found >> 4), -1).flatten(1)


def _groups(checkpoint: Checkpoint, q: Quantisation, name: str, inputs: int) -> tuple[int, int]:
    """Inputs of a group, and the number of groups."""
    group = q.group or inputs
    if inputs % group:
        raise _wrong(
            checkpoint,
            f"quantization_config: group_size = {group} does not divide {name}'s {inputs} inputs; {VLLM}",
        )
    return group, inputs // group


def _codes_each(checkpoint: Checkpoint, name: str, bits: int, rows: int, inputs: int) -> int:
    """Codes in an int32."""
    each = 32 // bits
    if rows % each or inputs % each:
        raise _wrong(checkpoint, f"{name} is {rows} x {inputs}, not multiples of {each}, as its format needs; {VLLM}")
    return each


def _group_of(checkpoint: Checkpoint, name: str, inputs: int, group: int, groups: int) -> torch.Tensor | None:
    """The group of each input; None where they are in order."""
    if not checkpoint.has(name):
        return None
    found = checkpoint.get(name, [inputs], [torch.int32])
    if torch.equal(found, torch.arange(inputs, dtype=torch.int32) // group):
        return None
    if int(found.min()) < 0 or int(found.max()) >= groups:
        raise _wrong(checkpoint, f"tensor {name} must have numbers from 0 to {groups - 1}; download it again")
    return found


def _wrong(checkpoint: Checkpoint, what: str) -> ConfigError:
    return ConfigError(f"{checkpoint.files[0].parent}: {what}")
