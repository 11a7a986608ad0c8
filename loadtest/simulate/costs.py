"""What a node costs: seconds of a step by what is in it, and how fast KV comes to it from each place.

Two kinds: a roofline of a device and a model's shape with the efficiencies of published measurements (`loadtest.simulate.presets`), and a
profile of this machine (`contracts.profile`, made by `upbeat profile`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from contracts.kv import KvShape
from contracts.profile import Profile
from worker.core.pace import Pace

#: Decoding is stepped over as if its cost grew evenly with the context over so many tokens a sequence.
_SLOPE_TOKENS = 64.0


class Costs(Protocol):
    """Seconds of a node's steps."""

    def decode(self, batch: int, context_tokens: float) -> tuple[float, float]:
        """One token each of `batch` sequences, `context_tokens` together: seconds, and seconds a context token."""
        ...

    def mixed_s(self, batch: int, context_tokens: float, prefills: Iterable[tuple[int, int]]) -> float:
        """A step that also computes (tokens, tokens before them) of prompts."""
        ...

    def prefill_s(self, tokens: int, context_tokens: int) -> float:
        """All of a prompt's tokens after a context, alone on the device."""
        ...


@dataclass(frozen=True, slots=True)
class Device:
    """A device. flops: a second, dense, in the model's type. mfu, mbu: what is reached of these and of the memory's bytes a second."""

    name: str
    flops: float
    memory_bytes_per_s: float
    memory_bytes: float
    mfu: float
    mbu: float
    overhead_s: float


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's shape. heads: of queries; type_bytes: of weights and KV."""

    name: str
    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    type_bytes: int = 2

    @property
    def token_bytes(self) -> int:
        """KV of a token, all layers."""
        return self.layers * self.kv_heads * 2 * self.head_dim * self.type_bytes

    @property
    def weight_bytes(self) -> float:
        """All weights."""
        return self.parameters * self.type_bytes

    def kv_shape(self, chunk_tokens: int = 64) -> KvShape:
        """As the services call it."""
        fingerprint = self.name.encode().ljust(32, b"\0")[:32]
        return KvShape.of_heads(fingerprint, self.layers, self.kv_heads, self.head_dim, chunk_tokens, "bfloat16")


class Roofline:
    """A step reads all weights and the KV of its context, or computes its tokens, whichever takes longer; plus a fixed time."""

    def __init__(self, device: Device, model: ModelShape) -> None:
        rate, flops = device.memory_bytes_per_s * device.mbu, device.flops * device.mfu
        self._fixed_s, self._weights_s = device.overhead_s, model.weight_bytes / rate
        self._read_s = model.token_bytes / rate
        self._token_s = 2.0 * model.parameters / flops
        #: Of a token's attention to one token before it: two products over all heads.
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
    """A machine's profile. A mixed step takes as long as its two parts."""

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
    """Tell a worker how fast it is before anything ran, as `upbeat profile` does: with requests of 256 and 128 tokens."""
    pace.prefill_token_s = costs.prefill_s(512, 0) / 512
    pace.expect_decodes({batch: costs.decode(batch, 1024.0 * batch)[0] for batch in (1, 8)})
    pace.request_s = costs.prefill_s(256, 0) + 128 * pace.marginal_token_s
    pace.output_tokens = 128.0


class Slowed:
    """Another's steps as a whole stack makes them: each takes `step_s` longer and `token_s` for every sequence that has a token from it,
    as what carries tokens to people has the same cores; and prompts take `prefill_times` as long."""

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
    """All that makes up a node. Capacities of KV in bytes; rates in bytes a second, `dram` is that of the way from DRAM to HBM.

    step_tokens, mixed_step_s, max_batch: as `worker` is configured. request_s: from a client to the engine, and from the engine's
    first token back to the client, together.
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
    #: Of the model, where `shape` has fewer (`turns.coarse`); 0: as many as the shape.
    layers_modelled: int = 0
