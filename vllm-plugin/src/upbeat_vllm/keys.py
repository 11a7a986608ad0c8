"""What the KV of a request's chunks depends on besides its tokens: images and where they lie, a LoRA adapter.

A request whose inputs cannot be named (prompt embeddings) is not cached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgpack


class Item(NamedTuple):
    """A multimodal input: its content's hash, and its placeholder tokens `[offset, offset + length)`."""

    identifier: str
    offset: int
    length: int


def extras(items: Sequence[Item], adapter: bytes, chunk_tokens: int) -> Mapping[int, bytes]:
    """By number of the chunk, `extra` of `contracts.kv.chunk_keys`: items of one size share placeholder ids, so each
    chunk names those it holds, with their offset in it. adapter: the digest of the LoRA adapter, empty without one."""
    named: dict[int, list[object]] = {}
    for item in items:
        first, last = item.offset // chunk_tokens, (item.offset + max(item.length, 1) - 1) // chunk_tokens
        for chunk in range(first, last + 1):
            named.setdefault(chunk, []).append([item.identifier, item.offset - chunk * chunk_tokens])
    if adapter:
        named.setdefault(0, []).insert(0, adapter)
    return {chunk: msgpack.packb(parts, use_bin_type=True) for chunk, parts in named.items()}
