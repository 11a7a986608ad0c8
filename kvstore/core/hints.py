"""What a store does for a hint: it protects the session from eviction, reads its manifest if another node has served
it, and brings its cache into the arena."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from contracts.ids import SessionKey
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.again import Again
from kvstore.core.index import Index
from kvstore.core.loads import Loads
from kvstore.core.sessions import MOST_ENDED, Advice, Expiries, Sessions
from kvstore.core.usefulness import Usefulness

#: Owner of the loads that hints begin.
ADVISORY = "advisory"


class Hints:
    """See the module. Invariant (`validate`): only sessions with a hint are retried (`Again`)."""

    def __init__(
        self,
        node: str,
        index: Index,
        sessions: Sessions,
        loads: Loads,
        usefulness: Usefulness,
        out: list[do.Instruction],
    ) -> None:
        self._node, self._index, self._sessions, self._loads, self._out = node, index, sessions, loads, out
        self._usefulness = usefulness
        self._last: dict[SessionKey, ev.Advised] = {}  #: by session, the latest hint
        self._expiries = Expiries(self._expires, self._last.__len__)
        self._behind = False  #: more hints have expired than one tick drops
        self._again = Again()
        self._fetching: set[SessionKey] = set()  #: sessions whose manifest is being read from blob
        self._numbers = 0

    @property
    def sessions(self) -> Container[SessionKey]:
        """The advised sessions."""
        return self._last

    @property
    def waiting(self) -> bool:
        """Whether ticks are needed."""
        return bool(self._loads.short) or self._again.waiting or self._behind

    def advise(self, event: ev.Advised) -> None:
        """A hint came. Its manifest is read again if another node may have served the session since."""
        arrival = event.now + event.arrival_s
        self._sessions.advise(
            event.session, Advice(event.priority, arrival, event.now + event.lifetime_s, event.device)
        )
        self._last[event.session] = event
        self._expiries.add(event.now + event.lifetime_s, event.session)
        self._again.forget(event.session)
        if event.session in self._fetching:
            return
        if self._others(event.sources) or event.session not in self._index.manifests:
            self._fetch(event.session)
        else:
            self._bring(event)

    def turn_comes(self, session: SessionKey, sources: Sequence[str]) -> None:
        """The session's request is here, and its hint has ended. If another node has served it, the manifest here may
        be outdated: read it."""
        self.ended(session)
        if self._others(sources) and session not in self._fetching:
            self._fetch(session)

    def turn_begun(self, session: SessionKey) -> None:
        """The request's load has begun: the hint's load is cancelled."""
        self._end(session)

    def ended(self, session: SessionKey) -> None:
        """The session was used, which ends its hint."""
        self._last.pop(session, None)
        self._again.forget(session)

    def fetched(self, session: SessionKey, now: float) -> None:
        """The session's manifest has been read, if there is one. The hint of a session that exists nowhere is
        forgotten: anybody can make up names."""
        self._fetching.discard(session)
        hint = self._last.get(session)
        if hint is not None and self._sessions.live(session, now):
            self._bring(hint)
        if hint is not None and session not in self._index.manifests and not self._sessions.is_used(session):
            self.ended(session)
            self._sessions.unadvise(session)

    def attached(self, now: float) -> None:
        """A worker attached: hints that came before it are handled again."""
        for session, hint in list(self._last.items()):
            if session not in self._fetching and self._sessions.live(session, now):
                self._bring(hint)

    def forget(self, session: SessionKey) -> None:
        """The hint was withdrawn, or the session erased."""
        self.ended(session)
        self._end(session)

    def tick(self, now: float) -> None:
        """Time passed: drop expired hints, and retry loads that ended incomplete for lack of room, unless what hints
        bring is mostly evicted before it is taken."""
        expired = self._expiries.due(now)
        self._behind = len(expired) == MOST_ENDED
        for session in expired:
            if not self._sessions.live(session, now):
                self.ended(session)
        for session in self._loads.short:
            if session in self._last:
                self._again.short(session, now)
        self._loads.short.clear()
        for session in self._again.due(now, self._chunks):
            if self._usefulness.wasteful(now):
                self._again.short(session, now)
            elif session not in self._fetching:
                self._bring(replace(self._last[session], now=now))

    def _expires(self, session: SessionKey) -> float | None:
        hint = self._last.get(session)
        return None if hint is None else hint.now + hint.lifetime_s

    def _chunks(self, session: SessionKey) -> int:
        manifest = self._index.manifests.get(session)
        return len(manifest.keys) if manifest is not None else 0

    def _others(self, sources: Sequence[str]) -> tuple[str, ...]:
        return tuple(s for s in sources if s != self._node)

    def _fetch(self, session: SessionKey) -> None:
        self._fetching.add(session)
        self._out.append(do.FetchManifest(session))

    def _bring(self, hint: ev.Advised) -> None:
        """Start an ADVISED load of all chunks in the manifest, of each what the next turn reads, unless one of the same
        chunks is open."""
        manifest = self._index.manifests.get(hint.session)
        if manifest is None or not manifest.keys:
            self._out.append(do.Counted("advised_unknown_sessions"))
            return
        for ident in self._loads.of_session(hint.session, ev.LoadKind.ADVISED):
            if self._loads.repeated(ident, manifest.keys, hint.now):
                return
            self._loads.cancel(ident)
        self._numbers += 1
        shape = self._index.shapes.get(manifest.fingerprint)
        layers = shape.read_after(len(manifest.keys)) if shape is not None else [()] * len(manifest.keys)
        wants = list(zip(manifest.keys, layers, strict=True))
        ident, kind, sources = (ADVISORY, str(self._numbers)), ev.LoadKind.ADVISED, self._others(hint.sources)
        self._loads.begin(
            ev.LoadWanted(ident, kind, hint.session, manifest.fingerprint, wants, sources, hint.priority, hint.now)
        )

    def _end(self, session: SessionKey) -> None:
        for ident in self._loads.of_session(session, ev.LoadKind.ADVISED):
            self._loads.cancel(ident)

    def validate(self) -> None:
        """Raise AssertionError when the invariant does not hold."""
        assert self._again.sessions <= self._last.keys()
