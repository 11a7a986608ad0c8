"""API keys as configurations hold them: in full, or as `sha256:` and the hexadecimal SHA-256 of the key.

A key that `upbeat keys new` makes has 256 random bits, so that nothing can be found by trying, and one plain hash of it is as good as
any slow or salted one. The hash of a key that a person made up is worth less, which is why short ones are not hashed (`hashed`).
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
    """The key made of so many random bytes (`KEY_BYTES` of them)."""
    return "upb-" + base64.urlsafe_b64encode(random).decode().rstrip("=")


def digest(key: str) -> bytes:
    """The SHA-256 of a key as a caller presents it."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def configured_digest(configured: str) -> bytes:
    """The SHA-256 of the key that a configuration holds, in full or hashed."""
    return bytes.fromhex(configured[len(PREFIX) :]) if is_hashed(configured) else digest(configured)


def is_hashed(configured: str) -> bool:
    """Whether this is a key's hash and not a key."""
    return _HASHED.fullmatch(configured) is not None


def check_configured(configured: str) -> str:
    """`configured` when a configuration may hold it. Raises ValueError with a remedy: it looks like a hash and is none."""
    if configured.startswith(PREFIX) and not is_hashed(configured):
        raise ValueError("it is not sha256: and 64 hexadecimal digits, as `upbeat keys new` prints them")
    return configured


def hashed(key: str) -> str:
    """What a configuration holds instead of the key. Raises ValueError for a key that is short enough to be found by trying."""
    if len(key) < MIN_HASHED_CHARS:
        raise ValueError(f"a key of {len(key)} characters could be found from its hash; take one of `upbeat keys new`")
    return PREFIX + digest(key).hex()
