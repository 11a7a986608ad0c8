"""API keys in configurations: in full, or as `sha256:` and the key's hexadecimal SHA-256.

Keys of `upbeat keys new` have 256 random bits, so a plain hash is as safe as a slow or salted one. Hashes of short,
hand-made keys could be reversed by trying, so `hashed` refuses them.
"""

from __future__ import annotations

import base64
import hashlib
import re

PREFIX = "sha256:"
#: Bytes of randomness in a new key.
KEY_BYTES = 32
#: The shortest key that may be kept as a hash.
MIN_HASHED_CHARS = 24
_HASHED = re.compile(r"sha256:[0-9a-f]{64}")


def new_key(random: bytes) -> str:
    """The key made of `KEY_BYTES` random bytes."""
    return "upb-" + base64.urlsafe_b64encode(random).decode().rstrip("=")


def digest(key: str) -> bytes:
    """The SHA-256 of the key that a caller sent."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def configured_digest(configured: str) -> bytes:
    """The SHA-256 of a configured key, given in full or hashed."""
    return bytes.fromhex(configured[len(PREFIX) :]) if is_hashed(configured) else digest(configured)


def is_hashed(configured: str) -> bool:
    """Whether a configured key is given as its hash."""
    return _HASHED.fullmatch(configured) is not None


def check_configured(configured: str) -> str:
    """Returns `configured`. Raises ValueError, with a remedy, for a malformed hash."""
    if configured.startswith(PREFIX) and not is_hashed(configured):
        raise ValueError("it is not sha256: and 64 hexadecimal digits, as `upbeat keys new` prints them")
    return configured


def hashed(key: str) -> str:
    """The configured form of a key, as a hash. Raises ValueError when the key is shorter than MIN_HASHED_CHARS."""
    if len(key) < MIN_HASHED_CHARS:
        raise ValueError(f"a key of {len(key)} characters could be found from its hash; take one of `upbeat keys new`")
    return PREFIX + digest(key).hex()
