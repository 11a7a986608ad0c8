"""The seed of each choice of a request.

Choice 0 has the request's seed, so that `n` does not change it; the others are derived. Every worker request carries a
seed (random if the caller gave none), so that it continues exactly on another worker.
"""

from __future__ import annotations

from blake3 import blake3

#: Seeds on the wire have 63 bits, which fit every consumer's integers.
SEED_MASK = (1 << 63) - 1


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index`, from 0 to 2**63 - 1."""
    if index == 0:
        return seed & SEED_MASK
    digest = blake3(f"upbeat choice {seed} {index}".encode()).digest(8)
    return int.from_bytes(digest, "little") & SEED_MASK
