"""Makes random-weight models of a given shape, so that benchmarks need no download.

    .venv/bin/python -m loadtest.random_model --shape 131m --out DIR

The result is a Hugging Face directory: config.json, model.safetensors, and the demo model's tokenizer. The model's
vocabulary may be larger than the tokenizer's; the extra ids have no text.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).resolve().parent.parent / "models" / "demo"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_DEVIATION = 0.02
#: `worker.granule_bytes`.
_GRANULE_BYTES = 2 << 20

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": 2,
}

#: Shapes with much KV for their computation.
_MUCH_KV: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 2560,
    "max_position_embeddings": 16_384,
    "tie_word_embeddings": True,
}
#: Shapes by name: keys of config.json over the Llama defaults above, and the type they are stored in.
SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "tiny": (
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 2560,
            "max_position_embeddings": 16_384,
            "tie_word_embeddings": True,
        },
        "float32",
    ),
    # Little computation, 24 KiB of KV a token.
    "roomy": (_MUCH_KV | {"intermediate_size": 512}, "float32"),
    # 10 M parameters with the KV of a model ten times its size, 12 KiB a token: see bench/hbm_pressure/README.md.
    "shallow": (_MUCH_KV | {"intermediate_size": 704}, "bfloat16"),
    "131m": (
        {
            "hidden_size": 1024,
            "intermediate_size": 2592,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "vocab_size": 4096,
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": True,
        },
        "bfloat16",
    ),
    # As deep as models of billions, for mechanisms that work by layers.
    "200m": (
        {
            "hidden_size": 1024,
            "intermediate_size": 1792,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "vocab_size": 4096,
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": True,
        },
        "bfloat16",
    ),
    # An 8B model of the Llama family.
    "8b": (
        {
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128_256,
            "rope_theta": 500_000.0,
            "max_position_embeddings": 65_536,
        },
        "bfloat16",
    ),
}


def tensor_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a Llama model with this config.json, in file order."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        for name, rows, width in (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, width)
        for name, rows, width in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            yield f"{prefix}mlp.{name}_proj.weight", (rows, width)
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings", False):
        yield "lm_head.weight", (vocab, hidden)


def parameters(config: dict[str, Any]) -> int:
    """Number of parameters of a model with this config.json."""
    return sum(math.prod(shape) for _, shape in tensor_shapes(config))


def weight_bytes(config: dict[str, Any], number_bytes: int = 2) -> int:
    """Device memory of weights of `number_bytes` each: each layer, and the rest, rounded up to whole granules."""
    spans: dict[str, int] = {}
    for name, shape in tensor_shapes(config):
        span = name.split(".")[2] if ".layers." in name else ""
        spans[span] = spans.get(span, 0) + number_bytes * math.prod(shape)
    return sum(-(-size // _GRANULE_BYTES) * _GRANULE_BYTES for size in spans.values())


def make_random_model(directory: Path, config: dict[str, Any], seed: int, dtype: str) -> Path:
    """Write a model into `directory` and return it: weights are normal with deviation 0.02, norms are one.

    config: keys of config.json over the Llama defaults. The same arguments give the same bytes on the same device: a
    CUDA device where there is one, else the CPU. Raises ValueError when the vocabulary is smaller than the tokenizer's.
    """
    import torch
    from safetensors.torch import save_file

    config = _LLAMA | config | {"dtype": dtype, "torch_dtype": dtype}
    known = _tokenizer_size()
    if int(str(config["vocab_size"])) < known:
        raise ValueError(f"vocab_size {config['vocab_size']} is below the tokenizer's {known}; give at least that")
    directory.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    kind: torch.dtype = getattr(torch, dtype)
    tensors = {
        name: torch.ones(shape, dtype=kind)
        if len(shape) == 1
        else (torch.randn(shape, generator=generator, device=device) * _DEVIATION).to("cpu", kind)
        for name, shape in tensor_shapes(config)
    }
    temporary = directory / "model.safetensors.part"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.replace(directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in _TOKENIZER_FILES:
        if (TOKENIZER / name).exists():
            shutil.copyfile(TOKENIZER / name, directory / name)
    return directory


def _tokenizer_size() -> int:
    """One more than the tokenizer's highest id."""
    described = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))
    highest: int = max([*described["model"]["vocab"].values(), *(t["id"] for t in described["added_tokens"])])
    return highest + 1


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=".venv/bin/python -m loadtest.random_model", description="Make a random-weight model of a given shape."
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory to write; made when missing")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    config, dtype = SHAPES[arguments.shape]
    try:
        directory = make_random_model(arguments.out, config, arguments.seed, dtype)
    except ModuleNotFoundError as e:
        sys.exit(
            f"loadtest.random_model: {sys.executable} has no module {e.name}; "
            "run .venv/bin/python -m loadtest.random_model (`make up` makes .venv)"
        )
    print(f"{directory}: {parameters(_LLAMA | config) / 1e6:.1f} M parameters in {dtype}, seed {arguments.seed}")


if __name__ == "__main__":
    main()
