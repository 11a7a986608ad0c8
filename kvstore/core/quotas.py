"""How much a tenant's sessions may hold in the slow tiers, and what goes when that is not enough.

What is counted: the bytes of the distinct chunks that the tenant's sessions name, as far as this node knows them: all
manifests are in the blob tier and are listed at the start and from time to time, and running turns are claims. A chunk key
holds the tenant's salt, so a chunk is one tenant's. There is no database: each node decides by what it knows, for the saves
that it is asked for, so a fleet may exceed a quota by what its nodes save between two listings.

A save that would exceed the quota makes the tenant's own least recently used sessions leave, in the order of victims; never
one whose turn is running, never another tenant's. They leave this node and the blob tier, as in expiry. When the tenant has
nothing else to give, the save's chunks beyond the quota are refused and counted: the request is answered all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from contracts.ids import SessionKey
from kvstore.core.events import SaveWanted
from kvstore.core.index import Index
from kvstore.core.instructions import Counted, Instruction
from kvstore.core.sessions import Sessions

#: Room is made up to this share of the quota beyond what is needed, so that sessions are not ranked for every save.
_HEADROOM_SHARE = 32
#: A tenant that had nothing to give is not asked again for this time.
_VAIN_S = 1.0


class Quotas:
    """See the module. `erase(session, now)` makes a session leave. default_bytes and by_tenant: 0 is no limit."""

    def __init__(
        self,
        index: Index,
        sessions: Sessions,
        out: list[Instruction],
        erase: Callable[[SessionKey, float], None],
        default_bytes: int,
        by_tenant: Mapping[str, int],
    ) -> None:
        self._index = index
        self._sessions = sessions
        self._out = out
        self._erase = erase
        self._default_bytes = default_bytes
        self._by_tenant = by_tenant
        self._vain: dict[str, float] = {}  #: tenant -> when it had nothing to give

    def limit_bytes(self, tenant: str) -> int:
        """The tenant's quota; 0: none."""
        return self._by_tenant.get(tenant, self._default_bytes)

    def used_bytes(self, tenant: str) -> int:
        """Of the chunks that its sessions name; those of models that this node has never seen are not counted."""
        return sum(self._index.named[tenant, fingerprint] * shape.chunk_bytes for fingerprint, shape in self._index.shapes.items())

    def beyond(self, event: SaveWanted) -> frozenset[int]:
        """Which chunks of the save, by index, the quota does not allow, after the tenant's older sessions made way."""
        tenant = event.session.tenant
        limit, shape = self.limit_bytes(tenant), self._index.shapes.get(event.fingerprint)
        if not limit or shape is None:
            return frozenset()
        new = [i for i, key in enumerate(event.keys) if key not in self._index.names]
        needed = len(new) * shape.chunk_bytes
        if self.used_bytes(tenant) + needed > limit and self._may_help(event.session, shape.chunk_bytes, limit, event.now):
            headroom = limit // _HEADROOM_SHARE // shape.chunk_bytes * shape.chunk_bytes
            self._make_room(event.session, limit - needed, headroom, event.now)
        allowed = max(0, limit - self.used_bytes(tenant)) // shape.chunk_bytes
        refused = frozenset(new[allowed:])
        if refused:
            self._out.append(Counted("saves_over_quota", len(refused)))
        return refused

    def _may_help(self, session: SessionKey, chunk_bytes: int, limit: int, now: float) -> bool:
        """Whether the session alone leaves room for one more chunk, and the tenant had something to give lately."""
        manifest = self._index.manifests.get(session)
        own = {*(manifest.keys if manifest else ()), *self._index.claims.get(session, ())}
        return (len(own) + 1) * chunk_bytes <= limit and now - self._vain.get(session.tenant, float("-inf")) > _VAIN_S

    def _make_room(self, session: SessionKey, goal: int, headroom: int, now: float) -> None:
        """Bring what the tenant's other sessions hold down to `goal`, and `headroom` below it."""
        tenant = session.tenant
        others = [s for s in self._index.manifests if s.tenant == tenant and s != session and s not in self._index.claims]
        others.sort(key=lambda s: (self._sessions.standing(s, now), s))
        gone = 0
        for other in others:
            if self.used_bytes(tenant) <= goal - headroom:
                break
            self._erase(other, now)
            gone += 1
        if gone:
            self._out.append(Counted("sessions_over_quota", gone))
        if self.used_bytes(tenant) > goal:
            self._vain[tenant] = now
