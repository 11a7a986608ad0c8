"""Makes the demo model's tokenizer: whole words of the phrasings are one token each, every other word is spelled byte
by byte.

No merges: a word is in the vocabulary or its bytes are. So every name, known or not, is copied in the same way, letter
by letter. Digits stand alone. Any text has an encoding.
"""

from __future__ import annotations

import collections
import json
import random
from pathlib import Path

from conversations import conversation
from phrasings import words_of_phrasings
from small_talk import IDLE, SMALL_TALK
from teller import Teller
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from words import COMMON, NoWords

VOCAB_SIZE = 2560
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{%- macro described(tools) %}{{ '\n\nTools:' }}{% for tool in tools %}{% set f = tool['function'] %}{{ '\n' + "
    "f['name'] + '(' }}"
    "{% if f['parameters'] and f['parameters']['properties'] %}{{ f['parameters']['properties'] | join(', ') }}{% "
    "endif %}{{ ')' }}"
    "{% if f['description'] %}{{ ': ' + f['description'] }}{% endif %}{% endfor %}{% endmacro %}"
    "{%- if tools and messages[0]['role'] != 'system' %}{{ '<|im_start|>system' + described(tools) + "
    "'<|im_end|>\n' }}{% endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{% if tools and loop.first and message['role'] == 'system' %}{{ described(tools) }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}{% set f = call['function'] %}"
    "{{ ('\n' if message['content'] or not loop.first else '') + '<tool_call>\n{\"name\": \"' + f['name'] + '\", "
    '"arguments": \' }}'
    "{{ f['arguments'] if f['arguments'] is string else f['arguments'] | tojson }}{{ '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Words keep their leading space; digits and line breaks stand alone.
_PIECES = Regex(r"[0-9]|'(?:s|m|re|ve|d|ll|t)\b| ?\p{L}+| ?[^\s\p{L}0-9]+|\s+(?!\S)|\s")


def pieces(text: str, cutter: pre_tokenizers.PreTokenizer) -> list[str]:
    """The text's words in the letters in which byte-level tokenizers spell bytes."""
    return [piece for piece, _ in cutter.pre_tokenize_str(text)]


def _capitalised(word: str) -> str:
    return word[0].upper() + word[1:]


def vocabulary(cutter: pre_tokenizers.PreTokenizer, seed: int = 7, count: int = 5000) -> dict[str, int]:
    """Specials, the 256 bytes, the words of the phrasings (values left out) and COMMON, most frequent first."""
    rng = random.Random(seed)
    found: collections.Counter[str] = collections.Counter()
    teller = Teller(rng, words=NoWords(rng))
    for _ in range(count):
        talk = conversation(
            rng, 400, lambda ms: sum(len(m["content"]) for m in ms) // 3, structured=True, teller=teller
        )
        listed = [t["function"] for t in talk.tools]
        texts = [m["content"] for m in talk.messages] + [
            f"\n{f['name']}({', '.join(f['parameters']['properties'])}): {f['description']}" for f in listed
        ]
        found.update(p for text in texts for p in pieces(text, cutter))
    found.update(p for pair in SMALL_TALK for text in pair for p in pieces(text, cutter))
    found.update(p for text in IDLE for p in pieces(text, cutter))
    known = {text: n for n, text in enumerate([*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    roles = ["system", "user", "assistant", "tool", "Tools"]
    always = [*roles, *(p for word in COMMON for p in pieces(f" {word}", cutter)), *COMMON]
    inside, first = words_of_phrasings()
    for text in (
        *(f" {w}" for w in inside),
        *first,
        *(_capitalised(w) for w in first),
        *(f" {_capitalised(w)}" for w in first),
    ):
        always += pieces(text, cutter)
    for piece in [*always, *(p for p, _ in found.most_common())]:
        if len(known) < VOCAB_SIZE and not (
            len(piece) == 2 and piece[0] == "Ġ" and piece[1].isupper() and piece != "ĠI"
        ):
            known.setdefault(piece, len(known))
    return known


def build(directory: Path) -> None:
    """Make the tokenizer and write `tokenizer.json` and `tokenizer_config.json` into `directory`."""
    cutter = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_PIECES, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tok = Tokenizer(models.BPE(vocabulary(cutter), [], ignore_merges=True))
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = cutter
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(SPECIALS)
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
