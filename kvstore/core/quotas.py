"""How much a tenant's sessions, and all sessions together, may hold in the slow tiers, and which sessions are erased
when that is exceeded.

Counted are the bytes of the distinct chunks that a tenant's sessions name, by the manifests and running turns that this
node knows. A chunk key holds the tenant's salt, so a chunk belongs to one tenant. Each node decides for its own saves:
a fleet may exceed a quota by what its nodes save between two listings.

A save that would exceed the quota erases the tenant's own least recently used sessions, in the order of victims, from
this node and the blob tier; never one with a running turn. If that is not enough, the save's chunks beyond the quota
are refused and counted; the request is still answered.

A save for which the blob tier has no room (`sized`) erases sessions of whichever tenant holds most, one after another.
The tier's use is what the shell measured last, plus what was granted here since, minus what was erased here.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

from contracts.ids import SessionKey
from contracts.kv import KvShape
from contracts.memory.victim_order import Standing
from kvstore.core.events import SaveWanted
from kvstore.core.index import Index
from kvstore.core.instructions import Counted, Instruction
from kvstore.core.sessions import Sessions

#: Up to this share of the limit is freed beyond what is needed, so that sessions are not ranked for every save.
_HEADROOM_SHARE = 32
#: A tenant with nothing to erase is not looked at again for this long.
_VAIN_S = 1.0


class Quotas:
    """See the module. `erase(session, now)` erases a session. default_bytes and by_tenant: 0 means no limit."""

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
        self._vain: dict[str, float] = {}  #: tenant -> when it had nothing to erase; "": all tenants
        #: Limit of the blob tier; None: no limit, or not known yet.
        self.total_bytes: int | None = None
        #: Estimated bytes in the blob tier.
        self.held_bytes = 0
        self._ranked: dict[str, list[tuple[Standing, SessionKey]]] = {}  #: by tenant; the next to be erased is last

    def limit_bytes(self, tenant: str) -> int:
        """The tenant's quota; 0 means none."""
        return self._by_tenant.get(tenant, self._default_bytes)

    def used_bytes(self, tenant: str) -> int:
        """Bytes of the chunks that the tenant's sessions name, without those of models unknown to this node."""
        return sum(
            self._index.named[tenant, fingerprint] * shape.chunk_bytes
            for fingerprint, shape in self._index.shapes.items()
        )

    @property
    def named_bytes(self) -> int:
        """Like `used_bytes`, for all tenants."""
        chunks = self._index.named_chunks
        return sum(chunks[fingerprint] * shape.chunk_bytes for fingerprint, shape in tuple(self._index.shapes.items()))

    def sized(self, limit_bytes: int | None, held_bytes: int) -> None:
        """The shell has measured the blob tier."""
        self.total_bytes, self.held_bytes = limit_bytes, held_bytes

    def follow(self, named_bytes: int) -> None:
        """Adjust `held_bytes` by how `named_bytes` has changed since it had the given value."""
        self.held_bytes = max(0, self.held_bytes + self.named_bytes - named_bytes)

    def beyond(self, event: SaveWanted) -> frozenset[int]:
        """Erase sessions as needed; returns the indices of the save's chunks that still exceed a limit."""
        tenant = event.session.tenant
        limit, total, shape = self.limit_bytes(tenant), self.total_bytes, self._index.shapes.get(event.fingerprint)
        if shape is None or (not limit and total is None):
            return frozenset()
        new = [i for i, key in enumerate(event.keys) if key not in self._index.names]
        needed, allowed = len(new) * shape.chunk_bytes, len(new)
        if limit:
            if self.used_bytes(tenant) + needed > limit and self._may_help(
                event.session, shape.chunk_bytes, limit, event.now, tenant
            ):
                self._make_room(event.session, limit - needed, _headroom(limit, shape), event.now)
            allowed = min(allowed, max(0, limit - self.used_bytes(tenant)) // shape.chunk_bytes)
        over_quota = len(new) - allowed
        if total is not None:
            needed = allowed * shape.chunk_bytes
            if self.held_bytes + needed > total and self._may_help(
                event.session, shape.chunk_bytes, total, event.now, ""
            ):
                self._make_room_in_all(event.session, total - needed, _headroom(total, shape), event.now)
            allowed = min(allowed, max(0, total - self.held_bytes) // shape.chunk_bytes)
        over_total = len(new) - over_quota - allowed
        for what, amount in (("saves_over_quota", over_quota), ("saves_over_blob", over_total)):
            if amount:
                self._out.append(Counted(what, amount))
        return frozenset(new[allowed:])

    def _may_help(self, session: SessionKey, chunk_bytes: int, limit: int, now: float, whose: str) -> bool:
        """Whether erasing others can help: the session alone leaves room for a chunk, and `whose` (a key of `_vain`)
        had something to erase lately."""
        manifest = self._index.manifests.get(session)
        own = {*(manifest.keys if manifest else ()), *self._index.claims.get(session, ())}
        return (len(own) + 1) * chunk_bytes <= limit and now - self._vain.get(whose, float("-inf")) > _VAIN_S

    def _make_room(self, session: SessionKey, goal: int, headroom: int, now: float) -> None:
        """Erase the tenant's other sessions until it holds `headroom` less than `goal`."""
        tenant = session.tenant
        others = [
            s for s in self._index.manifests if s.tenant == tenant and s != session and s not in self._index.claims
        ]
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

    def _make_room_in_all(self, session: SessionKey, goal: int, headroom: int, now: float) -> None:
        """Erase sessions, always of the tenant that holds most, until the blob tier holds `headroom` less than
        `goal`."""
        used = [(-self.used_bytes(tenant), tenant) for tenant in {tenant for tenant, _ in self._index.named}]
        heapq.heapify(used)
        gone, ranked = 0, False
        while self.held_bytes > goal - headroom and used:
            tenant = used[0][1]
            other = self._next(tenant, session, now)
            if other is None and not ranked:
                self._rank(now)
                ranked = True
                other = self._next(tenant, session, now)
            if other is None:
                heapq.heappop(used)
                continue
            self._erase(other, now)
            gone += 1
            heapq.heapreplace(used, (-self.used_bytes(tenant), tenant))
        if gone:
            self._out.append(Counted("sessions_over_blob", gone))
        if self.held_bytes > goal:
            self._vain[""] = now

    def _rank(self, now: float) -> None:
        """Rank all sessions: seconds for a million. Repeated only when the ranking is used up."""
        self._ranked = {}
        for session in self._index.manifests:
            self._ranked.setdefault(session.tenant, []).append((self._sessions.standing(session, now), session))
        for sessions in self._ranked.values():
            sessions.sort(reverse=True)

    def _next(self, tenant: str, but: SessionKey, now: float) -> SessionKey | None:
        """The tenant's next session to erase; skips sessions used since they were ranked, and running ones."""
        ranked = self._ranked.get(tenant, [])
        while ranked:
            standing, session = ranked.pop()
            if session == but or session in self._index.claims or session not in self._index.manifests:
                continue
            if self._sessions.standing(session, now) <= standing:
                return session
        return None


def _headroom(limit: int, shape: KvShape) -> int:
    return limit // _HEADROOM_SHARE // shape.chunk_bytes * shape.chunk_bytes
