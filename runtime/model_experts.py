"""Mixtures of experts, as a config.json describes them (Qwen3-MoE): which layers have experts, and how a token chooses.

A layer's router gives each expert a probability. A token takes the `per_token` most probable ones, and adds their
outputs, weighted by these probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.model_keys import Keys


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a model.

    count: of a layer. per_token: of them that a token uses. size: intermediate size of one. norm: the chosen
    probabilities are divided by their sum. layers: of each layer, whether it has experts, or one MLP for all tokens.
    """

    count: int
    per_token: int
    size: int
    norm: bool
    layers: tuple[bool, ...]


def read_experts(get: Keys, layers: int) -> Experts | None:
    """The experts of a Qwen3-MoE model with so many layers; None: none of them has any. Raises ConfigError."""
    count = _count(get)
    step, dense = get.integer("decoder_sparse_step", 1), get.data.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(isinstance(n, bool) or not isinstance(n, int) for n in dense):
        raise get.wrong("mlp_only_layers", "must be a list of layers' numbers")
    sparse = tuple(layer not in dense and count > 0 and (layer + 1) % step == 0 for layer in range(layers))
    if not any(sparse):
        return None
    per_token = get.integer("num_experts_per_tok")
    if per_token > count:
        raise get.wrong("num_experts_per_tok", f"must be at most the number of experts, {count}")
    return Experts(count, per_token, get.integer("moe_intermediate_size"), get.boolean("norm_topk_prob", False), sparse)


def _count(get: Keys) -> int:
    """transformers 5 writes `num_local_experts`, 4 and published models have `num_experts`."""
    key = "num_local_experts" if get.data.get("num_experts") is None else "num_experts"
    count = get.integer(key, least=0)
    if get.data.get("num_local_experts") not in (None, count):
        raise get.wrong("num_local_experts", f"contradicts num_experts, {count}; download the model again")
    return count
