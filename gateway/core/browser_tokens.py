"""Browser tokens: credentials for pages, which must not hold an API key.

A signed token permits sending and withdrawing hints for one session, or for sessions with a common id prefix, of one
tenant until it expires. Gateways store no tokens: the signing key is derived from a secret that all gateways of a
deployment share.

Pages send a token repeatedly, so replay is normal. A copy is worthless because a token expires soon, names its session,
and can be bound to the page's origin (docs/design/0017-browser-tokens.md).

Format: `ek_`, then base64url without padding of the claims as text and 16 bytes of keyed BLAKE3 over them. Each token
has one spelling.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from blake3 import blake3

from contracts.errors import Forbidden, Unauthorized

#: The prefix of OpenAI's ephemeral keys, too. API keys must not begin with it.
PREFIX = "ek_"
MIN_LIFE_S, MAX_LIFE_S, DEFAULT_LIFE_S = 10, 3600, 600
#: No valid token is longer.
MAX_TOKEN_CHARS = 1024
_CONTEXT = "upbeat gateway: browser tokens, version 1"
_SIGNATURE_BYTES = 16
_SEPARATOR = "|"
_EXACT, _PREFIXED = "=", "^"


@dataclass(frozen=True, slots=True)
class Grant:
    """What a token permits. session: the session id or, with `prefix`, the prefix of the ids. max_priority: the most
    urgent priority of its hints. origin: the only page origin that may send it, or empty. ends_s: expiry in seconds
    since the epoch."""

    tenant: str
    session: str
    prefix: bool
    max_priority: int
    origin: str
    ends_s: int

    def check_session(self, session_id: str, param: str) -> None:
        """Raises Forbidden, naming `param`, for a session that the grant does not cover."""
        if session_id != self.session and not (self.prefix and session_id.startswith(self.session)):
            raise Forbidden("this browser token is for another session", param=param, code="client_secret_session")

    def check_origin(self, origin: str | None) -> None:
        """Raises Forbidden when the token is bound to an origin other than `origin`."""
        if self.origin and origin != self.origin:
            raise Forbidden(
                "this browser token is bound to another origin", param="Origin", code="client_secret_origin"
            )


class BrowserTokens:
    """Signs and reads tokens. Immutable."""

    def __init__(self, secrets: Iterable[str]) -> None:
        """secrets: the same on every gateway of the deployment, in any order."""
        joined = b"\0".join(sorted(s.encode("utf-8", "surrogatepass") for s in secrets))
        self._key = blake3(joined, derive_key_context=_CONTEXT).digest()

    def sign(self, grant: Grant) -> str:
        """The token for `grant`, whose texts must not contain `|`: ids and tenants cannot, and the route checks
        origins."""
        kind = _PREFIXED if grant.prefix else _EXACT
        parts = (str(grant.ends_s), grant.tenant, kind + grant.session, str(grant.max_priority), grant.origin)
        assert not any(_SEPARATOR in part for part in parts)
        claims = _SEPARATOR.join(parts).encode()
        return PREFIX + _encode(claims + self._signature(claims))

    def read(self, token: str, now_s: float) -> Grant:
        """The grant of `token` at `now_s` (seconds since the epoch). Raises Unauthorized for an invalid or expired
        token."""
        if len(token) > MAX_TOKEN_CHARS:
            raise _wrong()
        try:
            signed = base64.b64decode(
                token[len(PREFIX) :] + "=" * (-(len(token) - len(PREFIX)) % 4), altchars=b"-_", validate=True
            )
        except (binascii.Error, ValueError):
            raise _wrong() from None
        claims, signature = signed[:-_SIGNATURE_BYTES], signed[-_SIGNATURE_BYTES:]
        # Refuse spare bits in the last character: they would give one token several spellings.
        if not hmac.compare_digest(self._signature(claims), signature) or PREFIX + _encode(signed) != token:
            raise _wrong()
        ends, tenant, session, max_priority, origin = claims.decode().split(_SEPARATOR)
        if now_s >= int(ends):
            raise Unauthorized("this browser token has expired; get a new one", code="client_secret_expired")
        return Grant(tenant, session[1:], session[0] == _PREFIXED, int(max_priority), origin, int(ends))

    def _signature(self, claims: bytes) -> bytes:
        return bytes(blake3(claims, key=self._key).digest(length=_SIGNATURE_BYTES))


def is_browser_token(credential: str | None) -> bool:
    """Whether a credential has a browser token's prefix."""
    return credential is not None and credential.startswith(PREFIX)


def _encode(signed: bytes) -> str:
    return base64.urlsafe_b64encode(signed).decode().rstrip("=")


def _wrong() -> Unauthorized:
    return Unauthorized("this is no browser token of this deployment", code="invalid_client_secret")
