"""Which layers of a model see only the last tokens, as a config.json describes it."""

from __future__ import annotations

from runtime.model_keys import Keys

_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_windows(get: Keys, architecture: str, layers: int) -> tuple[int | None, ...]:
    """Of each layer, how many tokens a token sees, itself included; None: all. Raises ConfigError.

    Llama never has windows; Mistral has them in all layers; Qwen2 and Qwen3 in the layers that config.json names, if
    enabled; Qwen3-MoE in all layers, if enabled; Gemma 3 in the layers that config.json names, else in all but every
    sixth.
    """
    gemma = architecture.startswith("Gemma3")
    if architecture.startswith("Llama") or (get.data.get("sliding_window") is None and not gemma):
        return (None,) * layers
    window = 4096 if gemma and "sliding_window" not in get.data else get.integer("sliding_window")
    if architecture.startswith("Mistral"):
        return (window,) * layers
    if not gemma and not get.boolean("use_sliding_window", False):
        return (None,) * layers
    if architecture.startswith("Qwen3Moe"):
        return (window,) * layers
    kinds = get.data.get("layer_types")
    if kinds is None and gemma:
        pattern = get.integer("sliding_window_pattern", 6)
        return tuple(window if (layer + 1) % pattern else None for layer in range(layers))
    if kinds is None:
        full = get.integer("max_window_layers", layers, least=0)
        return tuple(window if layer >= full else None for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (_FULL, _SLIDING) for kind in kinds):
        raise get.wrong("layer_types", f"must name {_FULL} or {_SLIDING} for each of {layers} layers")
    return tuple(window if kind == _SLIDING else None for kind in kinds)
