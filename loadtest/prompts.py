"""Text made from block ids, so that equal prefixes of a trace give equal text.

The word at each token position of a block depends only on the block's id and the position. A prompt is the words of its
blocks, each block scaled down from `block_tokens` tokens. Words are single tokens of the demo model's tokenizer (and of
most others), so a word is about a token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

_WORD_LIST = (
    "the about like live you lives colour order than for number code have favourite called name time with best "
    "remember will "
    "that likes noted little usual more know your star some many centuries written lot look closely starts looking "
    "learn most "
    "think people older they same never but stay change slowly very large small good enjoyed company ever almost "
    "count find "
    "world every country often adults better understand home can help ordered garden hamster turtle cat rabbit "
    "goat parrot dog "
    "horse clock garage attic safe gate studio lock locker cell cellar morning library vault later ask facts lab "
    "office "
    "painting island kites islands tea birds volcanoes sugar train bees trains honey paper trees forests poetry "
    "clocks summer "
    "wind windmills owls bridges autumn horses chess castles map bread markets maps book spices books deserts "
    "storms rivers "
    "glass music lighthouses gardens salt caves fox foxes stars whales coffee spring iron winter glacier glaciers "
    "mountains "
    "oceans cheese kettle wool clouds ship ships camera indigo bicycle orange cyan vase kite violin blanket jacket "
    "table silver "
    "grey mirror white car blue carpet lilac tent lamp umbrella lime keyboard telescope drum bronze yellow teal "
    "brown pink "
    "turquoise magenta tell this what ivory coral conversation crimson guitar green scarlet backpack olive maroon "
    "well how "
    "thank black red violet amber printer radio gold model piano chair monitor"
)
WORDS = tuple(_WORD_LIST.split())


def block_words(block_id: int, count: int) -> list[str]:
    """The first `count` words of a block."""
    stream = hashlib.shake_128(b"upbeat block %d" % block_id).digest(2 * count)
    return [WORDS[int.from_bytes(stream[2 * i : 2 * i + 2], "little") % len(WORDS)] for i in range(count)]


def prompt_words(
    block_ids: Sequence[int], block_tokens: int, scale: float, start_tokens: int, end_tokens: int
) -> list[str]:
    """The words of the prompt's tokens [start_tokens, end_tokens) of the trace, scaled.

    scale: words a trace token, above 0. The words of [a, b) and [b, c) together are those of [a, c). Positions past the
    last block continue it.
    """
    words: list[str] = []
    for index, block_id in enumerate(block_ids):
        first = index * block_tokens
        last = first + block_tokens if index + 1 < len(block_ids) else max(first + block_tokens, end_tokens)
        lo, hi = max(first, start_tokens), min(last, end_tokens)
        if lo < hi:
            origin = scaled(first, scale)
            words += block_words(block_id, scaled(hi, scale) - origin)[scaled(lo, scale) - origin :]
    return words


def scaled(tokens: int, scale: float) -> int:
    """A position or length of the trace, in words."""
    return int(tokens * scale + 0.5)
