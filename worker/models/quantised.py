"""A layer's matrix in few bits: codes, and what makes numbers of them. All formats of checkpoints become this one.

A weight is `(code - zero) * scale` in float32, for float8 codes `code * scale`. The inputs of an output are in groups
that share zero and scale. In memory there are only codes, zeros and scales; products make numbers when they use them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from contracts.errors import ConfigError
from runtime.elsewhere import VLLM
from runtime.model_quantised import Code
from worker.memory.tensors import tensor_at

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """A matrix `[outputs, inputs]`: views into a layer's span.

    codes: uint8 `[outputs, inputs]`; int4: `[outputs, inputs / 2]`, a byte's lower half is the even input.
    scales: `[outputs, groups]`. zeros: uint8 `[outputs, groups]`; None: float8. group_of: int32 `[inputs]`, the group
    of each input; None: the group of input i is i // group. Kernels lay out codes, scales and zeros in their own way.
    """

    code: Code
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_of: torch.Tensor | None
    inputs: int
    group: int

    def data_ptr(self) -> int:
        """The address of the first of its bytes."""
        return self.codes.data_ptr()

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix in `dtype`, anew."""
        groups = torch.arange(self.inputs, device=self.codes.device) // self.group
        groups = groups if self.group_of is None else self.group_of.long()
        if self.code == "fp8":
            numbers = self.codes.view(torch.float8_e4m3fn).float()
        elif self.code == "int8":
            numbers = self.codes.float()
        else:
            numbers = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1).float()
        if self.zeros is not None:
            numbers -= self.zeros[:, groups]
        return (numbers * self.scales.float()[:, groups]).to(dtype)


#: A layer's matrix, in the model's type or in few bits.
Matrix = torch.Tensor | QuantisedMatrix


def linear(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """`x [rows, inputs]` times `weight [outputs, inputs]` transposed, plus `bias`."""
    plain = weight.dequantised(x.dtype) if isinstance(weight, QuantisedMatrix) else weight
    return F.linear(x, plain, bias)


def plain(matrix: Matrix) -> torch.Tensor:
    """A matrix of a model that is not quantised. Raises TypeError."""
    if isinstance(matrix, QuantisedMatrix):
        raise TypeError("the matrix is quantised")
    return matrix


@dataclass(frozen=True, slots=True)
class Module:
    """One module's weights in a checkpoint, `[rows, inputs]`.

    codes, scales, zeros: make them as `QuantisedMatrix` has them, on the host, from the file's tensors; zeros makes
    None for float8. groups: of an output. tensors: of the file, to forget after use.
    """

    name: str
    rows: int
    codes: Callable[[], torch.Tensor]
    scales: Callable[[], torch.Tensor]
    zeros: Callable[[], torch.Tensor | None]
    group_of: torch.Tensor | None
    group: int
    groups: int
    scale_type: torch.dtype
    tensors: Sequence[torch.Tensor]


class QuantisedPart:
    """One matrix of a span, made of the stacked rows of `modules`; see `worker.models.weights.Layout`."""

    def __init__(
        self,
        field: str,
        code: Code,
        inputs: int,
        modules: Sequence[Module],
        forget: Callable[[torch.Tensor], object],
    ) -> None:
        """Raises ConfigError when the modules, which are one product, have different groups."""
        self.field, self._code, self._inputs, self._modules, self._forget = field, code, inputs, modules, forget
        first, rows = modules[0], sum(module.rows for module in modules)
        for other in modules[1:]:
            same = (other.group, other.groups, other.scale_type) == (first.group, first.groups, first.scale_type)
            if not same or not _equal(first.group_of, other.group_of):
                raise ConfigError(
                    f"{other.name} has other groups of inputs, or another type of scales, than {first.name}, with "
                    f"which it is multiplied; {VLLM}"
                )
        width = inputs // 2 if code == "int4" else inputs
        self._group, self._scattered = first.group, first.group_of is not None
        self._tensors: dict[str, tuple[torch.dtype, list[int]]] = {"codes": (torch.uint8, [rows, width])}
        self._tensors["scales"] = first.scale_type, [rows, first.groups]
        if code != "fp8":
            self._tensors["zeros"] = torch.uint8, [rows, first.groups]
        if self._scattered:
            self._tensors["group_of"] = torch.int32, [inputs]

    def bytes(self, dtype: torch.dtype) -> int:
        """Of its tensors."""
        return sum(_aligned(math.prod(shape) * kind.itemsize) for kind, shape in self._tensors.values())

    def view_at(self, address: int, dtype: torch.dtype, device: torch.device) -> QuantisedMatrix:
        """The matrix, where its bytes lie at this address."""
        views = dict[str, torch.Tensor]()
        for name, (kind, shape) in self._tensors.items():
            views[name] = tensor_at(address, kind, shape, device)
            address += _aligned(math.prod(shape) * kind.itemsize)
        zeros, group_of = views.get("zeros"), views.get("group_of")
        return QuantisedMatrix(self._code, views["codes"], views["scales"], zeros, group_of, self._inputs, self._group)

    def pack_into(
        self, view: QuantisedMatrix, pack: Callable[[str, Sequence[torch.Tensor], torch.Tensor], bool] | None
    ) -> None:
        """Writes the matrix from the checkpoint into `view`. Raises ConfigError for numbers that are none."""
        for name in ("codes", "scales", "zeros"):
            place: torch.Tensor | None = getattr(view, name)
            if place is None:
                continue
            sources = [getattr(module, name)() for module in self._modules]
            if pack is None or not pack(f"{self.field}.{name}", sources, place):
                place.copy_(torch.cat(sources))
        if view.group_of is not None and self._modules[0].group_of is not None:
            view.group_of.copy_(self._modules[0].group_of)
        for module in self._modules:
            for tensor in module.tensors:
                self._forget(tensor)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)
