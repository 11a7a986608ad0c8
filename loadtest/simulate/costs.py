"""Durations of a node's steps, and its capacities and transfer rates.

Two kinds: a roofline of a device and a model's shape, with efficiencies fitted to published measurements
(`loadtest.simulate.presets`); and a machine's profile (`contracts.latency_profile`, from `upbeat profile`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from contracts.kv import KvShape
from contracts.latency_profile import Profile
from worker.core.pace import Pace

#: Context tokens a sequence over which a profile's decode slope is taken.
_SLOPE_TOKENS = 64.0


class Costs(Protocol):
    """Seconds of a node's steps."""

    def decode(self, batch: int, context_tokens: float) -> tuple[float, float]:
        """A step of one token for each of `batch` sequences, `context_tokens` in all: (seconds, seconds a context
        token)."""
        ...

    def mixed_s(self, batch: int, context_tokens: float, prefills: Iterable[tuple[int, int]]) -> float:
        """Seconds of a step that also computes `prefills`: (tokens, tokens before them)."""
        ...

    def prefill_s(self, tokens: int, context_tokens: int) -> float:
        """Seconds to compute `tokens` of a prompt after `context_tokens`, alone on the device."""
        ...


@dataclass(frozen=True, slots=True)
class Device:
    """A device. flops: peak per second, dense, in the model's type. mfu, mbu: shares reached of peak flops and memory
    bandwidth."""

    name: str
    flops: float
    memory_bytes_per_s: float
    memory_bytes: float
    mfu: float
    mbu: float
    overhead_s: float


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's shape. heads: query heads; type_bytes: of a value of weights and KV."""

    name: str
    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    type_bytes: int = 2

    @property
    def token_bytes(self) -> int:
        """KV bytes of a token in all layers."""
        return self.layers * self.kv_heads * 2 * self.head_dim * self.type_bytes

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.parameters * self.type_bytes

    def kv_shape(self, chunk_tokens: int = 64) -> KvShape:
        """The shape as services describe it."""
        fingerprint = self.name.encode().ljust(32, b"\0")[:32]
        return KvShape.of_heads(fingerprint, self.layers, self.kv_heads, self.head_dim, chunk_tokens, "bfloat16")


class Roofline:
    """A step takes a fixed time, plus the longer of reading all weights and computing its tokens, plus
    reading its KV."""

    def __init__(self, device: Device, model: ModelShape) -> None:
        rate, flops = device.memory_bytes_per_s * device.mbu, device.flops * device.mfu
        self._fixed_s, self._weights_s = device.overhead_s, model.weight_bytes / rate
        self._read_s = model.token_bytes / rate
        self._token_s = 2.0 * model.parameters / flops
        #: A token's attention to one earlier token: two products over all heads.
        self._attend_s = 4.0 * model.layers * model.heads * model.head_dim / flops

    def decode(self, batch: int, context_tokens: float) -> tuple[float, float]:
        """See Costs."""
        return self._fixed_s + max(self._weights_s, batch * self._token_s) + context_tokens * self._read_s, self._read_s

    def mixed_s(self, batch: int, context_tokens: float, prefills: Iterable[tuple[int, int]]) -> float:
        """See Costs."""
        tokens, attended, read = float(batch), 0.0, context_tokens
        for count, before in prefills:
            tokens += count
            attended += count * (before + count / 2)
            read += before
        compute_s = tokens * self._token_s + attended * self._attend_s
        return self._fixed_s + max(self._weights_s, compute_s) + read * self._read_s

    def prefill_s(self, tokens: int, context_tokens: int) -> float:
        """See Costs."""
        return self.mixed_s(0, 0.0, [(tokens, context_tokens)]) if tokens > 0 else 0.0


class Measured:
    """A machine's profile. A mixed step takes the sum of its two parts."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def decode(self, batch: int, context_tokens: float) -> tuple[float, float]:
        """See Costs."""
        each = context_tokens / batch
        seconds = self._profile.decode_s(batch, each)
        return seconds, (self._profile.decode_s(batch, each + _SLOPE_TOKENS) - seconds) / (_SLOPE_TOKENS * batch)

    def mixed_s(self, batch: int, context_tokens: float, prefills: Iterable[tuple[int, int]]) -> float:
        """See Costs."""
        decode_s = self._profile.decode_s(batch, context_tokens / batch) if batch else 0.0
        return decode_s + sum(self._profile.prefill_s(count, before) for count, before in prefills)

    def prefill_s(self, tokens: int, context_tokens: int) -> float:
        """See Costs."""
        return self._profile.prefill_s(tokens, context_tokens)


def seed(pace: Pace, costs: Costs) -> None:
    """Seed a worker's pace, as a profile does, assuming requests of 256 prompt and 128 answer tokens."""
    pace.prefill_token_s = costs.prefill_s(512, 0) / 512
    pace.expect_decodes({batch: costs.decode(batch, 1024.0 * batch)[0] for batch in (1, 8)})
    pace.request_s = costs.prefill_s(256, 0) + 128 * pace.marginal_token_s
    pace.output_tokens = 128.0


class Slowed:
    """Adds a whole stack's overhead to `inner`: `step_s` a step, `token_s` a sequence that gets a token (streaming uses
    the same cores), and a factor `prefill_times` on prompts."""

    def __init__(self, inner: Costs, step_s: float, token_s: float, prefill_times: float) -> None:
        self._inner, self._step_s, self._token_s, self._times = inner, step_s, token_s, prefill_times

    def decode(self, batch: int, context_tokens: float) -> tuple[float, float]:
        """See Costs."""
        seconds, slope_s = self._inner.decode(batch, context_tokens)
        return seconds + self._step_s + batch * self._token_s, slope_s

    def mixed_s(self, batch: int, context_tokens: float, prefills: Iterable[tuple[int, int]]) -> float:
        """See Costs."""
        decode_s = self._inner.decode(batch, context_tokens)[0] if batch else 0.0
        both_s = self._inner.mixed_s(batch, context_tokens, prefills)
        return self._step_s + batch * self._token_s + decode_s + max(both_s - decode_s, 0.0) * self._times

    def prefill_s(self, tokens: int, context_tokens: int) -> float:
        """See Costs."""
        return self._inner.prefill_s(tokens, context_tokens) * self._times


@dataclass(frozen=True, slots=True)
class NodeKind:
    """A kind of node. Capacities for KV in bytes; dram_bytes_per_s: from DRAM to HBM.

    step_tokens, mixed_step_s, max_batch: as in the configuration of `worker`. request_s: from client to engine plus
    from the first token back to the client.
    """

    name: str
    model: str
    shape: KvShape
    costs: Costs
    hbm_bytes: float
    dram_bytes: float
    ssd_bytes: float
    dram_bytes_per_s: float
    ssd_bytes_per_s: float
    link_bytes_per_s: float
    blob_bytes_per_s: float
    step_tokens: int = 1024
    mixed_step_s: float = 0.1
    max_batch: int = 64
    max_tokens: int = 131_072
    request_s: float = 0.0
    #: Layers of the model, if `shape` has fewer (`turns.coarse`); 0: as many as the shape.
    layers_modelled: int = 0
