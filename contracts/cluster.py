"""What is derived from the cluster secret, and may be shown to others. None of it leads back to the secret."""

from __future__ import annotations

from blake3 import blake3


def secret_id(secret: bytes) -> str:
    """Names the secret: 16 hexadecimal digits. Services of one fleet have equal ids."""
    return blake3(secret, derive_key_context="upbeat 2026 id of the cluster secret").hexdigest(length=8)


def log_key(secret: bytes) -> bytes:
    """The 32-byte key of the hashes that stand for ids of sessions and users in logs."""
    return blake3(secret, derive_key_context="upbeat 2026 ids in logs").digest()
