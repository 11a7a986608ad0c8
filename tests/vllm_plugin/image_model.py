"""A small random model that sees images (Idefics3: it loads without torchvision), and images for it."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.vllm_plugin.models import SMALL, sensitive_llama

SIDE, _PATCH, _SCALE, _VISION, _LAYERS = 224, 14, 2, 64, 2
#: Places that an image takes, all of one token whatever it shows.
IMAGE_TOKENS = (SIDE // _PATCH // _SCALE) ** 2
_TOKENS = ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
_FIRST_TOKEN = SMALL["vocab_size"]
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}{% else %}<image>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def seeing_llama(directory: Path) -> Path:
    """`sensitive_llama` with eyes, written into `directory`."""
    text_shape = SMALL | {"vocab_size": _FIRST_TOKEN + 64}
    sensitive_llama(directory, text_shape)
    text = load_file(directory / "model.safetensors")
    weights = {name.replace("model.", "model.text_model.", 1): w for name, w in text.items()}
    save_file(weights | _eyes(), directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": _FIRST_TOKEN,
        "scale_factor": _SCALE,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "text_config": json.loads((directory / "config.json").read_text()),
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": _VISION,
            "intermediate_size": 2 * _VISION,
            "num_hidden_layers": _LAYERS,
            "num_attention_heads": 4,
            "image_size": SIDE,
            "patch_size": _PATCH,
        },
    }
    images = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": False,
        "size": {"longest_edge": SIDE},
        "max_image_size": {"longest_edge": SIDE},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.3, 0.3, 0.3],
    }
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": IMAGE_TOKENS}
    for name, content in (
        ("config.json", config),
        ("preprocessor_config.json", images | {"processor_class": "Idefics3Processor"}),
        ("processor_config.json", processor),
    ):
        (directory / name).write_text(json.dumps(content))
    _add_tokens(directory)
    return directory


def _eyes() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    weights = {
        "model.connector.modality_projection.proj.weight": random(SMALL["hidden_size"], _VISION * _SCALE**2),
        "model.vision_model.embeddings.patch_embedding.weight": random(_VISION, 3, _PATCH, _PATCH),
        "model.vision_model.embeddings.patch_embedding.bias": torch.zeros(_VISION),
        "model.vision_model.embeddings.position_embedding.weight": random((SIDE // _PATCH) ** 2, _VISION),
    }
    norms, linears = ["post_layernorm"], []
    for layer in range(_LAYERS):
        at = f"encoder.layers.{layer}."
        norms += [at + "layer_norm1", at + "layer_norm2"]
        linears += [(at + f"self_attn.{name}", _VISION, _VISION) for name in ("q_proj", "k_proj", "v_proj", "out_proj")]
        linears += [(at + "mlp.fc1", 2 * _VISION, _VISION), (at + "mlp.fc2", _VISION, 2 * _VISION)]
    for name in norms:
        weights[f"model.vision_model.{name}.weight"] = torch.ones(_VISION)
        weights[f"model.vision_model.{name}.bias"] = torch.zeros(_VISION)
    for name, rows, width in linears:
        weights[f"model.vision_model.{name}.weight"] = random(rows, width)
        weights[f"model.vision_model.{name}.bias"] = torch.zeros(rows)
    return weights


def _add_tokens(directory: Path) -> None:
    file = directory / "tokenizer.json"
    described = json.loads(file.read_text(encoding="utf-8"))
    like = described["added_tokens"][0]
    for number, token in enumerate(_TOKENS):
        described["added_tokens"].append(like | {"id": _FIRST_TOKEN + number, "content": token})
    file.write_text(json.dumps(described), encoding="utf-8")
    told: dict[str, Any] = json.loads((directory / "tokenizer_config.json").read_text())
    told.pop("chat_template", None)
    (directory / "tokenizer_config.json").write_text(json.dumps(told))
    (directory / "chat_template.jinja").write_text(_TEMPLATE)


def image(red: int, green: int, blue: int) -> str:
    """A PNG of one colour, `SIDE` pixels a side, as a data: URL."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + bytes((red, green, blue)) * SIDE) * SIDE
    size = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + part(b"IHDR", size) + part(b"IDAT", zlib.compress(rows)) + part(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()
