"""Makes the demo model's tokenizer: byte-level BPE with single digits, ChatML markers and a chat template.

Any text has an encoding (bytes are the base), whole common words are one token, and codes are spelled digit by digit.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from conversations import conversation
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCAB_SIZE = 2048
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Words keep their leading space; digits and capital letters inside codes stand alone.
_PIECES = Regex(r"[0-9]|[A-Z](?=[A-Z0-9])|(?<=[A-Z0-9])[A-Z]| ?[A-Za-z][a-z]+| ?\p{L}+| ?[^\s\p{L}0-9]+|\s+(?!\S)|\s")


def corpus(seed: int = 7, count: int = 6000) -> list[str]:
    """Plain text of `count` generated conversations."""
    rng = random.Random(seed)
    texts = []
    for _ in range(count):
        talk = conversation(rng, 300, lambda ms: sum(len(m["content"]) for m in ms) // 4)
        texts.append("".join(f"{m['role']}\n{m['content']}\n" for m in talk.messages))
    return texts


def build(directory: Path) -> None:
    """Train the tokenizer and write `tokenizer.json` and `tokenizer_config.json` into `directory`."""
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_PIECES, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tok.train_from_iterator(corpus(), trainer)
    tok.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 16384,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    build(Path(__file__).parent)
