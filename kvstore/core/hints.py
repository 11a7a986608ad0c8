"""What a hint has a store do: the session rises, its manifest is read if others have served it, and its cache is brought into the arena."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from contracts.ids import SessionKey
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.again import Again
from kvstore.core.index import Index
from kvstore.core.loads import Loads
from kvstore.core.sessions import Advice, Sessions

#: Owner of the loads that hints begin.
_ADVISORY = "advisory"


class Hints:
    """See the module. Invariant: a session is tried again (`Again`) only while its hint is here."""

    def __init__(self, node: str, index: Index, sessions: Sessions, loads: Loads, out: list[do.Instruction]) -> None:
        self._node, self._index, self._sessions, self._loads, self._out = node, index, sessions, loads, out
        self._last: dict[SessionKey, ev.Advised] = {}  #: of each advised session
        self._again = Again()
        self._fetching: set[SessionKey] = set()  #: whose manifest is being read from the blob tier
        self._numbers = 0

    @property
    def sessions(self) -> Container[SessionKey]:
        """Those that are advised."""
        return self._last

    @property
    def waiting(self) -> bool:
        """Something is to be done as time passes."""
        return bool(self._loads.short) or self._again.waiting

    def advise(self, event: ev.Advised) -> None:
        """A hint: the session rises at once; its manifest is read anew when the session was elsewhere."""
        arrival = event.now + event.arrival_s
        self._sessions.advise(event.session, Advice(event.priority, arrival, event.now + event.lifetime_s, event.device))
        self._last[event.session] = event
        self._again.forget(event.session)
        if event.session in self._fetching:
            return
        if self._others(event.sources) or event.session not in self._index.manifests:
            self._fetch(event.session)
        else:
            self._bring(event)

    def turn_comes(self, session: SessionKey, sources: Sequence[str]) -> None:
        """Its request is here. If others have served the session, its manifest here may be an old one, or none."""
        if self._others(sources) and session not in self._fetching:
            self._fetch(session)

    def turn_begun(self, session: SessionKey) -> None:
        """Its request's load has begun: what that does not want of the hint's nobody does."""
        self._end(session)

    def fetched(self, session: SessionKey, now: float) -> None:
        """Its manifest has been read, if there is one."""
        self._fetching.discard(session)
        hint = self._last.get(session)
        if hint is not None and self._sessions.live(session, now):
            self._bring(hint)

    def attached(self, now: float) -> None:
        """A worker is here: what was advised before it came is offered to it now."""
        for session, hint in list(self._last.items()):
            if session not in self._fetching and self._sessions.live(session, now):
                self._bring(hint)

    def forget(self, session: SessionKey) -> None:
        """It is not coming."""
        self._last.pop(session, None)
        self._again.forget(session)
        self._end(session)

    def tick(self, now: float) -> None:
        """Time passed: hints end, and those whose load ended with less than it wanted, for want of room, are tried again."""
        for session in [s for s in self._last if not self._sessions.live(s, now)]:
            del self._last[session]
            self._again.forget(session)
        for session in self._loads.short:
            if session in self._last:
                self._again.short(session, now)
        self._loads.short.clear()
        for session in self._again.due(now):
            if session not in self._fetching:
                self._bring(replace(self._last[session], now=now))

    def _others(self, sources: Sequence[str]) -> tuple[str, ...]:
        return tuple(s for s in sources if s != self._node)

    def _fetch(self, session: SessionKey) -> None:
        self._fetching.add(session)
        self._out.append(do.FetchManifest(session))

    def _bring(self, hint: ev.Advised) -> None:
        """Into the arena, as a load that nobody copies from."""
        manifest = self._index.manifests.get(hint.session)
        if manifest is None or not manifest.keys:
            self._out.append(do.Counted("advised_unknown_sessions"))
            return
        for ident in self._loads.of_session(hint.session, ev.LoadKind.ADVISED):
            if self._loads.repeated(ident, manifest.keys, hint.now):
                return
            self._loads.cancel(ident)
        self._numbers += 1
        wants = [(key, ()) for key in manifest.keys]
        ident, kind, sources = (_ADVISORY, str(self._numbers)), ev.LoadKind.ADVISED, self._others(hint.sources)
        self._loads.begin(ev.LoadWanted(ident, kind, hint.session, manifest.fingerprint, wants, sources, hint.priority, hint.now))

    def _end(self, session: SessionKey) -> None:
        for ident in self._loads.of_session(session, ev.LoadKind.ADVISED):
            self._loads.cancel(ident)

    def validate(self) -> None:
        """Raise AssertionError when the invariant does not hold."""
        assert self._again.sessions <= self._last.keys()
