"""Weights of a Llama-family directory as a GGUF file, in an environment that has `gguf`:

    python gguf_model.py DIRECTORY FILE bfloat16|float16

Norms are float32. Query and key rows go in the order in which llama.cpp rotates them. The tokenizer is byte-level BPE;
llama.cpp splits words by GPT-2's rule, which gives the same tokens for plain words.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_NORMAL, _CONTROL, _UNUSED = 1, 3, 5
#: GGUF's names of a layer's tensors.
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def main(directory: Path, file: Path, bits: str) -> None:
    """Write the file; `bits` is of its matrices."""
    config = json.loads((directory / "config.json").read_text())
    draft = file.with_suffix(".part")
    writer = gguf.GGUFWriter(str(draft), "llama")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    kinds = {"bfloat16": gguf.LlamaFileType.MOSTLY_BF16, "float16": gguf.LlamaFileType.MOSTLY_F16}
    writer.add_file_type(kinds[bits])
    add_tokenizer(writer, directory, config)
    for name, tensor in bfloat16_tensors(directory / "model.safetensors"):
        add_tensor(writer, name, tensor, config, bits)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    draft.replace(file)


def add_tokenizer(writer: Any, directory: Path, config: dict[str, Any]) -> None:
    """The vocabulary, padded to the model's size with tokens that nothing becomes."""
    described = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    said = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    by_id = {number: (text, _NORMAL) for text, number in described["model"]["vocab"].items()}
    by_id |= {t["id"]: (t["content"], _CONTROL if t["special"] else _NORMAL) for t in described["added_tokens"]}
    tokens = [by_id.get(number, (f"[unused{number}]", _UNUSED)) for number in range(config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in described["model"]["merges"]]
    )
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    template = directory / "chat_template.jinja"
    writer.add_chat_template(template.read_text() if template.exists() else said["chat_template"])


def bfloat16_tensors(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Name and bits (uint16) of every tensor. numpy knows no bfloat16, and torch is not needed for moving rows."""
    data = np.memmap(file, np.uint8, "r")
    length = int.from_bytes(data[:8].tobytes(), "little")
    for name, found in json.loads(data[8 : 8 + length].tobytes()).items():
        if name == "__metadata__":
            continue
        if found["dtype"] != "BF16":
            sys.exit(f"{file}: {name} is {found['dtype']}; only bfloat16 weights are converted")
        begin, end = (8 + length + offset for offset in found["data_offsets"])
        yield name, data[begin:end].view(np.uint16).reshape(found["shape"])


def add_tensor(writer: Any, name: str, bits: np.ndarray, config: dict[str, Any], kind: str) -> None:
    """Add a tensor under GGUF's name."""
    if name in _TOP:
        named = _TOP[name]
    else:
        layer, _, part = name.removeprefix("model.layers.").partition(".")
        named = f"blk.{layer}.{_LAYER[part.removesuffix('.weight')]}.weight"
        heads = {
            "self_attn.q_proj.weight": "num_attention_heads",
            "self_attn.k_proj.weight": "num_key_value_heads",
        }.get(part)
        if heads is not None:  # halves of a head, as Hugging Face has them, to pairs, as llama.cpp rotates them
            rows, width = bits.shape
            count = config[heads]
            bits = bits.reshape(count, 2, rows // count // 2, width).swapaxes(1, 2).reshape(rows, width)
    if bits.ndim == 1:
        writer.add_tensor(named, (bits.astype(np.uint32) << 16).view(np.float32))
    elif kind == "float16":
        writer.add_tensor(named, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float16))
    else:
        writer.add_tensor(named, np.ascontiguousarray(bits).view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
