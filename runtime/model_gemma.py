"""What Gemma 3's text models compute otherwise than the Llama family, as a config.json describes it.

Norms multiply by 1 + weight, and also follow attention and MLP; embeddings are multiplied by the root of the hidden
size; the gate is GELU; and most layers have a window, with a rotary embedding of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.elsewhere import VLLM
from runtime.model_keys import Keys
from runtime.model_rope import Rope, read_rope

_GELU = "gelu_pytorch_tanh"
#: Keys that must be absent, null or false.
_UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Gemma:
    """local_rope: the rotary embedding of layers with a window. query_scalar: attention's scores are divided by its
    root, instead of head_dim's."""

    local_rope: Rope
    query_scalar: float


def read_gemma(get: Keys) -> tuple[Gemma, Rope]:
    """Of a Gemma 3 text model; and the rotary embedding of layers without a window. Raises ConfigError."""
    activation = get.data.get("hidden_activation") or get.data.get("hidden_act") or _GELU
    if activation != _GELU:
        raise get.wrong("hidden_activation", f"is not supported; supported: {_GELU}; or {VLLM}")
    for key in _UNSUPPORTED:
        if get.data.get(key):
            raise get.wrong(key, f"is not supported; {VLLM}")
    scalar = get.number("query_pre_attn_scalar", 256.0)
    each = get.data.get("rope_parameters")
    if each is None:  # transformers 4
        whole = {"rope_theta": 1e6} | {k: v for k, v in get.data.items() if k != "rope_theta" or v is not None}
        return Gemma(Rope(get.number("rope_local_base_freq", 10_000.0)), scalar), read_rope(Keys(whole, get.where))
    if not isinstance(each, dict) or any(not isinstance(each.get(kind) or {}, dict) for kind in (_FULL, _SLIDING)):
        raise get.wrong("rope_parameters", f"must be an object with {_FULL} and {_SLIDING}")

    def rope(kind: str, theta: float) -> Rope:
        section = {"rope_theta": theta, "rope_type": "default"} | (each.get(kind) or {})
        return read_rope(Keys(get.data | {"rope_parameters": section}, f"{get.where}: {kind}"))

    return Gemma(rope(_SLIDING, 10_000.0), scalar), rope(_FULL, 1e6)
