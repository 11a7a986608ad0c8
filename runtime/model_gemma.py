"""What Gemma 3's text models compute otherwise than the Llama family, as a config.json describes it.

Norms multiply by 1 + weight, and also follow attention and MLP; embeddings are multiplied by the root of the hidden
size; the gate is GELU; and most layers have a window, with a rotary embedding of their own. A model that also reads
images has its text model's keys in `text_config`; published ones leave out what transformers takes by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runtime.elsewhere import VLLM
from runtime.model_keys import Keys
from runtime.model_rope import Rope, read_rope

#: The architecture of models that also read images.
GEMMA_WITH_IMAGES = "Gemma3ForConditionalGeneration"
_GELU = "gelu_pytorch_tanh"
#: Keys that must be absent, null or false.
_UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
_FULL, _SLIDING = "full_attention", "sliding_attention"
#: Values of absent keys, as in transformers' Gemma3TextConfig.
_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
#: Keys beside `text_config` that also hold for the text model, and before its own.
_OF_ALL = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings", "quantization_config", "quantization")


@dataclass(frozen=True, slots=True)
class Gemma:
    """local_rope: the rotary embedding of layers with a window. query_scalar: attention's scores are divided by its
    root, instead of head_dim's."""

    local_rope: Rope
    query_scalar: float


def gemma_keys(data: dict[str, Any], architecture: str, where: str) -> Keys:
    """The keys of a Gemma 3 text model, or of the text model within one that reads images. Raises ConfigError."""
    said = data
    if architecture == GEMMA_WITH_IMAGES:
        said = data.get("text_config")  # type: ignore[assignment]
        if not isinstance(said, dict):
            raise Keys(data, where).wrong("text_config", "must be an object; download the model again")
        said = said | {key: data[key] for key in _OF_ALL if data.get(key) is not None}
        where = f"{where}: text_config"
    return Keys(_DEFAULTS | {k: v for k, v in said.items() if v is not None or k not in _DEFAULTS}, where)


def read_gemma(get: Keys) -> tuple[Gemma, Rope]:
    """Of a Gemma 3 text model; and the rotary embedding of layers without a window. Raises ConfigError."""
    activation = get.data.get("hidden_activation") or get.data.get("hidden_act") or _GELU
    if activation != _GELU:
        raise get.wrong("hidden_activation", f"is not supported; supported: {_GELU}; or {VLLM}")
    for key in _UNSUPPORTED:
        if get.data.get(key):
            raise get.wrong(key, f"is not supported; {VLLM}")
    each, stretched = get.data.get("rope_parameters") or {}, get.data.get("rope_scaling") or {}
    if not isinstance(each, dict) or not set(each) <= {_FULL, _SLIDING}:
        raise get.wrong("rope_parameters", f"must be an object with {_FULL} and {_SLIDING} only")
    if not isinstance(stretched, dict):
        raise get.wrong("rope_scaling", "must be an object")

    def rope(kind: str, theta: float, more: dict[str, Any]) -> Rope:
        own = each.get(kind) or {}
        if not isinstance(own, dict):
            raise get.wrong("rope_parameters", f"must have an object for {kind}")
        section = {"rope_theta": theta} | own | more
        return read_rope(Keys(get.data | {"rope_parameters": section}, f"{get.where}: {kind}"))

    local = rope(_SLIDING, get.number("rope_local_base_freq", 10_000.0), {})
    whole = rope(_FULL, get.number("rope_theta", 1e6), stretched)
    return Gemma(local, get.number("query_pre_attn_scalar", 256.0)), whole
